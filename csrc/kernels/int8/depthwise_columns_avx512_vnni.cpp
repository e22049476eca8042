// AVX-512 with VNNI: depthwise sums straight from images. Four pixels are interleaved in registers, and used for all
// outputs that see them while they are there.
#if defined(__x86_64__) && defined(__GNUC__)

#include "avx512.h"
#include "depthwise_tables.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_SETS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#define TORCH_ODT_TARGET [[gnu::target(TORCH_ODT_SETS)]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target(TORCH_ODT_SETS), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kWhole = 64; // channels, whose bytes are a vector
constexpr int64_t kLanes = 16; // channels, whose steps of four bytes are one

// 64 channels or the first of them, as they lie.
template <bool kAll>
TORCH_ODT_TARGET_INLINE __m512i load(const int8_t* from, __mmask64 inside) {
  return kAll ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(inside, from);
}

// Pixels as unsigned bytes, each greater by 128.
TORCH_ODT_TARGET_INLINE __m512i flipped(__m512i pixels) {
  return _mm512_xor_si512(pixels, _mm512_set1_epi8(-128));
}

// Dealt out so that interleaving, which stays within lanes, leaves channels in their order.
TORCH_ODT_TARGET_INLINE __m512i dealt(__m512i pixels) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, pixels);
}

// A column's pixels as one step for each of so many sixteens of channels, `channels` being those of 64 that there are.
template <int kVectors, bool kAll>
TORCH_ODT_TARGET_INLINE void interleave(
    const int8_t* const* pixels, int64_t channel, int64_t channels, __m512i (&to)[kVectors]) {
  __m512i steps[4];
  interleave_64_columns<kAll, true>(pixels, channel, channels, _mm512_set1_epi8(-128), steps);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    to[v] = steps[v];
  }
}

// So many sixteens of channels from `channel` on, `channels` being those of 64 that there are.
template <int kLines, int kTaps, int kStep, int kVectors, bool kAll>
TORCH_ODT_TARGET void sum_some(const DepthwiseColumns& of, int64_t line, int64_t channel, int64_t channels) {
  const char* weights[kVectors];
  const int32_t* terms = of.terms + line * of.terms_stride + channel;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    weights[v] = of.weights + (channel / kPanelColumns + v) * of.weights_block_bytes + line * of.weights_line_bytes;
  }
  int32_t* to[kLines];
#pragma GCC unroll 4
  for (int i = 0; i < kLines; ++i) {
    to[i] = of.sums + of.line_sums[line + i] + channel;
  }
  // Copies, so that no store makes them be read again.
  const int64_t line_bytes = of.weights_line_bytes;
  const int64_t terms_stride = of.terms_stride;
  const int64_t sums_stride = of.sums_stride;
  const int64_t column_pixels = of.column_pixels;
  const int64_t outputs = of.outputs;
  const int8_t* const* pixels = of.pixels;
  __m512i seen[kTaps][kVectors];
#pragma GCC unroll 3
  for (int tap = kStep; tap < kTaps; ++tap, pixels += column_pixels) {
    interleave<kVectors, kAll>(pixels, channel, channels, seen[tap]);
  }
  for (int64_t output = 0; output < outputs; ++output) {
#pragma GCC unroll 3
    for (int tap = 0; tap < kTaps - kStep; ++tap) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        seen[tap][v] = seen[tap + kStep][v];
      }
    }
#pragma GCC unroll 3
    for (int tap = kTaps - kStep; tap < kTaps; ++tap, pixels += column_pixels) {
      interleave<kVectors, kAll>(pixels, channel, channels, seen[tap]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        __m512i sums = _mm512_loadu_si512(terms + i * terms_stride + v * kLanes);
#pragma GCC unroll 3
        for (int tap = 0; tap < kTaps; ++tap) {
          const __m512i weight = _mm512_loadu_si512(weights[v] + i * line_bytes + tap * kPanelStepBytes);
          sums = _mm512_dpbusd_epi32(sums, seen[tap][v], weight);
        }
        _mm512_storeu_si512(to[i] + v * kLanes, sums);
      }
      to[i] += sums_stride;
    }
  }
}

