// Two-dimensional max-pooling that remembers, in a byte, where in its window each largest element lies.
#pragma once

#include <cstdint>

#include "isa.h"
#include "storage.h"
#include "window_axis.h"

namespace torch_odt::kernels {

// Elements of a window: their numbers fit into a byte.
constexpr int64_t kMostWindowElements = 256;

// How an image is pooled. It lies in memory as [planes][rows][columns][channels], planes being samples where channels
// lie innermost, and samples times channels where they do not: then `channels` is 1.
struct Pool {
  WindowAxis rows;
  WindowAxis columns;
  int64_t channels;

  int64_t window_elements() const {
    return rows.kernel * columns.kernel;
  }
  bool windows_overlap() const {
    const auto overlap = [](const WindowAxis& axis) { return (axis.kernel - 1) * axis.dilation + 1 > axis.stride; };
    return overlap(rows) || overlap(columns);
  }
};

// The rows `begin` to `end` of the output, numbered through all planes. Of equal elements the first counts, and of NaNs
// the last, as in ATen. Every window must have an element inside the input.
template <typename Storage>
void max_pool_rows(
    const Storage* input, const Pool& pool, int64_t begin, int64_t end, Storage* output, uint8_t* offsets);

// The rows `begin` to `end` of the input's gradient, numbered through all planes. Every element of the output's gradient
// is added to where its offset points, in their order; sums of int8 wrap around. Offsets are those of `max_pool_rows`;
// others lead anywhere inside of the gradient, but never out of it.
template <typename Storage>
void max_pool_backward_rows(
    const Storage* grad_output,
    const uint8_t* offsets,
    const Pool& pool,
    int64_t begin,
    int64_t end,
    Storage* grad_input);

// Bits of an input's elements, one for each in the order of memory, where windows have their largest: of the pixels
// `begin` to `end` of the output, numbered through all samples, in channels_last. `begin` is a multiple of 8, and `end`
// one as well or the number of pixels. Offsets are those of `max_pool_rows`, and no others.
void pooled_bits(
    const uint8_t* bits, const uint8_t* offsets, const Pool& pool, int64_t begin, int64_t end, uint8_t* pooled);

} // namespace torch_odt::kernels
