// Normalisation with a residual behind it, and what a clamp behind the sum passes back.

#include <algorithm>
#include <cmath>

#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

TEST(residuals_are_added_before_the_activation_function) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : layouts()) {
      const Sample<Storage, Parameter> sample(layout);
      // Anything of the right size.
      const std::vector<Storage>& residual = sample.gradient;
      for (const Bounds<Parameter>& bounds : all_bounds<Parameter>()) {
        const Context here(text_of(layout) + ", " + text_of(bounds));
        const std::vector<Storage> output =
            normalised(sample, Clamp<Storage, Parameter>(bounds), residual.data());
        for (int64_t i = 0; i < layout.elements(); ++i) {
          const auto c = static_cast<size_t>(channel_of(layout, i));
          const double product = static_cast<double>(kernels::load(sample.input[i])) * sample.scale[c];
          const double addend = kernels::load(residual[i]);
          const double sum = product + sample.shift[c] + addend;
          const double expected = std::min<double>(std::max<double>(sum, bounds.low), bounds.high);
          const double size = std::abs(product) + std::abs(sample.shift[c]) + std::abs(addend);
          CHECK_NEAR(
              kernels::load(output[i]),
              expected,
              3 * kRounding<Parameter> * size + kRounding<Storage> * std::abs(expected));
        }
      }
    }
  });
}

// The gradient that passes is what the clamp's own gradient would be, and its sums are those of sum_gradients.
template <typename Storage, typename Parameter>
void check_passed(const Sample<Storage, Parameter>& sample, const Bounds<Parameter>& bounds) {
  const Clamp<Storage, Parameter> clamp(bounds);
  const std::vector<Storage> output = normalised(sample, clamp);
  BackwardPass<Storage, Parameter> expected(sample.layout);
  kernels::sum_gradients(
      sample.gradient.data(),
      forward_of(sample),
      clamp,
      expected.slices,
      0,
      expected.slices.tasks(),
      expected.sums());
  BackwardPass<Storage, Parameter> found(sample.layout);
  std::vector<Storage> passed(output.size());
  kernels::pass_and_sum_gradients(
      sample.gradient.data(),
      sum_of(sample, output, clamp),
      found.slices,
      0,
      found.slices.tasks(),
      passed.data(),
      found.sums());
  for (size_t i = 0; i < expected.sum.size(); ++i) {
    CHECK_EQUAL(found.sum[i], expected.sum[i]);
    CHECK_EQUAL(found.product[i], expected.product[i]);
  }
  for (size_t i = 0; i < output.size(); ++i) {
    const Parameter y = kernels::load(output[i]);
    const bool ends = (std::isfinite(bounds.low) && y <= bounds.low) || (std::isfinite(bounds.high) && y >= bounds.high);
    CHECK_EQUAL(kernels::load(passed[i]), ends ? Parameter{0} : kernels::load(sample.gradient[i]));
  }
}

TEST(what_passes_the_clamp_is_written_and_summed) {
  for_each_type([]<typename Storage, typename Parameter>() {
    std::vector<ChannelLayout> all = layouts();
    for (const ChannelLayout& layout : sliced_layouts()) {
      all.push_back(layout);
    }
    for (const ChannelLayout& layout : all) {
      const Sample<Storage, Parameter> sample(layout);
      for (const Bounds<Parameter>& bounds : all_bounds<Parameter>()) {
        const Context here(text_of(layout) + ", " + text_of(bounds));
        check_passed(sample, bounds);
      }
    }
  });
}

TEST(a_nan_passes_and_an_infinite_gradient_ends) {
  for_each_type([]<typename Storage, typename Parameter>() {
    Sample<Storage, Parameter> sample({1, 3, 1});
    const std::vector<Storage> output = {stored<Storage>(std::nan("")), stored<Storage>(0), stored<Storage>(7)};
    sample.gradient = {stored<Storage>(3), stored<Storage>(kInfinity), stored<Storage>(std::nan(""))};
    BackwardPass<Storage, Parameter> found(sample.layout);
    std::vector<Storage> passed(3);
    kernels::pass_and_sum_gradients(
        sample.gradient.data(),
        sum_of(sample, output, Clamp<Storage, Parameter>({0, 6})),
        found.slices,
        0,
        found.slices.tasks(),
        passed.data(),
        found.sums());
    const std::vector<Parameter> expected = {3, 0, 0};
    for (size_t i = 0; i < 3; ++i) {
      CHECK_EQUAL(kernels::load(passed[i]), expected[i]);
      CHECK_EQUAL(found.sum[i], static_cast<double>(expected[i]));
    }
  });
}

} // namespace
} // namespace torch_odt::tests