template <int kLines, int kTaps, int kStep>
void sum_lines_of(const DepthwiseColumns& of, int64_t line) {
  int64_t channel = 0;
  for (; channel + kWhole <= of.channels; channel += kWhole) {
    sum_some<kLines, kTaps, kStep, 4, true>(of, line, channel, kWhole);
  }
  const int64_t left = of.channels - channel;
  if (left > 3 * kLanes) {
    sum_some<kLines, kTaps, kStep, 4, false>(of, line, channel, left);
  } else if (left > 2 * kLanes) {
    sum_some<kLines, kTaps, kStep, 3, false>(of, line, channel, left);
  } else if (left > kLanes) {
    sum_some<kLines, kTaps, kStep, 2, false>(of, line, channel, left);
  } else if (left > 0) {
    sum_some<kLines, kTaps, kStep, 1, false>(of, line, channel, left);
  }
}

template <int kMost, int kTaps, int kStep>
void sum_all_lines(const DepthwiseColumns& of) {
  int64_t line = 0;
  for (; line + kMost <= of.lines; line += kMost) {
    sum_lines_of<kMost, kTaps, kStep>(of, line);
  }
  for (; line < of.lines; ++line) {
    sum_lines_of<1, kTaps, kStep>(of, line);
  }
}

// 64 channels or the first of them, which are dealt out: whole ones stay in the order of lanes.
struct Channels {
  int64_t first;
  __mmask64 inside;

  template <bool kAll>
  TORCH_ODT_TARGET_INLINE __m512i of(const int8_t* pixels, const Channels& channels) {
    const __m512i bytes = load<kAll>(pixels + channels.first, channels.inside);
    return kAll ? bytes : dealt(bytes);
  }
};

// One step for each of two sixteens of channels, or of one: the upper half of each lane, or the lower.
template <bool kUpper, int kVectors>
TORCH_ODT_TARGET_INLINE void interleave_half(__m512i a, __m512i b, __m512i c, __m512i d, __m512i (&to)[kVectors]) {
  const __m512i ab = kUpper ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
  const __m512i cd = kUpper ? _mm512_unpackhi_epi8(c, d) : _mm512_unpacklo_epi8(c, d);
  to[0] = _mm512_unpacklo_epi16(ab, cd);
  if constexpr (kVectors > 1) {
    to[1] = _mm512_unpackhi_epi16(ab, cd);
  }
}

// What a column of pixels gives, for each row of the kernel.
template <int kStep, bool kUpper, int kVectors, bool kAll>
TORCH_ODT_TARGET_INLINE void interleave_rows(
    const int8_t* const* pixels, const Channels& channels, __m512i (&to)[3][kVectors]) {
  __m512i rows[3 + 3 * kStep];
#pragma GCC unroll 9
  for (int i = 0; i < 3 + 3 * kStep; ++i) {
    rows[i] = flipped(Channels::of<kAll>(pixels[i], channels));
  }
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    interleave_half<kUpper, kVectors>(rows[i], rows[i + kStep], rows[i + 2 * kStep], rows[i + 3 * kStep], to[i]);
  }
}

template <int kVectors>
TORCH_ODT_TARGET_INLINE void add(
    __m512i (&sums)[3][3][kVectors],
    int tap,
    const __m512i (&pixels)[3][kVectors],
    const __m512i (&gradients)[kVectors]) {
#pragma GCC unroll 3
  for (int row = 0; row < 3; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[row][tap][v] = _mm512_dpbusd_epi32(sums[row][tap][v], pixels[row][v], gradients[v]);
    }
  }
}

