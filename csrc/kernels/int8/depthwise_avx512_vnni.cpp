// AVX-512 with VNNI: 64 channels at a time, of which vpdpbusd multiplies four pixels each.
#if defined(__x86_64__) && defined(__GNUC__)

#include "depthwise_tables.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]]
#define TORCH_ODT_TARGET_INLINE \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kVector = 16; // channels of a vector of steps

// Steps of kVectors * 16 channels from four pixels.
template <int kVectors>
struct Steps;

template <>
struct Steps<4> {
  __m512i vectors[4];

  // Unpacking works on lanes of 16 bytes: channels are dealt to them beforehand, so that they end up in order.
  TORCH_ODT_TARGET_INLINE __m512i dealt(const int8_t* pixel, __m512i order, __m512i flip) {
    return _mm512_xor_si512(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(pixel)), flip);
  }

  TORCH_ODT_TARGET_INLINE Steps load(
      const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d, int64_t, int8_t flips) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i flip = _mm512_set1_epi8(flips);
    const __m512i first = dealt(a, order, flip);
    const __m512i second = dealt(b, order, flip);
    const __m512i third = dealt(c, order, flip);
    const __m512i fourth = dealt(d, order, flip);
    const __m512i low_front = _mm512_unpacklo_epi8(first, second);
    const __m512i low_back = _mm512_unpacklo_epi8(third, fourth);
    const __m512i high_front = _mm512_unpackhi_epi8(first, second);
    const __m512i high_back = _mm512_unpackhi_epi8(third, fourth);
    return {
        {_mm512_unpacklo_epi16(low_front, low_back),
         _mm512_unpackhi_epi16(low_front, low_back),
         _mm512_unpacklo_epi16(high_front, high_back),
         _mm512_unpackhi_epi16(high_front, high_back)}};
  }
};

template <>
struct Steps<1> {
  __m512i vectors[1];

  TORCH_ODT_TARGET_INLINE Steps load(
      const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d, int64_t channels, int8_t flips) {
    const auto some = static_cast<__mmask16>(channels >= kVector ? 0xffff : (1 << channels) - 1);
    const __m128i first = _mm_maskz_loadu_epi8(some, a);
    const __m128i second = _mm_maskz_loadu_epi8(some, b);
    const __m128i third = _mm_maskz_loadu_epi8(some, c);
    const __m128i fourth = _mm_maskz_loadu_epi8(some, d);
    const __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    const __m256i others = _mm256_set_m128i(_mm_unpackhi_epi8(third, fourth), _mm_unpacklo_epi8(third, fourth));
    // Lanes of 16 bytes: the first and third quarter of the channels, then the second and fourth.
    const __m256i odd = _mm256_unpacklo_epi16(pairs, others);
    const __m256i even = _mm256_unpackhi_epi16(pairs, others);
    const __m512i lanes = _mm512_inserti64x4(_mm512_castsi256_si512(odd), even, 1);
    const __m512i steps = _mm512_xor_si512(_mm512_shuffle_i32x4(lanes, lanes, 0xd8), _mm512_set1_epi8(flips));
    return {{steps}};
  }
};

constexpr int8_t kFlip = -128;

template <int kVectors, int kGroup>
TORCH_ODT_TARGET void sum_group(const DepthwiseRow& of, int64_t output, int64_t channel) {
  __m512i sums[kGroup][kVectors];
#pragma GCC unroll 2
  for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      sums[i][vector] = _mm512_setzero_si512();
    }
  }
  const int64_t from = of.first_channel + channel;
  const int8_t* weights = of.weights + from * 4;
  for (int64_t row = 0; row < of.kernel_rows; ++row) {
    const int8_t* const* pixels = of.pixels + row * of.pixels_stride + output * of.step;
    for (int64_t window = 0; window < of.windows; ++window, pixels += 4 * of.spacing) {
      const auto steps = Steps<kVectors>::load(
          pixels[0] + from,
          pixels[of.spacing] + from,
          pixels[2 * of.spacing] + from,
          pixels[3 * of.spacing] + from,
          of.channels - channel,
          kFlip);
#pragma GCC unroll 2
      for (int i = 0; i < kGroup; ++i, weights += of.weights_stride) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) {
          const __m512i weight = _mm512_loadu_si512(weights + 64 * vector);
          sums[i][vector] = _mm512_dpbusd_epi32(sums[i][vector], steps.vectors[vector], weight);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      _mm512_storeu_si512(of.sums + (output + i) * of.sums_stride + channel + kVector * vector, sums[i][vector]);
    }
  }
}

template <int kGroup>
void sum_groups(const DepthwiseRow& of) {
  for (int64_t output = 0; output < of.outputs; output += kGroup) {
    int64_t channel = 0;
    for (; channel + 4 * kVector <= of.channels; channel += 4 * kVector) {
      sum_group<4, kGroup>(of, output, channel);
    }
    for (; channel < of.channels; channel += kVector) {
      sum_group<1, kGroup>(of, output, channel);
    }
  }
}

void sum_row(const DepthwiseRow& of) {
  of.group == 2 ? sum_groups<2>(of) : sum_groups<1>(of);
}

// Some taps, whose sums stay in registers over the row.
template <int kVectors, int kTaps>
TORCH_ODT_TARGET void sum_taps(const DepthwiseGradient& of, int64_t tap, int64_t channel) {
  int32_t* const to = of.sums + tap * of.sums_stride + channel;
  __m512i sums[kTaps][kVectors];
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      sums[i][vector] = _mm512_loadu_si512(to + i * of.sums_stride + kVector * vector);
    }
  }
  for (int64_t output = 0; output < of.outputs; output += 4) {
    const int8_t* const* const gradients = of.grad_output + output;
    const auto gradient = Steps<kVectors>::load(
        gradients[0] + channel,
        gradients[1] + channel,
        gradients[2] + channel,
        gradients[3] + channel,
        of.channels - channel,
        0);
#pragma GCC unroll 3
    for (int i = 0; i < kTaps; ++i) {
      const int8_t* const* const pixels = of.pixels + output * of.step + (tap + i) * of.spacing;
      const auto steps = Steps<kVectors>::load(
          pixels[0] + channel,
          pixels[of.step] + channel,
          pixels[2 * of.step] + channel,
          pixels[3 * of.step] + channel,
          of.channels - channel,
          kFlip);
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) {
        sums[i][vector] = _mm512_dpbusd_epi32(sums[i][vector], steps.vectors[vector], gradient.vectors[vector]);
      }
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      _mm512_storeu_si512(to + i * of.sums_stride + kVector * vector, sums[i][vector]);
    }
  }
}

template <int kVectors>
void sum_channels(const DepthwiseGradient& of, int64_t channel) {
  int64_t tap = 0;
  for (; tap + 3 <= of.taps; tap += 3) {
    sum_taps<kVectors, 3>(of, tap, channel);
  }
  for (; tap < of.taps; ++tap) {
    sum_taps<kVectors, 1>(of, tap, channel);
  }
}

void sum_gradient(const DepthwiseGradient& of) {
  int64_t channel = 0;
  for (; channel + 4 * kVector <= of.channels; channel += 4 * kVector) {
    sum_channels<4>(of, channel);
  }
  for (; channel < of.channels; channel += kVector) {
    sum_channels<1>(of, channel);
  }
}

} // namespace

const DepthwiseTable& depthwise_avx512_vnni() {
  static constexpr DepthwiseTable result = {128, sum_row, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
