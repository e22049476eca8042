// Normalisation with given statistics, against the same in double precision, and the clamp behind it.

#include <algorithm>
#include <cmath>

#include "samples.h"

namespace torch_odt::tests {
namespace {

double clamped(double value, double low, double high) {
  return value < low ? low : value > high ? high : value;
}

TEST(factors_are_those_of_the_parameters_that_there_are) {
  const auto run = []<typename Storage, typename Parameter>() {
    const Sample<Storage, Parameter> sample({1, 33, 1});
    for (const bool has_weight : {false, true}) {
      for (const bool has_bias : {false, true}) {
        std::vector<Parameter> scale(33);
        std::vector<Parameter> shift(33);
        kernels::normalisation_factors(
            sample.mean.data(),
            sample.invstd.data(),
            has_weight ? sample.weight.data() : nullptr,
            has_bias ? sample.bias.data() : nullptr,
            33,
            scale.data(),
            shift.data());
        for (size_t c = 0; c < 33; ++c) {
          const double weight = has_weight ? sample.weight[c] : 1;
          const double bias = has_bias ? sample.bias[c] : 0;
          const double product = sample.mean[c] * sample.invstd[c] * weight;
          CHECK_NEAR(scale[c], sample.invstd[c] * weight, 2 * kRounding<Parameter> * std::abs(scale[c]));
          CHECK_NEAR(shift[c], bias - product, 4 * kRounding<Parameter> * (std::abs(bias) + std::abs(product)));
        }
      }
    }
  };
  run.operator()<float, float>();
  run.operator()<double, double>();
}

TEST(outputs_are_those_of_double_precision) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : layouts()) {
      const Sample<Storage, Parameter> sample(layout);
      for (const Bounds<Parameter>& bounds : all_bounds<Parameter>()) {
        const Context here(text_of(layout) + ", " + text_of(bounds));
        const std::vector<Storage> output = normalised(sample, Clamp<Storage, Parameter>(bounds));
        for (int64_t i = 0; i < layout.elements(); ++i) {
          const auto c = static_cast<size_t>(channel_of(layout, i));
          const double product = static_cast<double>(kernels::load(sample.input[i])) * sample.scale[c];
          const double expected = clamped(product + sample.shift[c], bounds.low, bounds.high);
          const double tolerance = 2 * kRounding<Parameter> * (std::abs(product) + std::abs(sample.shift[c])) +
              kRounding<Storage> * std::abs(expected);
          CHECK_NEAR(kernels::load(output[i]), expected, tolerance);
        }
      }
    }
  });
}

// In every place of a vector, and in the loop's rest.
TEST(the_clamp_bounds_infinities_and_keeps_nans) {
  for_each_type([]<typename Storage, typename Parameter>() {
    const std::vector<double> values = {kInfinity, -kInfinity, std::nan(""), 0, -0.0, 6, 7, -1, 0x1p100, -0x1p100};
    for (const ChannelLayout& layout : {ChannelLayout{21, 33, 1}, ChannelLayout{1, 1, 693}}) {
      Sample<Storage, Parameter> sample(layout);
      std::fill(sample.scale.begin(), sample.scale.end(), Parameter{1});
      std::fill(sample.shift.begin(), sample.shift.end(), Parameter{0});
      for (size_t i = 0; i < sample.input.size(); ++i) {
        sample.input[i] = stored<Storage>(values[i % values.size()]);
      }
      for (const Bounds<Parameter>& bounds : all_bounds<Parameter>()) {
        const Context here(text_of(layout) + ", " + text_of(bounds));
        const std::vector<Storage> output = normalised(sample, Clamp<Storage, Parameter>(bounds));
        for (size_t i = 0; i < output.size(); ++i) {
          CHECK_NEAR(kernels::load(output[i]), clamped(values[i % values.size()], bounds.low, bounds.high), 0);
        }
      }
    }
  });
}

TEST(an_infinite_input_without_a_scale_is_nan) {
  for_each_type([]<typename Storage, typename Parameter>() {
    Sample<Storage, Parameter> sample({2, 9, 1});
    std::fill(sample.scale.begin(), sample.scale.end(), Parameter{0});
    std::fill(sample.input.begin(), sample.input.end(), stored<Storage>(kInfinity));
    for (const Storage& value : normalised(sample, Clamp<Storage, Parameter>({0, 6}))) {
      CHECK(std::isnan(kernels::load(value)));
    }
  });
}

} // namespace
} // namespace torch_odt::tests
