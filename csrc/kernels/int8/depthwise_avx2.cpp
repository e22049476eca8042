// AVX2: two rows' pixels of a channel as 16-bit numbers, which vpmaddwd multiplies in pairs.
#if defined(__x86_64__) && defined(__GNUC__)

#include "depthwise_tables.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx2"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

// Half of the 16 channels of a step.
TORCH_ODT_TARGET_INLINE __m256i load(const void* step, int half) {
  return _mm256_loadu_si256((const __m256i*)step + half);
}

TORCH_ODT_TARGET_INLINE __m256i add_products(__m256i sum, __m256i a, __m256i b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

template <int kOutputs>
TORCH_ODT_TARGET void sum_outputs(
    const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to, int64_t output) {
  const int64_t step_bytes = of.step * kPanelStepBytes;
  __m256i sums[kOutputs][2];
#pragma GCC unroll 4
  for (int i = 0; i < kOutputs; ++i) {
    sums[i][0] = _mm256_setzero_si256();
    sums[i][1] = _mm256_setzero_si256();
  }
  for (int64_t row = 0; row < of.row_steps; ++row) {
    const char* pixels = of.steps[row] + block_bytes + output * step_bytes;
    for (int64_t tap = 0; tap < of.taps; ++tap, pixels += of.spacing * kPanelStepBytes, weights += kPanelStepBytes) {
      const __m256i low = load(weights, 0);
      const __m256i high = load(weights, 1);
#pragma GCC unroll 4
      for (int i = 0; i < kOutputs; ++i) {
        sums[i][0] = add_products(sums[i][0], low, load(pixels + i * step_bytes, 0));
        sums[i][1] = add_products(sums[i][1], high, load(pixels + i * step_bytes, 1));
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kOutputs; ++i) {
    auto* const place = (__m256i*)(to + (output + i) * of.sums_stride);
    _mm256_storeu_si256(place, sums[i][0]);
    _mm256_storeu_si256(place + 1, sums[i][1]);
  }
}

void sum_line(const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to) {
  int64_t output = 0;
  for (; output + 4 <= of.outputs; output += 4) {
    sum_outputs<4>(of, block_bytes, weights, to, output);
  }
  for (; output < of.outputs; ++output) {
    sum_outputs<1>(of, block_bytes, weights, to, output);
  }
}

void sum_rows(const DepthwiseRows& of) {
  sum_lines<sum_line>(of);
}

// Some taps of a row of the kernel, whose sums stay in registers over the rows.
template <int kTaps>
TORCH_ODT_TARGET void sum_taps(const DepthwiseGradient& of, int64_t block, int64_t row, int64_t tap) {
  int32_t* const to = of.sums + block * kPanelColumns + (row * of.taps + tap) * of.sums_stride;
  __m256i sums[kTaps][2];
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
    sums[i][0] = load(to + i * of.sums_stride, 0);
    sums[i][1] = load(to + i * of.sums_stride, 1);
  }
  const int64_t spacing_bytes = of.spacing * kPanelStepBytes;
  const char* pixels = of.pixels[row] + block * of.pixels_block_bytes + tap * spacing_bytes;
  const char* const gradients = of.grad_output + block * of.grad_output_block_bytes;
  for (int64_t output = 0; output < of.outputs; ++output, pixels += of.step * kPanelStepBytes) {
    const __m256i low = load(gradients + output * kPanelStepBytes, 0);
    const __m256i high = load(gradients + output * kPanelStepBytes, 1);
#pragma GCC unroll 3
    for (int i = 0; i < kTaps; ++i) {
      sums[i][0] = add_products(sums[i][0], low, load(pixels + i * spacing_bytes, 0));
      sums[i][1] = add_products(sums[i][1], high, load(pixels + i * spacing_bytes, 1));
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTaps; ++i) {
    _mm256_storeu_si256((__m256i*)(to + i * of.sums_stride), sums[i][0]);
    _mm256_storeu_si256((__m256i*)(to + i * of.sums_stride) + 1, sums[i][1]);
  }
}

TORCH_ODT_TARGET void sum_gradients(const DepthwiseGradient& of, int64_t block) {
  const char* const gradients = of.grad_output + block * of.grad_output_block_bytes;
  int32_t* const to = of.grad_bias + block * kPanelColumns;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i low = load(to, 0);
  __m256i high = load(to, 1);
  for (int64_t output = 0; output < of.outputs; ++output) {
    low = add_products(low, ones, load(gradients + output * kPanelStepBytes, 0));
    high = add_products(high, ones, load(gradients + output * kPanelStepBytes, 1));
  }
  _mm256_storeu_si256((__m256i*)to, low);
  _mm256_storeu_si256((__m256i*)to + 1, high);
}

void sum_gradient(const DepthwiseGradient& of) {
  for (int64_t block = 0; block < of.blocks; ++block) {
    sum_gradients(of, block);
    for (int64_t row = 0; row < of.kernel_rows; ++row) {
      int64_t tap = 0;
      for (; tap + 3 <= of.taps; tap += 3) {
        sum_taps<3>(of, block, row, tap);
      }
      for (; tap < of.taps; ++tap) {
        sum_taps<1>(of, block, row, tap);
      }
    }
  }
}

} // namespace

const DepthwiseTable& depthwise_avx2() {
  static constexpr DepthwiseTable result = {avx2_table, sum_rows, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
