// Two sums for each channel, over whatever terms: the loops that statistics and gradients of parameters share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "channel_layout.h"
#include "isa.h"

namespace torch_odt::kernels {

// Adds `rows` rows to the sums of their columns. `Terms::add(element, channel, first, second)` adds one element's terms
// to two numbers of type `Terms::Parameter`.
template <int64_t rows, bool channels_are_columns, typename Terms>
TORCH_ODT_INLINE void add_rows(
    const Terms& terms,
    int64_t element,
    int64_t row_elements,
    int64_t columns,
    int64_t channel,
    double* __restrict first,
    double* __restrict second) {
  for (int64_t column = 0; column < columns; ++column) {
    typename Terms::Parameter a{0};
    typename Terms::Parameter b{0};
#pragma GCC unroll 8
    for (int64_t row = 0; row < rows; ++row) {
      terms.add(element + row * row_elements + column, channels_are_columns ? column : channel, a, b);
    }
    first[column] += a;
    second[column] += b;
  }
}

template <bool channels_are_columns, typename Terms>
TORCH_ODT_INLINE void add_matrix(
    const Terms& terms,
    int64_t element,
    int64_t rows,
    int64_t columns,
    int64_t channel,
    double* __restrict first,
    double* __restrict second) {
  int64_t row = 0;
  // Sums of so few terms round away next to nothing before they are added to a double.
  for (; row + 8 <= rows; row += 8) {
    add_rows<8, channels_are_columns>(terms, element + row * columns, columns, columns, channel, first, second);
  }
  if (row + 4 <= rows) {
    add_rows<4, channels_are_columns>(terms, element + row * columns, columns, columns, channel, first, second);
    row += 4;
  }
  for (; row < rows; ++row) {
    add_rows<1, channels_are_columns>(terms, element + row * columns, columns, columns, channel, first, second);
  }
}

// Takes both sums of a task and puts them into arrays of [slices][channels].
template <typename Terms>
TORCH_ODT_INLINE void sum_task(const Terms& terms, const Slices& slices, int64_t task, double* first, double* second) {
  const int64_t channels = slices.layout.channels;
  const int64_t inner = slices.layout.inner;
  if (inner == 1) {
    double* const a = first + task * channels;
    double* const b = second + task * channels;
    std::fill_n(a, channels, 0.0);
    std::fill_n(b, channels, 0.0);
    const int64_t begin = slices.begin(task);
    add_matrix<true>(terms, begin * channels, slices.begin(task + 1) - begin, channels, 0, a, b);
    return;
  }

  // Where a channel is a run, it is summed as a matrix of this many columns, so that columns fill vectors here too.
  constexpr int64_t kColumns = 16;
  double a[kColumns] = {};
  double b[kColumns] = {};
  const int64_t slice = task / channels;
  const int64_t channel = task % channels;
  const int64_t rows = inner / kColumns;
  for (int64_t outer = slices.begin(slice); outer < slices.begin(slice + 1); ++outer) {
    const int64_t element = (outer * channels + channel) * inner;
    add_matrix<false>(terms, element, rows, kColumns, channel, a, b);
    add_rows<1, false>(terms, element + rows * kColumns, 0, inner - rows * kColumns, channel, a, b);
  }
  for (int64_t half = kColumns / 2; half > 0; half /= 2) {
    for (int64_t column = 0; column < half; ++column) {
      a[column] += a[column + half];
      b[column] += b[column + half];
    }
  }
  first[task] = a[0];
  second[task] = b[0];
}

} // namespace torch_odt::kernels
