// Windows of pooling and of convolutions along one axis of an image.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"

namespace torch_odt::kernels {

// Windows along one axis of an image. Window `o` has its element `k` at `o * stride - padding + k * dilation`.
struct WindowAxis {
  int64_t input;
  int64_t output;
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;

  TORCH_ODT_INLINE int64_t position(int64_t window, int64_t element) const {
    return window * stride - padding + element * dilation;
  }
  // The elements of a window that lie inside the input: from `first` on, up to but without `last`.
  TORCH_ODT_INLINE int64_t first(int64_t window) const {
    const int64_t start = position(window, 0);
    return start >= 0 ? 0 : (dilation - 1 - start) / dilation;
  }
  TORCH_ODT_INLINE int64_t last(int64_t window) const {
    const int64_t left = input - position(window, 0);
    return left <= 0 ? 0 : std::min(kernel, (left + dilation - 1) / dilation);
  }
  // The windows that reach over a position: from `first_over` on, up to but without `last_over`.
  TORCH_ODT_INLINE int64_t first_over(int64_t place) const {
    const int64_t start = place + padding - (kernel - 1) * dilation;
    return start <= 0 ? 0 : (start + stride - 1) / stride;
  }
  TORCH_ODT_INLINE int64_t last_over(int64_t place) const {
    return std::min(output, (place + padding) / stride + 1);
  }
  // The windows whose element `k` lies inside the input: from `first_window` on, up to but without `last_window`.
  TORCH_ODT_INLINE int64_t first_window(int64_t element) const {
    const int64_t start = padding - element * dilation;
    return start <= 0 ? 0 : std::min(output, (start + stride - 1) / stride);
  }
  TORCH_ODT_INLINE int64_t last_window(int64_t element) const {
    const int64_t end = input + padding - element * dilation;
    return end <= 0 ? 0 : std::min(output, (end + stride - 1) / stride);
  }
};

} // namespace torch_odt::kernels
