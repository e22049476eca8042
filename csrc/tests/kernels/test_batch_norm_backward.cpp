// The gradients, against the same formulas in double precision and against differences of the loss.

#include <cmath>

#include "../../kernels/batch_norm_statistics.h"
#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

// Which gradients end at the clamp, said with the output as it is stored: what an activation function of its own sees.
template <typename Storage, typename Parameter>
std::vector<bool> ended_gradients(const Sample<Storage, Parameter>& sample, const Bounds<Parameter>& bounds) {
  std::vector<bool> ended;
  for (const Storage& value : normalised(sample, Clamp<Storage, Parameter>(bounds))) {
    const Parameter y = kernels::load(value);
    ended.push_back(
        (std::isfinite(bounds.low) && y <= bounds.low) || (std::isfinite(bounds.high) && y >= bounds.high));
  }
  return ended;
}

// Sums over one channel, and how large the sums of the terms' sizes are, which is what rounding errors follow.
struct ExactSums {
  double gradient = 0;
  double gradient_size = 0;
  double product = 0;
  double product_size = 0;
};

template <typename Storage, typename Parameter>
void check_gradients(const Sample<Storage, Parameter>& sample, const Bounds<Parameter>& bounds, bool has_weight) {
  const ChannelLayout& layout = sample.layout;
  const std::vector<bool> ended = ended_gradients(sample, bounds);
  std::vector<double> passed;
  std::vector<double> deviation;
  std::vector<ExactSums> sums(static_cast<size_t>(layout.channels));
  for (int64_t i = 0; i < layout.elements(); ++i) {
    const auto c = static_cast<size_t>(channel_of(layout, i));
    passed.push_back(ended[i] ? 0 : kernels::load(sample.gradient[i]));
    deviation.push_back(static_cast<double>(kernels::load(sample.input[i])) - sample.mean[c]);
    const double product = passed.back() * deviation.back();
    sums[c].gradient += passed.back();
    sums[c].gradient_size += std::abs(passed.back());
    sums[c].product += product;
    sums[c].product_size += std::abs(product);
  }

  BackwardPass<Storage, Parameter> found(layout);
  found.run(sample, Clamp<Storage, Parameter>(bounds), has_weight);
  const auto count = static_cast<double>(layout.count());
  const double rounding = 32 * kRounding<Parameter> + count * kRounding<double>;
  for (size_t c = 0; c < sums.size(); ++c) {
    const double invstd = sample.invstd[c];
    CHECK_NEAR(found.grad_weight[c], sums[c].product * invstd, rounding * sums[c].product_size * invstd);
    CHECK_NEAR(found.grad_bias[c], sums[c].gradient, rounding * sums[c].gradient_size);
  }
  for (int64_t i = 0; i < layout.elements(); ++i) {
    const auto c = static_cast<size_t>(channel_of(layout, i));
    const double invstd = sample.invstd[c];
    const double slope = has_weight ? invstd * sample.weight[c] : invstd;
    const double along = deviation[i] * invstd * invstd / count;
    const double expected = (passed[i] - sums[c].gradient / count - sums[c].product * along) * slope;
    const double size =
        std::abs(passed[i]) + sums[c].gradient_size / count + sums[c].product_size * std::abs(along);
    const double tolerance = rounding * size * std::abs(slope) + kRounding<Storage> * std::abs(expected);
    CHECK_NEAR(kernels::load(found.grad_input[i]), expected, tolerance);
  }
}

TEST(gradients_are_those_of_double_precision) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : layouts()) {
      const Sample<Storage, Parameter> sample(layout);
      for (const Bounds<Parameter>& bounds : all_bounds<Parameter>()) {
        const Context here(text_of(layout) + ", " + text_of(bounds));
        check_gradients(sample, bounds, true);
      }
      const Context here(text_of(layout) + ", no weight");
      check_gradients(sample, Bounds<Parameter>{0, 6}, false);
    }
  });
}

TEST(gradients_of_slices_are_put_together) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : sliced_layouts()) {
      const Context here(text_of(layout));
      check_gradients(Sample<Storage, Parameter>(layout), Bounds<Parameter>{0, 6}, true);
    }
  });
}

// The loss is the sum of outputs times gradients, as a function of the input: statistics included.
double loss_of(Sample<double, double> sample) {
  const kernels::Slices slices(sample.layout);
  const auto channels = static_cast<size_t>(sample.layout.channels);
  std::vector<double> work(7 * channels);
  double* const at = work.data();
  const kernels::Moments<double> moments{at, at + channels, at + 2 * channels};
  kernels::take_moments(sample.input.data(), slices, 0, slices.tasks(), moments);
  kernels::finish_statistics(
      moments,
      slices,
      1e-5,
      kernels::RunningAverages<double>{0.1, at + 3 * channels, at + 4 * channels, at + 5 * channels, at + 6 * channels},
      sample.mean.data(),
      sample.invstd.data());
  double loss = 0;
  for (size_t i = 0; i < sample.input.size(); ++i) {
    const auto c = static_cast<size_t>(channel_of(sample.layout, static_cast<int64_t>(i)));
    const double output = (sample.input[i] - sample.mean[c]) * sample.invstd[c] * sample.weight[c] + sample.bias[c];
    loss += sample.gradient[i] * output;
  }
  return loss;
}

TEST(gradients_are_the_slopes_of_the_loss) {
  for (const ChannelLayout& layout : {ChannelLayout{7, 3, 1}, ChannelLayout{2, 3, 5}}) {
    const Context here(text_of(layout));
    Sample<double, double> sample(layout);
    const auto count = static_cast<double>(layout.count());
    for (size_t c = 0; c < sample.mean.size(); ++c) {
      double sum = 0;
      double square = 0;
      for (int64_t i = 0; i < layout.elements(); ++i) {
        const double value = static_cast<size_t>(channel_of(layout, i)) == c ? sample.input[i] : 0;
        sum += value;
        square += value * value;
      }
      sample.mean[c] = sum / count;
      sample.invstd[c] = 1 / std::sqrt(square / count - sample.mean[c] * sample.mean[c] + 1e-5);
    }
    BackwardPass<double, double> found(layout);
    found.run(sample, Clamp<double, double>({-kInfinity, kInfinity}));

    constexpr double kStep = 1e-5;
    const auto slope = [&](double& value) {
      const double before = value;
      value = before + kStep;
      const double above = loss_of(sample);
      value = before - kStep;
      const double below = loss_of(sample);
      value = before;
      return (above - below) / (2 * kStep);
    };
    for (size_t i = 0; i < sample.input.size(); ++i) {
      CHECK_NEAR(found.grad_input[i], slope(sample.input[i]), 1e-8);
    }
    for (size_t c = 0; c < sample.mean.size(); ++c) {
      CHECK_NEAR(found.grad_weight[c], slope(sample.weight[c]), 1e-8);
      CHECK_NEAR(found.grad_bias[c], slope(sample.bias[c]), 1e-8);
    }
  }
}

} // namespace
} // namespace torch_odt::tests
