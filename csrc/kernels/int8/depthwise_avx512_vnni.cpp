// AVX-512 with VNNI: vpdpbusd multiplies four rows' pixels of 16 channels.
#if defined(__x86_64__) && defined(__GNUC__)

#include "depthwise_tables.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]]

namespace torch_odt::kernels::int8 {

namespace {

// Outputs at a time, each of which is a chain of its own.
template <int kOutputs>
TORCH_ODT_TARGET void sum_outputs(const DepthwiseRow& of, int64_t output) {
  const int64_t step_bytes = of.step * kPanelStepBytes;
  __m512i sums[kOutputs];
#pragma GCC unroll 8
  for (int i = 0; i < kOutputs; ++i) {
    sums[i] = _mm512_setzero_si512();
  }
  const char* weights = of.weights;
  for (int64_t row = 0; row < of.row_steps; ++row) {
    const char* pixels = of.steps[row] + output * step_bytes;
    for (int64_t tap = 0; tap < of.taps; ++tap, pixels += of.spacing * kPanelStepBytes, weights += kPanelStepBytes) {
      const __m512i weight = _mm512_loadu_si512(weights);
#pragma GCC unroll 8
      for (int i = 0; i < kOutputs; ++i) {
        sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_loadu_si512(pixels + i * step_bytes), weight);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kOutputs; ++i) {
    _mm512_storeu_si512(of.sums + (output + i) * of.sums_stride, sums[i]);
  }
}

// Three taps side by side under one step of rows: the weights stay in registers.
TORCH_ODT_TARGET void sum_three_taps(const DepthwiseRow& of) {
  const __m512i first = _mm512_loadu_si512(of.weights);
  const __m512i second = _mm512_loadu_si512(of.weights + kPanelStepBytes);
  const __m512i third = _mm512_loadu_si512(of.weights + 2 * kPanelStepBytes);
  const char* pixels = of.steps[0];
  int32_t* sums = of.sums;
  for (int64_t output = 0; output < of.outputs; ++output) {
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(pixels), first);
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(pixels + of.spacing * kPanelStepBytes), second);
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(pixels + 2 * of.spacing * kPanelStepBytes), third);
    _mm512_storeu_si512(sums, sum);
    pixels += of.step * kPanelStepBytes;
    sums += of.sums_stride;
  }
}

void sum_row(const DepthwiseRow& of) {
  if (of.row_steps == 1 && of.taps == 3) {
    sum_three_taps(of);
    return;
  }
  int64_t output = 0;
  for (; output + 8 <= of.outputs; output += 8) {
    sum_outputs<8>(of, output);
  }
  for (; output + 2 <= of.outputs; output += 2) {
    sum_outputs<2>(of, output);
  }
  if (output < of.outputs) {
    sum_outputs<1>(of, output);
  }
}

// Some taps, whose sums stay in registers over the rows.
template <int kRows, int kTaps>
TORCH_ODT_TARGET void sum_taps(const DepthwiseGradient& of, int64_t row, int64_t tap) {
  __m512i sums[kRows][kTaps];
  const char* pixels[kRows];
#pragma GCC unroll 3
  for (int i = 0; i < kRows; ++i) {
    pixels[i] = of.pixels[row + i] + tap * of.spacing * kPanelStepBytes;
#pragma GCC unroll 3
    for (int j = 0; j < kTaps; ++j) {
      sums[i][j] = _mm512_loadu_si512(of.sums + ((row + i) * of.taps + tap + j) * of.sums_stride);
    }
  }
  const int64_t step_bytes = of.step * kPanelStepBytes;
  const int64_t spacing_bytes = of.spacing * kPanelStepBytes;
  for (int64_t output = 0; output < of.outputs; ++output) {
    const __m512i gradient = _mm512_loadu_si512(of.grad_output + output * kPanelStepBytes);
#pragma GCC unroll 3
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
      for (int j = 0; j < kTaps; ++j) {
        sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], _mm512_loadu_si512(pixels[i] + j * spacing_bytes), gradient);
      }
      pixels[i] += step_bytes;
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kTaps; ++j) {
      _mm512_storeu_si512(of.sums + ((row + i) * of.taps + tap + j) * of.sums_stride, sums[i][j]);
    }
  }
}

template <int kRows>
void sum_rows(const DepthwiseGradient& of, int64_t row) {
  int64_t tap = 0;
  for (; tap + 3 <= of.taps; tap += 3) {
    sum_taps<kRows, 3>(of, row, tap);
  }
  for (; tap < of.taps; ++tap) {
    sum_taps<kRows, 1>(of, row, tap);
  }
}

TORCH_ODT_TARGET void sum_gradients(const DepthwiseGradient& of) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sum = _mm512_loadu_si512(of.grad_bias);
  for (int64_t output = 0; output < of.outputs; ++output) {
    sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(of.grad_output + output * kPanelStepBytes));
  }
  _mm512_storeu_si512(of.grad_bias, sum);
}

void sum_gradient(const DepthwiseGradient& of) {
  sum_gradients(of);
  int64_t row = 0;
  for (; row + 3 <= of.kernel_rows; row += 3) {
    sum_rows<3>(of, row);
  }
  for (; row < of.kernel_rows; ++row) {
    sum_rows<1>(of, row);
  }
}

} // namespace

const DepthwiseTable& depthwise_avx512_vnni() {
  static constexpr DepthwiseTable result = {avx512_vnni_table, sum_row, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
