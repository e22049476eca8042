// AVX2: four pixels of a channel as two pairs of 16-bit numbers, which vpmaddwd multiplies.
#if defined(__x86_64__) && defined(__GNUC__)

#include "depthwise_tables.h"
#include "interleave.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx2"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kChannels = 16;

// Steps of 16 channels, the first and third pixel of each apart from the second and fourth.
struct Steps {
  __m256i even[2];
  __m256i odd[2];
};

TORCH_ODT_TARGET_INLINE Steps split(__m256i low, __m256i high) {
  Steps result;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = half == 0 ? low : high;
    result.even[half] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    result.odd[half] = _mm256_srai_epi16(bytes, 8);
  }
  return result;
}

TORCH_ODT_TARGET_INLINE Steps load(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d, int64_t channels) {
  const bool whole = channels >= kChannels;
  const Steps16 steps = interleaved(
      whole ? load16(a) : load_some(a, channels),
      whole ? load16(b) : load_some(b, channels),
      whole ? load16(c) : load_some(c, channels),
      whole ? load16(d) : load_some(d, channels));
  return split(
      _mm256_set_m128i((__m128i)steps.fours[1], (__m128i)steps.fours[0]),
      _mm256_set_m128i((__m128i)steps.fours[3], (__m128i)steps.fours[2]));
}

TORCH_ODT_TARGET_INLINE __m256i add_products(__m256i sum, const Steps& a, const Steps& b, int half) {
  const __m256i even = _mm256_madd_epi16(a.even[half], b.even[half]);
  const __m256i odd = _mm256_madd_epi16(a.odd[half], b.odd[half]);
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

template <int kGroup>
TORCH_ODT_TARGET void sum_group(const DepthwiseRow& of, int64_t output, int64_t channel) {
  __m256i sums[kGroup][2];
#pragma GCC unroll 2
  for (int i = 0; i < kGroup; ++i) {
    sums[i][0] = _mm256_setzero_si256();
    sums[i][1] = _mm256_setzero_si256();
  }
  const int64_t from = of.first_channel + channel;
  const int8_t* weights = of.weights + from * 4;
  for (int64_t row = 0; row < of.kernel_rows; ++row) {
    const int8_t* const* pixels = of.pixels + row * of.pixels_stride + output * of.step;
    for (int64_t window = 0; window < of.windows; ++window, pixels += 4 * of.spacing) {
      const Steps steps = load(
          pixels[0] + from,
          pixels[of.spacing] + from,
          pixels[2 * of.spacing] + from,
          pixels[3 * of.spacing] + from,
          of.channels - channel);
#pragma GCC unroll 2
      for (int i = 0; i < kGroup; ++i, weights += of.weights_stride) {
        const Steps weight = split(
            _mm256_loadu_si256((const __m256i*)weights), _mm256_loadu_si256((const __m256i*)weights + 1));
        sums[i][0] = add_products(sums[i][0], steps, weight, 0);
        sums[i][1] = add_products(sums[i][1], steps, weight, 1);
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < kGroup; ++i) {
    auto* const to = (__m256i*)(of.sums + (output + i) * of.sums_stride + channel);
    _mm256_storeu_si256(to, sums[i][0]);
    _mm256_storeu_si256(to + 1, sums[i][1]);
  }
}

void sum_row(const DepthwiseRow& of) {
  for (int64_t output = 0; output < of.outputs; output += of.group) {
    for (int64_t channel = 0; channel < of.channels; channel += kChannels) {
      of.group == 2 ? sum_group<2>(of, output, channel) : sum_group<1>(of, output, channel);
    }
  }
}

template <int kTaps>
TORCH_ODT_TARGET void sum_taps(const DepthwiseGradient& of, int64_t tap, int64_t channel) {
  int32_t* const to = of.sums + tap * of.sums_stride + channel;
  __m256i sums[kTaps][2];
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
    sums[i][0] = _mm256_loadu_si256((const __m256i*)(to + i * of.sums_stride));
    sums[i][1] = _mm256_loadu_si256((const __m256i*)(to + i * of.sums_stride) + 1);
  }
  for (int64_t output = 0; output < of.outputs; output += 4) {
    const int8_t* const* const gradients = of.grad_output + output;
    const Steps gradient = load(
        gradients[0] + channel,
        gradients[1] + channel,
        gradients[2] + channel,
        gradients[3] + channel,
        of.channels - channel);
#pragma GCC unroll 3
    for (int i = 0; i < kTaps; ++i) {
      const int8_t* const* const pixels = of.pixels + output * of.step + (tap + i) * of.spacing;
      const Steps steps = load(
          pixels[0] + channel,
          pixels[of.step] + channel,
          pixels[2 * of.step] + channel,
          pixels[3 * of.step] + channel,
          of.channels - channel);
      sums[i][0] = add_products(sums[i][0], steps, gradient, 0);
      sums[i][1] = add_products(sums[i][1], steps, gradient, 1);
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
    _mm256_storeu_si256((__m256i*)(to + i * of.sums_stride), sums[i][0]);
    _mm256_storeu_si256((__m256i*)(to + i * of.sums_stride) + 1, sums[i][1]);
  }
}

void sum_gradient(const DepthwiseGradient& of) {
  for (int64_t channel = 0; channel < of.channels; channel += kChannels) {
    int64_t tap = 0;
    for (; tap + 3 <= of.taps; tap += 3) {
      sum_taps<3>(of, tap, channel);
    }
    for (; tap < of.taps; ++tap) {
      sum_taps<1>(of, tap, channel);
    }
  }
}

} // namespace

const DepthwiseTable& depthwise_avx2() {
  static constexpr DepthwiseTable result = {0, sum_row, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
