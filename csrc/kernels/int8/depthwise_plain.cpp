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

TORCH_ODT_INLINE void sum_row_body(const DepthwiseRow* of) {
  for (int64_t output = 0; output < of->outputs; ++output) {
    uint32_t sums[kPanelColumns] = {};
    const char* weights = of->weights;
    for (int64_t row = 0; row < of->row_steps; ++row) {
      for (int64_t tap = 0; tap < of->taps; ++tap, weights += kPanelStepBytes) {
        add_products(of->steps[row] + (output * of->step + tap * of->spacing) * kPanelStepBytes, weights, sums);
      }
    }
    for (int64_t channel = 0; channel < kPanelColumns; ++channel) {
      of->sums[output * of->sums_stride + channel] = static_cast<int32_t>(sums[channel]);
    }
  }
}

TORCH_ODT_INLINE void sum_gradient_body(const DepthwiseGradient* of) {
  for (int64_t output = 0; output < of->outputs; ++output) {
    const char* const gradients = of->grad_output + output * kPanelStepBytes;
    for (int64_t channel = 0; channel < kPanelColumns; ++channel) {
      for (int64_t i = 0; i < kStepBytes; ++i) {
        of->grad_bias[channel] += static_cast<int8_t>(gradients[channel * kStepBytes + i]);
      }
    }
    for (int64_t row = 0; row < of->kernel_rows; ++row) {
      for (int64_t tap = 0; tap < of->taps; ++tap) {
        auto* const sums = reinterpret_cast<uint32_t*>(of->sums + (row * of->taps + tap) * of->sums_stride);
        add_products(
            of->pixels[row] + (output * of->step + tap * of->spacing) * kPanelStepBytes, gradients, sums);
      }
    }
  }
}

void sum_row(const DepthwiseRow& of) {
  run<sum_row_body>(&of);
}

void sum_gradient(const DepthwiseGradient& of) {
  run<sum_gradient_body>(&of);
}

} // namespace

const DepthwiseTable& depthwise_plain() {
  static constexpr DepthwiseTable result = {scalar_table, sum_row, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8
