// Activation functions and their gradients as the kernels compute them, against double precision, in every place of a
// vector and in the loop's rest.

#include <algorithm>
#include <cmath>
#include <functional>

#include "../../kernels/exponential.h"
#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

struct Smooth {
  std::function<double(double)> value;
  std::function<double(double)> slope;
};

double logistic_of(double x) {
  return 1 / (1 + std::exp(-x));
}

const Smooth kHardswish{
    [](double x) { return x * std::min(std::max(x + 3, 0.0), 6.0) / 6; },
    [](double x) { return x <= -3 ? 0 : x >= 3 ? 1 : x / 3 + 0.5; }};
const Smooth kSilu{
    [](double x) { return x * logistic_of(x); },
    [](double x) { return logistic_of(x) * (1 + x * (1 - logistic_of(x))); }};

// Calls function(activation, exact) for each.
template <typename Function>
void for_each_smooth(const Function& function) {
  {
    const Context here("hardswish");
    function(kernels::Hardswish(), kHardswish);
  }
  const Context here("silu");
  function(kernels::Silu(), kSilu);
}

TEST(exponentials_are_those_of_double_precision) {
  const auto check = []<typename Number>(Number lowest) {
    for (Number x = 0; x > lowest; x -= Number{0.0137}) {
      const Context here(text_of(x));
      const double exact = std::exp(static_cast<double>(x));
      CHECK_NEAR(kernels::exponential(x), exact, 4 * kRounding<Number> * exact);
    }
    CHECK_EQUAL(kernels::exponential(Number{0}), Number{1});
    CHECK_EQUAL(kernels::exponential(2 * lowest), Number{0});
    CHECK_EQUAL(kernels::exponential(-std::numeric_limits<Number>::infinity()), Number{0});
    CHECK(std::isnan(kernels::exponential(std::numeric_limits<Number>::quiet_NaN())));
  };
  check(-87.0f);
  check(-708.0);
}

TEST(smooth_functions_are_those_of_double_precision) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for_each_smooth([](const auto& activation, const Smooth& exact) {
      for (const ChannelLayout& layout : layouts()) {
        const Context here(text_of(layout));
        const Sample<Storage, Parameter> sample(layout);
        const std::vector<Storage> output = normalised(sample, activation);
        for (int64_t i = 0; i < layout.elements(); ++i) {
          const auto c = static_cast<size_t>(channel_of(layout, i));
          const double product = static_cast<double>(kernels::load(sample.input[i])) * sample.scale[c];
          const double expected = exact.value(product + sample.shift[c]);
          const double size = std::abs(product) + std::abs(sample.shift[c]);
          CHECK_NEAR(
              kernels::load(output[i]),
              expected,
              8 * kRounding<Parameter> * size + kRounding<Storage> * std::abs(expected));
        }
      }
    });
  });
}

// With these factors the input's gradient is what passes the activation function.
TEST(slopes_are_those_of_double_precision) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for_each_smooth([](const auto& activation, const Smooth& exact) {
      for (const ChannelLayout& layout : {ChannelLayout{61, 33, 1}, ChannelLayout{3, 5, 131}}) {
        const Context here(text_of(layout));
        Sample<Storage, Parameter> sample(layout);
        std::fill(sample.scale.begin(), sample.scale.end(), Parameter{1});
        std::fill(sample.shift.begin(), sample.shift.end(), Parameter{0});
        const std::vector<double> kinks = {-3, 3, 0, -3.5, 2.75, -20, 20, -100, 100};
        for (size_t i = 0; i < sample.input.size(); i += 2) {
          sample.input[i] = stored<Storage>(kinks[i / 2 % kinks.size()]);
        }
        const std::vector<Parameter> ones(sample.mean.size(), Parameter{1});
        const std::vector<Parameter> zeros(sample.mean.size(), Parameter{0});
        std::vector<Parameter> slope = ones;
        std::vector<Parameter> none = zeros;
        std::vector<Storage> passed(sample.input.size());
        kernels::input_gradient_rows(
            sample.gradient.data(),
            forward_of(sample),
            activation,
            kernels::GradientFactors<Parameter>{slope.data(), none.data(), none.data()},
            layout,
            0,
            rows_of(layout),
            passed.data());
        BackwardPass<Storage, Parameter> whole(layout);
        whole.run(sample, activation);
        std::vector<double> sums(sample.mean.size());
        std::vector<double> sizes(sample.mean.size());
        for (int64_t i = 0; i < layout.elements(); ++i) {
          const double expected = exact.slope(kernels::load(sample.input[i])) * kernels::load(sample.gradient[i]);
          CHECK_NEAR(
              kernels::load(passed[i]),
              expected,
              64 * kRounding<Parameter> + kRounding<Storage> * std::abs(expected));
          const auto c = static_cast<size_t>(channel_of(layout, i));
          sums[c] += expected;
          sizes[c] += std::abs(expected);
        }
        for (size_t c = 0; c < sums.size(); ++c) {
          CHECK_NEAR(whole.grad_bias[c], sums[c], 64 * kRounding<Parameter> * (1 + sizes[c]));
        }
      }
    });
  });
}

TEST(smooth_functions_end_as_those_of_double_precision) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for_each_smooth([](const auto& activation, const Smooth& exact) {
      const std::vector<double> ends = {kInfinity, -kInfinity, std::nan(""), 0x1p100, -0x1p100, 0};
      for (const ChannelLayout& layout : {ChannelLayout{21, 33, 1}, ChannelLayout{1, 1, 693}}) {
        Sample<Storage, Parameter> sample(layout);
        std::fill(sample.scale.begin(), sample.scale.end(), Parameter{1});
        std::fill(sample.shift.begin(), sample.shift.end(), Parameter{0});
        for (size_t i = 0; i < sample.input.size(); ++i) {
          sample.input[i] = stored<Storage>(ends[i % ends.size()]);
        }
        const std::vector<Storage> output = normalised(sample, activation);
        for (size_t i = 0; i < output.size(); ++i) {
          const double expected = exact.value(ends[i % ends.size()]);
          const double found = kernels::load(output[i]);
          CHECK(std::isnan(expected) ? std::isnan(found) : found == expected);
        }
      }
    });
  });
}

} // namespace
} // namespace torch_odt::tests
