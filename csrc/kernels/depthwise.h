// Depthwise convolutions of float32 images in channels_last, and their gradients: small ones, at which libraries spend
// more time on preparing than on computing.
#pragma once

#include <cstdint>

#include "window_axis.h"

namespace torch_odt::kernels {

// An image lies in memory as [samples][rows][columns][channels], and the weight as [taps][channels], a tap being an
// element of the window. Windows have no dilation.
struct Depthwise {
  WindowAxis rows;
  WindowAxis columns;
  int64_t channels;

  int64_t taps() const {
    return rows.kernel * columns.kernel;
  }
};

// The rows `begin` to `end` of the output, numbered through all samples. `bias` may be null.
void depthwise_rows(
    const float* input,
    const float* taps,
    const float* bias,
    const Depthwise& conv,
    int64_t begin,
    int64_t end,
    float* output);

// The rows `begin` to `end` of the input's gradient, numbered through all samples.
void depthwise_grad_input_rows(
    const float* grad_output, const float* taps, const Depthwise& conv, int64_t begin, int64_t end, float* grad_input);

// The channels `begin` to `end` of the weight's gradient.
void depthwise_grad_weight_channels(
    const float* grad_output,
    const float* input,
    const Depthwise& conv,
    int64_t samples,
    int64_t begin,
    int64_t end,
    float* grad_taps);

} // namespace torch_odt::kernels
