#include "batch_norm_statistics.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "channel_sums.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

// A variance out of squares is as good as the number from which deviations are taken is near to the mean: the mean of a
// few values is, and stays so where one of them is an outlier.
constexpr int64_t kCentreValues = 16;

template <typename S, typename P>
struct MomentTerms {
  using Storage = S;
  using Parameter = P;
  static constexpr int64_t kPositionsAtOnce = 2;
  const Storage* input;
  const Parameter* centre;

  TORCH_ODT_INLINE void prefetch(int64_t element) const {
    __builtin_prefetch(input + element);
  }
  TORCH_ODT_INLINE void add(int64_t element, int64_t channel, Parameter& sum, Parameter& square) const {
    const Parameter deviation = load(input[element]) - centre[channel];
    sum += deviation;
    square += deviation * deviation;
  }
};

// Infinities and NaNs must reach the sums; a centre that is one would turn the infinities into NaNs.
template <typename Parameter>
TORCH_ODT_INLINE Parameter finite_or_zero(Parameter value) {
  return value - value == 0 ? value : Parameter{0};
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void choose_centres(
    const Storage* __restrict input, const Slices& slices, int64_t task, Parameter* __restrict centre) {
  const int64_t channels = slices.layout.channels;
  if (slices.layout.inner == 1) {
    const int64_t begin = slices.begin(task);
    const int64_t rows = std::min(kCentreValues, slices.begin(task + 1) - begin);
    std::fill_n(centre, channels, Parameter{0});
    for (int64_t row = 0; row < rows; ++row) {
      const Storage* __restrict from = input + (begin + row) * channels;
      for (int64_t c = 0; c < channels; ++c) {
        centre[c] += load(from[c]);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      centre[c] = finite_or_zero(centre[c] / static_cast<Parameter>(rows));
    }
    return;
  }
  const int64_t values = std::min(kCentreValues, slices.layout.inner);
  const Storage* const from =
      input + (slices.begin(task / channels) * channels + task % channels) * slices.layout.inner;
  Parameter sum{0};
  for (int64_t i = 0; i < values; ++i) {
    sum += load(from[i]);
  }
  *centre = finite_or_zero(sum / static_cast<Parameter>(values));
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void moments_body(
    const Storage* input, Slices slices, int64_t begin, int64_t end, Moments<Parameter> moments) {
  const int64_t channels = slices.layout.channels;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slice = slices.layout.inner == 1 ? task : task / channels;
    choose_centres(input, slices, task, moments.centre + (slices.layout.inner == 1 ? task * channels : task));
    const MomentTerms<Storage, Parameter> terms{input, moments.centre + slice * channels};
    sum_task(terms, slices, task, moments.sum, moments.square);
  }
}

} // namespace

template <typename Storage, typename Parameter>
void take_moments(
    const Storage* input, const Slices& slices, int64_t begin, int64_t end, const Moments<Parameter>& moments) {
  run<moments_body<Storage, Parameter>>(input, slices, begin, end, moments);
}

template <typename Parameter>
void finish_statistics(
    const Moments<Parameter>& moments,
    const Slices& slices,
    double eps,
    const RunningAverages<Parameter>& averages,
    Parameter* mean,
    Parameter* invstd) {
  const int64_t channels = slices.layout.channels;
  const auto values = static_cast<double>(slices.layout.count());
  std::vector<double> means(static_cast<size_t>(channels));
  std::vector<double> squares(static_cast<size_t>(channels));
  for (int64_t slice = 0; slice < slices.number; ++slice) {
    const auto count = static_cast<double>(slices.count(slice));
    for (int64_t c = 0, at = slice * channels; c < channels; ++c, ++at) {
      means[c] += count * moments.centre[at] + moments.sum[at];
    }
  }
  for (double& value : means) {
    value /= values;
  }
  for (int64_t slice = 0; slice < slices.number; ++slice) {
    const auto count = static_cast<double>(slices.count(slice));
    for (int64_t c = 0, at = slice * channels; c < channels; ++c, ++at) {
      const double offset = moments.centre[at] - means[c];
      squares[c] += moments.square[at] + offset * (2 * moments.sum[at] + count * offset);
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    const double sum = squares[c] < 0 ? 0 : squares[c];
    const double variance = sum / values;
    mean[c] = static_cast<Parameter>(means[c]);
    // As torch: a constant channel without an epsilon becomes 0, not NaN.
    invstd[c] = static_cast<Parameter>(variance == 0 && eps == 0 ? 0 : 1 / std::sqrt(variance + eps));
    const double keep = 1 - averages.momentum;
    averages.new_mean[c] = static_cast<Parameter>(averages.momentum * means[c] + keep * averages.mean[c]);
    averages.new_variance[c] =
        static_cast<Parameter>(averages.momentum * (sum / (values - 1)) + keep * averages.variance[c]);
  }
}

template void take_moments(const float*, const Slices&, int64_t, int64_t, const Moments<float>&);
template void take_moments(const double*, const Slices&, int64_t, int64_t, const Moments<double>&);
template void take_moments(const BFloat16*, const Slices&, int64_t, int64_t, const Moments<float>&);
template void finish_statistics(
    const Moments<float>&, const Slices&, double, const RunningAverages<float>&, float*, float*);
template void finish_statistics(
    const Moments<double>&, const Slices&, double, const RunningAverages<double>&, double*, double*);

} // namespace torch_odt::kernels
