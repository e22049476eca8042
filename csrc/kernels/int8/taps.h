// Both passes over images as one kind of sum: along an axis, output `i` sums over taps `j` of what lies in the source at
// start + i * step + j * spacing, and nothing outside of it.
#pragma once

#include <cstdint>
#include <numeric>

#include "../window_axis.h"

namespace torch_odt::kernels::int8 {

struct Taps {
  int64_t source;
  int64_t start;
  int64_t step;
  int64_t spacing;
  int64_t count;
  // Which outputs there are, and which elements of the kernel the taps are.
  int64_t outputs;
  int64_t first_output;
  int64_t output_step;
  int64_t first_element;
  int64_t element_step;

  int64_t element(int64_t tap) const {
    return first_element + tap * element_step;
  }
};

inline Taps forward_taps(const WindowAxis& axis) {
  return {axis.input, -axis.padding, axis.stride, axis.dilation, axis.kernel, axis.output, 0, 1, 0, 1};
}

// Of the input's gradient, only positions that are a stride apart take part in the same elements of the kernel: each
// phase is a sum of its own, and every element belongs to one phase. Taps go down the kernel, so that they go up the
// output's gradient.
inline Taps gradient_taps(const WindowAxis& axis, int64_t phase) {
  const int64_t common = std::gcd(axis.dilation, axis.stride);
  const int64_t period = axis.stride / common;
  int64_t first = 0;
  while (first < std::min(axis.kernel, period) && (phase + axis.padding - first * axis.dilation) % axis.stride != 0) {
    ++first;
  }
  const int64_t outputs = phase < axis.input ? (axis.input - phase - 1) / axis.stride + 1 : 0;
  if (first >= std::min(axis.kernel, period)) {
    return {axis.output, 0, 1, 1, 0, outputs, phase, axis.stride, 0, 0};
  }
  const int64_t count = (axis.kernel - 1 - first) / period + 1;
  const int64_t last = first + (count - 1) * period;
  const int64_t start = (phase + axis.padding - last * axis.dilation) / axis.stride;
  return {axis.output, start, 1, axis.dilation / common, count, outputs, phase, axis.stride, last, -period};
}

} // namespace torch_odt::kernels::int8
