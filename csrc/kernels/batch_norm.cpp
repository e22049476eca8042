#include "batch_norm.h"

#include <bit>

#include "isa.h"

// Every body below is compiled twice: for the baseline, and for AVX2 with fused multiply-adds. The fused form is chosen
// wherever torch's own kernels choose it, so that a recomputed output has the bits of the first one.
#define TORCH_ODT_INLINE [[gnu::always_inline]] inline
#if defined(__x86_64__) && defined(__GNUC__)
#define TORCH_ODT_AVX2 [[gnu::target("avx2,fma")]]
#else
#define TORCH_ODT_AVX2
#endif

namespace torch_odt::kernels {

namespace {

TORCH_ODT_INLINE float load(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
TORCH_ODT_INLINE float load(float value) {
  return value;
}
TORCH_ODT_INLINE double load(double value) {
  return value;
}

TORCH_ODT_INLINE void store(float value, BFloat16& place) {
  const auto bits = std::bit_cast<uint32_t>(value);
  // To the nearest, ties to even. A NaN is set apart because rounding could carry it away into an infinity.
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  place.bits = static_cast<uint16_t>(value == value ? rounded : 0x7FC0u);
}
TORCH_ODT_INLINE void store(float value, float& place) {
  place = value;
}
TORCH_ODT_INLINE void store(double value, double& place) {
  place = value;
}

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

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void rows_body(
    const Storage* input,
    const Parameter* __restrict scale,
    const Parameter* __restrict shift,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  if (layout.inner == 1) {
    const int64_t channels = layout.channels;
    for (int64_t row = begin; row < end; ++row) {
      const Storage* __restrict from = input + row * channels;
      Storage* __restrict to = output + row * channels;
      for (int64_t c = 0; c < channels; ++c) {
        store(load(from[c]) * scale[c] + shift[c], to[c]);
      }
    }
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    const Parameter a = scale[row % layout.channels];
    const Parameter b = shift[row % layout.channels];
    const Storage* __restrict from = input + row * layout.inner;
    Storage* __restrict to = output + row * layout.inner;
    for (int64_t i = 0; i < layout.inner; ++i) {
      store(load(from[i]) * a + b, to[i]);
    }
  }
}

template <typename Parameter>
TORCH_ODT_AVX2 void factors_avx2(
    const Parameter* mean,
    const Parameter* invstd,
    const Parameter* weight,
    const Parameter* bias,
    int64_t channels,
    Parameter* scale,
    Parameter* shift) {
  factors_body(mean, invstd, weight, bias, channels, scale, shift);
}

template <typename Storage, typename Parameter>
TORCH_ODT_AVX2 void rows_avx2(
    const Storage* input,
    const Parameter* scale,
    const Parameter* shift,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  rows_body(input, scale, shift, layout, begin, end, output);
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
  if (may_use_avx2()) {
    factors_avx2(mean, invstd, weight, bias, channels, scale, shift);
  } else {
    factors_body(mean, invstd, weight, bias, channels, scale, shift);
  }
}

template <typename Storage, typename Parameter>
void normalise_rows(
    const Storage* input,
    const Parameter* scale,
    const Parameter* shift,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output) {
  if (may_use_avx2()) {
    rows_avx2(input, scale, shift, layout, begin, end, output);
  } else {
    rows_body(input, scale, shift, layout, begin, end, output);
  }
}

template void normalise_rows(
    const float*, const float*, const float*, const ChannelLayout&, int64_t, int64_t, float*);
template void normalise_rows(
    const double*, const double*, const double*, const ChannelLayout&, int64_t, int64_t, double*);
template void normalise_rows(
    const BFloat16*, const float*, const float*, const ChannelLayout&, int64_t, int64_t, BFloat16*);
template void normalisation_factors(
    const float*, const float*, const float*, const float*, int64_t, float*, float*);
template void normalisation_factors(
    const double*, const double*, const double*, const double*, int64_t, double*, double*);

} // namespace torch_odt::kernels
