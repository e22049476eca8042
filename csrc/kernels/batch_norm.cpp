#include "batch_norm.h"

#include "isa.h"

namespace torch_odt::kernels {

namespace {

template <typename Parameter>
TORCH_ODT_INLINE void factors_body(
    const Parameter* __restrict mean,
    const Parameter* __restrict invstd,
    const Parameter* __restrict weight,
    const Parameter* __restrict bias,
    int64_t channels,
    Parameter* __restrict scale,
    Parameter* __restrict shift) {
  for (int64_t c = 0; c < channels; ++c) {
    scale[c] = weight == nullptr ? invstd[c] : invstd[c] * weight[c];
    shift[c] = (bias == nullptr ? Parameter{0} : bias[c]) - mean[c] * scale[c];
  }
}

template <typename Parameter>
TORCH_ODT_INLINE Parameter clamped(Parameter value, const Bounds<Parameter>& bounds) {
  const Parameter above = value < bounds.low ? bounds.low : value;
  return above > bounds.high ? bounds.high : above;
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void rows_body(
    const Storage* input,
    const Parameter* __restrict scale,
    const Parameter* __restrict shift,
    Bounds<Parameter> bounds,
    ChannelLayout layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  const int64_t row_elements = layout.inner == 1 ? layout.channels : layout.inner;
  // One loop over the rows of both layouts: a loop of its own around runs of one channel is one that compilers run for
  // two rows at a time, without vectors.
  for (int64_t row = begin; row < end; ++row) {
    const Storage* __restrict from = input + row * row_elements;
    Storage* __restrict to = output + row * row_elements;
    if (layout.inner == 1) {
      for (int64_t c = 0; c < row_elements; ++c) {
        store(clamped(load(from[c]) * scale[c] + shift[c], bounds), to[c]);
      }
    } else {
      const Parameter a = scale[row % layout.channels];
      const Parameter b = shift[row % layout.channels];
      for (int64_t i = 0; i < row_elements; ++i) {
        store(clamped(load(from[i]) * a + b, bounds), to[i]);
      }
    }
  }
}

} // namespace

template <typename Parameter>
void normalisation_factors(
    const Parameter* mean,
    const Parameter* invstd,
    const Parameter* weight,
    const Parameter* bias,
    int64_t channels,
    Parameter* scale,
    Parameter* shift) {
  run<factors_body<Parameter>>(mean, invstd, weight, bias, channels, scale, shift);
}

template <typename Storage, typename Parameter>
void normalise_rows(
    const Storage* input,
    const Parameter* scale,
    const Parameter* shift,
    const Bounds<Parameter>& bounds,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  run<rows_body<Storage, Parameter>>(input, scale, shift, bounds, layout, begin, end, output);
}

template void normalise_rows(
    const float*,
    const float*,
    const float*,
    const Bounds<float>&,
    const ChannelLayout&,
    int64_t,
    int64_t,
    float*);
template void normalise_rows(
    const double*,
    const double*,
    const double*,
    const Bounds<double>&,
    const ChannelLayout&,
    int64_t,
    int64_t,
    double*);
template void normalise_rows(
    const BFloat16*,
    const float*,
    const float*,
    const Bounds<float>&,
    const ChannelLayout&,
    int64_t,
    int64_t,
    BFloat16*);
template void normalisation_factors(
    const float*, const float*, const float*, const float*, int64_t, float*, float*);
template void normalisation_factors(
    const double*, const double*, const double*, const double*, int64_t, double*, double*);

} // namespace torch_odt::kernels
