// Two-dimensional max-pooling that remembers, in a byte, where in its window each largest element lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "storage.h"

namespace torch_odt::kernels {

// Elements of a window: their numbers fit into a byte.
constexpr int64_t kMostWindowElements = 256;

// Windows along one axis of an image. Window `o` has its element `k` at `o * stride - padding + k * dilation`.
struct PoolAxis {
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

// How an image is pooled. It lies in memory as [planes][rows][columns][channels], planes being samples where channels
// lie innermost, and samples times channels where they do not: then `channels` is 1.
struct Pool {
  PoolAxis rows;
  PoolAxis columns;
  int64_t channels;

  int64_t window_elements() const {
    return rows.kernel * columns.kernel;
  }
};

// The rows `begin` to `end` of the output, numbered through all planes. Of equal elements the first counts, and of NaNs
// the last, as in ATen. Every window must have an element inside the input.
template <typename Storage>
void max_pool_rows(
    const Storage* input, const Pool& pool, int64_t begin, int64_t end, Storage* output, uint8_t* offsets);

// The rows `begin` to `end` of the input's gradient, numbered through all planes. Every element of the output's gradient
// is added to where its offset points, in their order. Offsets are those of `max_pool_rows`; others lead anywhere inside
// of the gradient, but never out of it.
template <typename Storage>
void max_pool_backward_rows(
    const Storage* grad_output,
    const uint8_t* offsets,
    const Pool& pool,
    int64_t begin,
    int64_t end,
    Storage* grad_input);

} // namespace torch_odt::kernels