template <int kStep, bool kUpper, int kVectors, bool kAll>
TORCH_ODT_TARGET void add_half(const DepthwiseColumnsGradient& of, int64_t first_channel, __mmask64 inside) {
  constexpr int kRows = 3 + 3 * kStep;
  const Channels channels{first_channel, inside};
  const int64_t first = first_channel + (kUpper ? 2 * kLanes : 0);
  const __m512i one = _mm512_set1_epi8(1);
  __m512i sums[3][3][kVectors];
  __m512i bias[kVectors];
  // Of the output that a column's first tap belongs to, and of those before.
  __m512i gradients[3][kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    bias[v] = _mm512_loadu_si512(of.grad_bias + first + v * kLanes);
#pragma GCC unroll 9
    for (int i = 0; i < 9; ++i) {
      sums[i / 3][i % 3][v] = _mm512_loadu_si512(of.sums + i * of.sums_stride + first + v * kLanes);
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) {
      gradients[i][v] = _mm512_setzero_si512();
    }
  }
  const int8_t* const* pixels = of.pixels;
  const int8_t* const* outputs = of.grad_outputs;
  // Columns that are the first tap of an output, and those behind the last one that are others' alone.
  constexpr int kBehind = kStep == 1 ? 2 : 1;
  for (int64_t output = 0; output < of.outputs + kBehind; ++output) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      gradients[2][v] = gradients[1][v];
      gradients[1][v] = gradients[0][v];
      gradients[0][v] = _mm512_setzero_si512();
    }
    if (output < of.outputs) {
      interleave_half<kUpper, kVectors>(
          Channels::of<kAll>(outputs[0], channels),
          Channels::of<kAll>(outputs[1], channels),
          Channels::of<kAll>(outputs[2], channels),
          Channels::of<kAll>(outputs[3], channels),
          gradients[0]);
      outputs += 4;
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      bias[v] = _mm512_dpbusd_epi32(bias[v], one, gradients[0][v]);
    }
    __m512i column[3][kVectors];
    interleave_rows<kStep, kUpper, kVectors, kAll>(pixels, channels, column);
    pixels += kRows;
    add<kVectors>(sums, 0, column, gradients[0]);
    if constexpr (kStep == 1) {
      add<kVectors>(sums, 1, column, gradients[1]);
      add<kVectors>(sums, 2, column, gradients[2]);
    } else {
      add<kVectors>(sums, 2, column, gradients[1]);
      if (output < of.outputs) {
        interleave_rows<kStep, kUpper, kVectors, kAll>(pixels, channels, column);
        pixels += kRows;
        add<kVectors>(sums, 1, column, gradients[0]);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    _mm512_storeu_si512(of.grad_bias + first + v * kLanes, bias[v]);
#pragma GCC unroll 9
    for (int i = 0; i < 9; ++i) {
      _mm512_storeu_si512(of.sums + i * of.sums_stride + first + v * kLanes, sums[i / 3][i % 3][v]);
    }
  }
}

template <int kStep>
void add_columns(const DepthwiseColumnsGradient& of) {
  int64_t channel = 0;
  for (; channel + kWhole <= of.channels; channel += kWhole) {
    add_half<kStep, false, 2, true>(of, channel, ~__mmask64{0});
    add_half<kStep, true, 2, true>(of, channel, ~__mmask64{0});
  }
  const int64_t left = of.channels - channel;
  const auto inside = static_cast<__mmask64>((uint64_t{1} << left) - 1);
  if (left > kLanes) {
    add_half<kStep, false, 2, false>(of, channel, inside);
  } else if (left > 0) {
    add_half<kStep, false, 1, false>(of, channel, inside);
  }
  if (left > 3 * kLanes) {
    add_half<kStep, true, 2, false>(of, channel, inside);
  } else if (left > 2 * kLanes) {
    add_half<kStep, true, 1, false>(of, channel, inside);
  }
}

} // namespace

void depthwise_sum_columns_avx512_vnni(const DepthwiseColumns& of) {
  if (of.taps == 1) {
    sum_all_lines<4, 1, 1>(of);
  } else if (of.step == 1) {
    sum_all_lines<2, 3, 1>(of);
  } else {
    sum_all_lines<1, 3, 2>(of);
  }
}

void depthwise_sum_columns_gradient_avx512_vnni(const DepthwiseColumnsGradient& of) {
  if (of.step == 1) {
    add_columns<1>(of);
  } else {
    add_columns<2>(of);
  }
}

} // namespace torch_odt::kernels::int8

#endif
