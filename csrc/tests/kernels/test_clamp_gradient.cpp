// Where the gradient ends at the clamp: exactly where the stored output lies on a bound, whatever rounding did.

#include <algorithm>
#include <bit>
#include <cmath>

#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

// With these factors the input's gradient is what passes the clamp.
template <typename Storage, typename Parameter>
std::vector<Storage> passed_gradients(const Sample<Storage, Parameter>& sample, const Bounds<Parameter>& bounds) {
  std::vector<Parameter> ones(sample.mean.size(), Parameter{1});
  std::vector<Parameter> zeros(sample.mean.size(), Parameter{0});
  std::vector<Storage> result(sample.input.size());
  kernels::input_gradient_rows(
      sample.gradient.data(),
      forward_of(sample),
      Clamp<Storage, Parameter>(bounds),
      kernels::GradientFactors<Parameter>{ones.data(), zeros.data(), zeros.data()},
      sample.layout,
      0,
      rows_of(sample.layout),
      result.data());
  return result;
}

// Outputs are shifts here, one for each channel, and so can be any float.
TEST(next_to_a_bfloat16_bound_the_stored_output_decides) {
  constexpr int64_t kOutputs = 11;
  Sample<BFloat16, float> sample({1, kOutputs, 1});
  std::fill(sample.scale.begin(), sample.scale.end(), 1.0f);
  std::fill(sample.mean.begin(), sample.mean.end(), 0.0f);
  std::fill(sample.input.begin(), sample.input.end(), stored<BFloat16>(0));
  std::fill(sample.gradient.begin(), sample.gradient.end(), stored<BFloat16>(1));
  // All exponents, even and odd ends; beyond the largest finite bound there is no finite middle.
  for (const uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t size = 0; size < 0x7F7F; size += 7) {
      const uint32_t bits = sign | size;
      const float bound = kernels::load(BFloat16{static_cast<uint16_t>(bits)});
      const Context here("bound " + text_of(bound));
      size_t filled = 0;
      sample.shift[filled++] = bound;
      for (const float direction : {-INFINITY, INFINITY}) {
        // Rounding to bfloat16 changes in the middle between two of its numbers; around 0, between 0 and the smallest.
        const bool is_outwards = (bound < 0) == (direction < 0);
        const uint32_t half = bits << 16;
        const float middle = bound == 0 ? std::copysign(0x1p-134f, direction)
                                        : std::bit_cast<float>(is_outwards ? half + 0x8000u : half - 0x8000u);
        for (const float output :
             {std::nextafter(middle, -direction), middle, std::nextafter(middle, direction),
              std::nextafter(bound, direction), std::nextafter(bound, direction) * 2}) {
          sample.shift[filled++] = output;
        }
      }
      CHECK_EQUAL(filled, sample.shift.size());
      const std::vector<BFloat16> above = passed_gradients(sample, Bounds<float>{bound, INFINITY});
      const std::vector<BFloat16> below = passed_gradients(sample, Bounds<float>{-INFINITY, bound});
      for (size_t c = 0; c < filled; ++c) {
        const float output = kernels::load(stored<BFloat16>(sample.shift[c]));
        const Context of_output("output " + text_of(sample.shift[c]));
        CHECK_EQUAL(kernels::load(above[c]), output > bound ? 1.0f : 0.0f);
        CHECK_EQUAL(kernels::load(below[c]), output < bound ? 1.0f : 0.0f);
      }
    }
  }
}

// Outputs that cancel are nothing but rounding error: both passes have to make the same one.
TEST(both_passes_round_an_output_alike) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const int64_t run : {1, 17}) {
      Sample<Storage, Parameter> sample({1, 999, run});
      std::fill(sample.gradient.begin(), sample.gradient.end(), stored<Storage>(1));
      for (int64_t i = 0; i < sample.layout.elements(); ++i) {
        const auto c = static_cast<size_t>(channel_of(sample.layout, i));
        sample.input[i] = sample.input[c * static_cast<size_t>(run)];
        const volatile Parameter product = kernels::load(sample.input[i]) * sample.scale[c];
        sample.shift[c] = -product;
      }
      const std::vector<Storage> output = normalised(sample, Clamp<Storage, Parameter>({0, 6}));
      const std::vector<Storage> passed = passed_gradients(sample, Bounds<Parameter>{0, 6});
      BackwardPass<Storage, Parameter> whole(sample.layout);
      whole.run(sample, Clamp<Storage, Parameter>({0, 6}));
      for (int64_t i = 0; i < sample.layout.elements(); ++i) {
        const auto c = static_cast<size_t>(channel_of(sample.layout, i));
        const Parameter expected = kernels::load(output[i]) > 0 ? 1 : 0;
        CHECK_EQUAL(kernels::load(passed[i]), expected);
        CHECK_EQUAL(whole.sum[c], static_cast<double>(expected) * static_cast<double>(run));
      }
    }
  });
}

TEST(what_ends_is_zero_even_for_infinite_gradients) {
  for_each_type([]<typename Storage, typename Parameter>() {
    Sample<Storage, Parameter> sample({5, 9, 1});
    std::fill(sample.scale.begin(), sample.scale.end(), Parameter{0});
    std::fill(sample.shift.begin(), sample.shift.end(), Parameter{-1});
    for (size_t i = 0; i < sample.gradient.size(); ++i) {
      sample.gradient[i] = stored<Storage>(i % 2 == 0 ? kInfinity : std::nan(""));
    }
    for (const Storage& value : passed_gradients(sample, Bounds<Parameter>{0, 6})) {
      CHECK_EQUAL(kernels::load(value), Parameter{0});
    }
    BackwardPass<Storage, Parameter> whole(sample.layout);
    whole.run(sample, Clamp<Storage, Parameter>({0, 6}));
    for (const double sum : whole.sum) {
      CHECK_EQUAL(sum, 0.0);
    }
  });
}

// Sums of gradients, because an infinite input makes a NaN of its own gradient.
TEST(infinite_bounds_end_nothing_and_nans_pass) {
  for_each_type([]<typename Storage, typename Parameter>() {
    constexpr Parameter kNone = std::numeric_limits<Parameter>::infinity();
    Sample<Storage, Parameter> sample({1, 3, 1});
    std::fill(sample.scale.begin(), sample.scale.end(), Parameter{1});
    std::fill(sample.shift.begin(), sample.shift.end(), Parameter{0});
    std::fill(sample.gradient.begin(), sample.gradient.end(), stored<Storage>(1));
    sample.input = {stored<Storage>(kInfinity), stored<Storage>(-kInfinity), stored<Storage>(std::nan(""))};
    const auto check = [&](const Bounds<Parameter>& bounds, const std::vector<double>& expected) {
      const Context here(text_of(bounds));
      BackwardPass<Storage, Parameter> whole(sample.layout);
      whole.run(sample, Clamp<Storage, Parameter>(bounds));
      for (size_t c = 0; c < expected.size(); ++c) {
        CHECK_EQUAL(whole.sum[c], expected[c]);
      }
    };
    check({-kNone, kNone}, {1, 1, 1});
    check({0, kNone}, {1, 0, 1});
    check({0, 6}, {0, 0, 1});
    check({-kNone, 6}, {0, 1, 1});
  });
}

} // namespace
} // namespace torch_odt::tests
