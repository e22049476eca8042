// Two sums for each channel, over whatever terms: the loops that statistics and gradients of parameters share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "channel_layout.h"
#include "isa.h"

namespace torch_odt::kernels {

// Adds `rows` rows to the sums of their columns. `Terms::add(element, channel, first, second)` adds one element's terms
// to two numbers of type `Terms::Parameter`. What terms write, no other element of them reads.
template <int64_t rows, typename Terms>
TORCH_ODT_INLINE void add_rows(
    const Terms& terms,
    int64_t element,
    int64_t row_elements,
    int64_t columns,
    int64_t channel,
    double* __restrict first,
    double* __restrict second) {
#pragma GCC ivdep
  for (int64_t column = 0; column < columns; ++column) {
    typename Terms::Parameter a{0};
    typename Terms::Parameter b{0};
#pragma GCC unroll 8
    for (int64_t row = 0; row < rows; ++row) {
      terms.add(element + row * row_elements + column, channel, a, b);
    }
    first[column] += a;
    second[column] += b;
  }
}

// One channel's values, as a matrix.
template <typename Terms>
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
    add_rows<8>(terms, element + row * columns, columns, columns, channel, first, second);
  }
  if (row + 4 <= rows) {
    add_rows<4>(terms, element + row * columns, columns, columns, channel, first, second);
    row += 4;
  }
  for (; row < rows; ++row) {
    add_rows<1>(terms, element + row * columns, columns, columns, channel, first, second);
  }
}

// Adds `positions` neighbouring positions to the sums of each channel from `begin` up to `end`.
template <int64_t positions, typename Terms>
TORCH_ODT_INLINE void add_positions(
    const Terms& terms,
    int64_t element,
    int64_t channels,
    int64_t begin,
    int64_t end,
    typename Terms::Parameter* __restrict first,
    typename Terms::Parameter* __restrict second) {
  // Processors that see a few streams at once fetch too little ahead of them by themselves.
  constexpr int64_t kElementBytes = sizeof(typename Terms::Storage);
  constexpr int64_t kAheadBytes = 2048;
  constexpr int64_t kLineBytes = 64;
  // What is read next: what follows in memory, or, where rows are taken in parts, that part of the next row.
  const int64_t ahead = end - begin == channels ? kAheadBytes / kElementBytes : positions * channels;
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t channel = begin; channel < end; channel += kLineBytes / kElementBytes) {
      terms.prefetch(element + position * channels + channel + ahead);
    }
  }
#pragma GCC ivdep
  for (int64_t channel = begin; channel < end; ++channel) {
    typename Terms::Parameter a = first[channel - begin];
    typename Terms::Parameter b = second[channel - begin];
    for (int64_t position = 0; position < positions; ++position) {
      terms.add(element + position * channels + channel, channel, a, b);
    }
    first[channel - begin] = a;
    second[channel - begin] = b;
  }
}

// The sums of all channels over the positions of a slice, where the channels of a position are neighbours.
template <typename Terms>
TORCH_ODT_INLINE void sum_positions(
    const Terms& terms,
    int64_t begin,
    int64_t end,
    int64_t channels,
    double* __restrict first,
    double* __restrict second) {
  // So many channels' sums stay in the nearest cache; sums of so few positions round away next to nothing.
  constexpr int64_t kChannels = 512;
  constexpr int64_t kPositions = 16;
  typename Terms::Parameter a[kChannels];
  typename Terms::Parameter b[kChannels];
  for (int64_t channel = 0; channel < channels; channel += kChannels) {
    const int64_t last = std::min(channel + kChannels, channels);
    for (int64_t position = begin; position < end;) {
      const int64_t stop = std::min(position + kPositions, end);
      std::fill_n(a, last - channel, typename Terms::Parameter{0});
      std::fill_n(b, last - channel, typename Terms::Parameter{0});
      for (; position + Terms::kPositionsAtOnce <= stop; position += Terms::kPositionsAtOnce) {
        add_positions<Terms::kPositionsAtOnce>(terms, position * channels, channels, channel, last, a, b);
      }
      for (; position < stop; ++position) {
        add_positions<1>(terms, position * channels, channels, channel, last, a, b);
      }
      for (int64_t at = channel; at < last; ++at) {
        first[at] += a[at - channel];
        second[at] += b[at - channel];
      }
    }
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
    sum_positions(terms, slices.begin(task), slices.begin(task + 1), channels, a, b);
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
    add_matrix(terms, element, rows, kColumns, channel, a, b);
    add_rows<1>(terms, element + rows * kColumns, 0, inner - rows * kColumns, channel, a, b);
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
