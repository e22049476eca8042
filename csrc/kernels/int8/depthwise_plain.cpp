// Plain C++ for any processor.
#include "depthwise_tables.h"

#include "../isa.h"

namespace torch_odt::kernels::int8 {

namespace {

// Those of four rows for each of 16 channels.
TORCH_ODT_INLINE void add_products(const char* pixels, const char* values, uint32_t* sums) {
  for (int64_t channel = 0; channel < kPanelColumns; ++channel) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kStepBytes; ++i) {
      const auto pixel = static_cast<int8_t>(pixels[channel * kStepBytes + i]);
      sum += int32_t{pixel} * static_cast<int8_t>(values[channel * kStepBytes + i]);
    }
    sums[channel] += static_cast<uint32_t>(sum);
  }
}

TORCH_ODT_INLINE void sum_line(const DepthwiseRows& of, int64_t block_bytes, const char* weights, int32_t* to) {
  for (int64_t output = 0; output < of.outputs; ++output) {
    uint32_t sums[kPanelColumns] = {};
    for (int64_t row = 0; row < of.row_steps; ++row) {
      const char* pixels = of.steps[row] + block_bytes + output * of.step * kPanelStepBytes;
      for (int64_t tap = 0; tap < of.taps; ++tap, pixels += of.spacing * kPanelStepBytes) {
        add_products(pixels, weights + (row * of.taps + tap) * kPanelStepBytes, sums);
      }
    }
    for (int64_t channel = 0; channel < kPanelColumns; ++channel) {
      to[output * of.sums_stride + channel] = static_cast<int32_t>(sums[channel]);
    }
  }
}

// The sum of four rows for each of 16 channels.
TORCH_ODT_INLINE void add_values(const char* values, int32_t* sums) {
  for (int64_t channel = 0; channel < kPanelColumns; ++channel) {
    for (int64_t i = 0; i < kStepBytes; ++i) {
      sums[channel] += static_cast<int8_t>(values[channel * kStepBytes + i]);
    }
  }
}

TORCH_ODT_INLINE void add_taps(const DepthwiseGradient& of, int64_t block, int64_t output) {
  const char* const gradients = of.grad_output + block * of.grad_output_block_bytes + output * kPanelStepBytes;
  add_values(gradients, of.grad_bias + block * kPanelColumns);
  for (int64_t row = 0; row < of.kernel_rows; ++row) {
    const char* pixels = of.pixels[row] + block * of.pixels_block_bytes + output * of.step * kPanelStepBytes;
    for (int64_t tap = 0; tap < of.taps; ++tap, pixels += of.spacing * kPanelStepBytes) {
      int32_t* const to = of.sums + block * kPanelColumns + (row * of.taps + tap) * of.sums_stride;
      add_products(pixels, gradients, reinterpret_cast<uint32_t*>(to));
    }
  }
}

TORCH_ODT_INLINE void sum_rows_body(const DepthwiseRows* of) {
  sum_lines<sum_line>(*of);
}

TORCH_ODT_INLINE void sum_gradient_body(const DepthwiseGradient* of) {
  for (int64_t block = 0; block < of->blocks; ++block) {
    for (int64_t output = 0; output < of->outputs; ++output) {
      add_taps(*of, block, output);
    }
  }
}

void sum_rows(const DepthwiseRows& of) {
  run<sum_rows_body>(&of);
}

void sum_gradient(const DepthwiseGradient& of) {
  run<sum_gradient_body>(&of);
}

} // namespace

const DepthwiseTable& depthwise_plain() {
  static constexpr DepthwiseTable result = {scalar_table, sum_rows, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8
