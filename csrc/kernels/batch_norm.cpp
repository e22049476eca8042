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

template <bool has_residual, typename Storage, typename Parameter>
TORCH_ODT_INLINE Parameter plus_residual(Parameter value, const Storage* residual, int64_t at) {
  if constexpr (has_residual) {
    return value + load(residual[at]);
  } else {
    return value;
  }
}

template <bool has_residual, typename Storage, typename Parameter, typename Activation>
TORCH_ODT_INLINE void rows_body(
    const Storage* input,
    const Storage* residual,
    const Parameter* __restrict scale,
    const Parameter* __restrict shift,
    Activation activation,
    ChannelLayout layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  const int64_t row_elements = layout.inner == 1 ? layout.channels : layout.inner;
  // One loop over the rows of both layouts: a loop of its own around runs of one channel is one that compilers run for
  // two rows at a time, without vectors.
  for (int64_t row = begin; row < end; ++row) {
    const Storage* __restrict from = input + row * row_elements;
    const Storage* __restrict addend = has_residual ? residual + row * row_elements : nullptr;
    Storage* __restrict to = output + row * row_elements;
    if (layout.inner == 1) {
      for (int64_t c = 0; c < row_elements; ++c) {
        const Parameter value = scaled(load(from[c]), scale[c], shift[c]);
        store(activation.value(plus_residual<has_residual>(value, addend, c)), to[c]);
      }
    } else {
      const Parameter a = scale[row % layout.channels];
      const Parameter b = shift[row % layout.channels];
      for (int64_t i = 0; i < row_elements; ++i) {
        const Parameter value = scaled(load(from[i]), a, b);
        store(activation.value(plus_residual<has_residual>(value, addend, i)), to[i]);
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

template <typename Storage, typename Parameter, typename Activation>
void normalise_rows(
    const Storage* input,
    const Storage* residual,
    const Parameter* scale,
    const Parameter* shift,
    const Activation& activation,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  if (residual == nullptr) {
    run<rows_body<false, Storage, Parameter, Activation>>(
        input, residual, scale, shift, activation, layout, begin, end, output);
  } else {
    run<rows_body<true, Storage, Parameter, Activation>>(
        input, residual, scale, shift, activation, layout, begin, end, output);
  }
}

#define TORCH_ODT_INSTANTIATE(Storage, Parameter, ...) \
  template void normalise_rows(                        \
      const Storage*,                                  \
      const Storage*,                                  \
      const Parameter*,                                \
      const Parameter*,                                \
      const __VA_ARGS__&,                              \
      const ChannelLayout&,                            \
      int64_t,                                         \
      int64_t,                                         \
      Storage*);
TORCH_ODT_FOR_ACTIVATIONS(TORCH_ODT_INSTANTIATE)
#undef TORCH_ODT_INSTANTIATE
template void normalisation_factors(
    const float*, const float*, const float*, const float*, int64_t, float*, float*);
template void normalisation_factors(
    const double*, const double*, const double*, const double*, int64_t, double*, double*);

} // namespace torch_odt::kernels
