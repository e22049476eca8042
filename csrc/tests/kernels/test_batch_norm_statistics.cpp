// The statistics in one pass, against two passes in double precision.

#include <algorithm>
#include <cmath>

#include "../../kernels/batch_norm_statistics.h"
#include "samples.h"

namespace torch_odt::tests {
namespace {

constexpr double kMomentum = 0.1;

template <typename Parameter>
struct Statistics {
  std::vector<Parameter> mean;
  std::vector<Parameter> invstd;
  std::vector<Parameter> new_mean;
  std::vector<Parameter> new_variance;
};

// The sample's own mean and invstd stand for the running averages, being as good as any numbers.
template <typename Storage, typename Parameter>
Statistics<Parameter> statistics_of(const Sample<Storage, Parameter>& sample, double eps) {
  const kernels::Slices slices(sample.layout);
  const auto channels = static_cast<size_t>(sample.layout.channels);
  const size_t places = static_cast<size_t>(slices.number) * channels;
  std::vector<Parameter> centre(places);
  std::vector<double> sum(places);
  std::vector<double> square(places);
  const kernels::Moments<Parameter> moments{centre.data(), sum.data(), square.data()};
  kernels::take_moments(sample.input.data(), slices, 0, slices.tasks(), moments);
  Statistics<Parameter> result{
      std::vector<Parameter>(channels),
      std::vector<Parameter>(channels),
      std::vector<Parameter>(channels),
      std::vector<Parameter>(channels)};
  kernels::finish_statistics(
      moments,
      slices,
      eps,
      kernels::RunningAverages<Parameter>{
          kMomentum, sample.mean.data(), sample.invstd.data(), result.new_mean.data(), result.new_variance.data()},
      result.mean.data(),
      result.invstd.data());
  return result;
}

struct Exact {
  double mean = 0;
  double squares = 0;
  double farthest = 0;
};

template <typename Storage, typename Parameter>
std::vector<Exact> exact_statistics(const Sample<Storage, Parameter>& sample) {
  const ChannelLayout& layout = sample.layout;
  std::vector<Exact> result(static_cast<size_t>(layout.channels));
  for (int64_t i = 0; i < layout.elements(); ++i) {
    result[static_cast<size_t>(channel_of(layout, i))].mean += kernels::load(sample.input[i]);
  }
  for (Exact& channel : result) {
    channel.mean /= static_cast<double>(layout.count());
  }
  for (int64_t i = 0; i < layout.elements(); ++i) {
    Exact& channel = result[static_cast<size_t>(channel_of(layout, i))];
    const double deviation = kernels::load(sample.input[i]) - channel.mean;
    channel.squares += deviation * deviation;
    channel.farthest = std::max(channel.farthest, std::abs(deviation));
  }
  return result;
}

template <typename Storage, typename Parameter>
void check_statistics(const Sample<Storage, Parameter>& sample, double eps) {
  const Statistics<Parameter> found = statistics_of(sample, eps);
  const std::vector<Exact> exact = exact_statistics(sample);
  const auto count = static_cast<double>(sample.layout.count());
  // Sums of sixteen terms in the parameter's precision, and the reference's own rounding.
  const double rounding = 32 * kRounding<Parameter> + count * kRounding<double>;
  for (size_t c = 0; c < exact.size(); ++c) {
    const double variance = exact[c].squares / count;
    const double spread = exact[c].farthest * exact[c].farthest;
    const double mean_tolerance = rounding * (exact[c].farthest + std::abs(exact[c].mean) / 8);
    const double invstd = 1 / std::sqrt(variance + eps);
    CHECK_NEAR(found.mean[c], exact[c].mean, mean_tolerance);
    CHECK_NEAR(found.invstd[c], invstd, rounding * invstd * (1 + spread / (variance + eps)));

    const double new_mean = kMomentum * exact[c].mean + (1 - kMomentum) * sample.mean[c];
    CHECK_NEAR(found.new_mean[c], new_mean, mean_tolerance + 2 * kRounding<Parameter> * std::abs(new_mean));
    if (count > 1) {
      const double new_variance = kMomentum * exact[c].squares / (count - 1) + (1 - kMomentum) * sample.invstd[c];
      CHECK_NEAR(found.new_variance[c], new_variance, rounding * (spread + new_variance));
    }
  }
}

TEST(statistics_are_those_of_two_passes) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : layouts()) {
      const Context here(text_of(layout));
      check_statistics(Sample<Storage, Parameter>(layout), 1e-5);
      if (layout.count() > 1) {
        check_statistics(Sample<Storage, Parameter>(layout), 0);
      }
    }
  });
}

TEST(slices_are_put_together) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : sliced_layouts()) {
      const Context here(text_of(layout));
      check_statistics(Sample<Storage, Parameter>(layout), 1e-5);
    }
  });
}

// Where plain sums of squares would leave no digit of the variance.
TEST(a_mean_far_from_zero_costs_no_digits) {
  for (const ChannelLayout& layout : {ChannelLayout{40, 9, 1}, ChannelLayout{3, 9, 245}}) {
    const Context here(text_of(layout));
    Sample<float, float> sample(layout);
    for (float& value : sample.input) {
      value += 30000;
    }
    check_statistics(sample, 1e-5);
  }
}

TEST(a_constant_channel_has_no_deviation) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : {ChannelLayout{40, 9, 1}, ChannelLayout{3, 9, 245}}) {
      const Context here(text_of(layout));
      Sample<Storage, Parameter> sample(layout);
      std::fill(sample.input.begin(), sample.input.end(), stored<Storage>(2.5));
      const Statistics<Parameter> found = statistics_of(sample, 0);
      const Statistics<Parameter> with_epsilon = statistics_of(sample, 0.25);
      for (size_t c = 0; c < found.mean.size(); ++c) {
        CHECK_EQUAL(found.mean[c], Parameter{2.5});
        CHECK_EQUAL(found.invstd[c], Parameter{0});
        CHECK_EQUAL(with_epsilon.invstd[c], Parameter{2});
      }
    }
  });
}

TEST(infinities_and_nans_reach_the_statistics_of_their_channel_alone) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : {ChannelLayout{40, 9, 1}, ChannelLayout{3, 9, 245}}) {
      // Among the values that a centre is taken from, and behind them.
      for (const int64_t position : {int64_t{0}, layout.count() - 1}) {
        const Context here(text_of(layout) + ", position " + std::to_string(position));
        Sample<Storage, Parameter> sample(layout);
        const auto element = [&](int64_t channel) {
          return (position / layout.inner * layout.channels + channel) * layout.inner + position % layout.inner;
        };
        sample.input[element(2)] = stored<Storage>(kInfinity);
        sample.input[element(4)] = stored<Storage>(-kInfinity);
        sample.input[element(6)] = stored<Storage>(std::nan(""));
        const Statistics<Parameter> found = statistics_of(sample, 1e-5);
        CHECK_NEAR(found.mean[2], kInfinity, 0);
        CHECK_NEAR(found.mean[4], -kInfinity, 0);
        CHECK(std::isnan(found.mean[6]));
        for (size_t c = 0; c < found.mean.size(); ++c) {
          const bool is_poisoned = c == 2 || c == 4 || c == 6;
          CHECK_EQUAL(std::isnan(found.invstd[c]), is_poisoned);
          CHECK_EQUAL(std::isfinite(found.mean[c]), !is_poisoned);
        }
      }
    }
  });
}

} // namespace
} // namespace torch_odt::tests
