// AVX-512 with VNNI: vpdpbusd multiplies four rows' pixels of 16 channels.
#if defined(__x86_64__) && defined(__GNUC__)

#include "depthwise_tables.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]]

namespace torch_odt::kernels::int8 {

namespace {

// Outputs at a time, each of which is a chain of its own.
template <int kOutputs>
TORCH_ODT_TARGET void sum_outputs(
    const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to, int64_t output) {
  const int64_t step_bytes = of.step * kPanelStepBytes;
  __m512i sums[kOutputs];
#pragma GCC unroll 8
  for (int i = 0; i < kOutputs; ++i) {
    sums[i] = _mm512_setzero_si512();
  }
  for (int64_t row = 0; row < of.row_steps; ++row) {
    const char* pixels = of.steps[row] + block_bytes + output * step_bytes;
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
    _mm512_storeu_si512(to + (output + i) * of.sums_stride, sums[i]);
  }
}

// Few taps under one step of rows, for lines that see the same: the weights stay in registers.
template <int kLines, int kTaps>
TORCH_ODT_TARGET void sum_few_taps(const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to) {
  __m512i taps[kLines][kTaps];
#pragma GCC unroll 4
  for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 3
    for (int tap = 0; tap < kTaps; ++tap) {
      taps[line][tap] = _mm512_loadu_si512(weights + line * of.weights_line_bytes + tap * kPanelStepBytes);
    }
  }
  const char* pixels = of.steps[0] + block_bytes;
  // Copies, so that no store makes them be read again.
  const int64_t spacing_bytes = of.spacing * kPanelStepBytes;
  const int64_t step_bytes = of.step * kPanelStepBytes;
  const int64_t sums_stride = of.sums_stride;
  const int64_t outputs = of.outputs;
  const int64_t line_sums = outputs * sums_stride;
  for (int64_t output = 0; output < outputs; ++output) {
    __m512i sums[kLines];
#pragma GCC unroll 3
    for (int tap = 0; tap < kTaps; ++tap) {
      const __m512i pixel = _mm512_loadu_si512(pixels + tap * spacing_bytes);
#pragma GCC unroll 4
      for (int line = 0; line < kLines; ++line) {
        const __m512i before = tap == 0 ? _mm512_setzero_si512() : sums[line];
        sums[line] = _mm512_dpbusd_epi32(before, pixel, taps[line][tap]);
      }
    }
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      _mm512_storeu_si512(to + line * line_sums, sums[line]);
    }
    pixels += step_bytes;
    to += sums_stride;
  }
}

// So many lines at a time, which most groups of so few taps have.
template <int kLines, int kTaps>
void sum_lines_of_few_taps(const DepthwiseRows& of) {
  if (of.lines != kLines) {
    sum_lines<sum_few_taps<1, kTaps>>(of);
    return;
  }
  for (int64_t block = 0; block < of.blocks; ++block) {
    sum_few_taps<kLines, kTaps>(
        of,
        block * of.steps_block_bytes,
        of.weights + block * of.weights_block_bytes,
        of.sums + block * kPanelColumns);
  }
}

void sum_line(const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to) {
  int64_t output = 0;
  for (; output + 8 <= of.outputs; output += 8) {
    sum_outputs<8>(of, block_bytes, weights, to, output);
  }
  for (; output + 2 <= of.outputs; output += 2) {
    sum_outputs<2>(of, block_bytes, weights, to, output);
  }
  if (output < of.outputs) {
    sum_outputs<1>(of, block_bytes, weights, to, output);
  }
}

void sum_rows(const DepthwiseRows& of) {
  if (of.row_steps == 1 && of.taps == 3) {
    sum_lines<sum_few_taps<1, 3>>(of);
  } else if (of.row_steps == 1 && of.taps == 2) {
    sum_lines_of_few_taps<3, 2>(of);
  } else if (of.row_steps == 1 && of.taps == 1) {
    sum_lines_of_few_taps<4, 1>(of);
  } else {
    sum_lines<sum_line>(of);
  }
}

// Some taps, whose sums stay in registers over the rows.
template <int kRows, int kTaps>
TORCH_ODT_TARGET void sum_taps(const DepthwiseGradient& of, int64_t block, int64_t row, int64_t tap) {
  __m512i sums[kRows][kTaps];
  const char* pixels[kRows];
  int32_t* const to = of.sums + block * kPanelColumns + (row * of.taps + tap) * of.sums_stride;
#pragma GCC unroll 3
  for (int i = 0; i < kRows; ++i) {
    pixels[i] = of.pixels[row + i] + block * of.pixels_block_bytes + tap * of.spacing * kPanelStepBytes;
#pragma GCC unroll 3
    for (int j = 0; j < kTaps; ++j) {
      sums[i][j] = _mm512_loadu_si512(to + (i * of.taps + j) * of.sums_stride);
    }
  }
  const char* const gradients = of.grad_output + block * of.grad_output_block_bytes;
  const int64_t step_bytes = of.step * kPanelStepBytes;
  const int64_t spacing_bytes = of.spacing * kPanelStepBytes;
  for (int64_t output = 0; output < of.outputs; ++output) {
    const __m512i gradient = _mm512_loadu_si512(gradients + output * kPanelStepBytes);
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
      _mm512_storeu_si512(to + (i * of.taps + j) * of.sums_stride, sums[i][j]);
    }
  }
}

template <int kRows>
void sum_kernel_rows(const DepthwiseGradient& of, int64_t block, int64_t row) {
  int64_t tap = 0;
  for (; tap + 3 <= of.taps; tap += 3) {
    sum_taps<kRows, 3>(of, block, row, tap);
  }
  for (; tap < of.taps; ++tap) {
    sum_taps<kRows, 1>(of, block, row, tap);
  }
}

void sum_gradient(const DepthwiseGradient& of) {
  for (int64_t block = 0; block < of.blocks; ++block) {
    int64_t row = 0;
    for (; row + 3 <= of.kernel_rows; row += 3) {
      sum_kernel_rows<3>(of, block, row);
    }
    for (; row < of.kernel_rows; ++row) {
      sum_kernel_rows<1>(of, block, row);
    }
  }
}

} // namespace

const DepthwiseTable& depthwise_avx512_vnni() {
  static constexpr DepthwiseTable result = {
      avx512_vnni_table,
      sum_rows,
      sum_gradient,
      depthwise_sum_columns_avx512_vnni,
      depthwise_sum_columns_gradient_avx512_vnni};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
