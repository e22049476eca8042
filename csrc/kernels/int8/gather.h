// Rows of a left operand, gathered from an image.
#pragma once

#include <algorithm>
#include <cstdint>

#include "taps.h"

namespace torch_odt::kernels::int8 {

struct Image {
  const int8_t* data;
  int64_t channels;
  int64_t first_channel;
  int64_t depth; // channels that take part
  int8_t padding; // what lies around it
};

// Where a row of a product comes from, or goes to.
struct Pixel {
  int64_t sample;
  int64_t row;
  int64_t column;

  Pixel(int64_t index, const Taps& rows, const Taps& columns)
      : sample(index / (rows.outputs * columns.outputs)),
        row(index / columns.outputs % rows.outputs),
        column(index % columns.outputs) {}

  void advance(const Taps& rows, const Taps& columns) {
    if (++column == columns.outputs) {
      column = 0;
      if (++row == rows.outputs) {
        row = 0;
        ++sample;
      }
    }
  }
};

// Calls copy(from, count, at) and fill(count, at) for all values under the taps of one output, in the order
// [row][column][channel]; `at` counts values.
template <typename Copy, typename Fill>
void gather(const Image& image, const Taps& rows, const Taps& columns, const Pixel& of, const Copy& copy, const Fill& fill) {
  const int64_t left = columns.start + of.column * columns.step;
  const auto inside = [&](int64_t tap) {
    const int64_t position = left + tap * columns.spacing;
    return position >= 0 && position < columns.source;
  };
  int64_t first = 0;
  while (first < columns.count && !inside(first)) {
    ++first;
  }
  int64_t last = first;
  while (last < columns.count && inside(last)) {
    ++last;
  }
  const bool side_by_side = columns.spacing == 1 && image.depth == image.channels;
  for (int64_t tap = 0; tap < rows.count; ++tap) {
    const int64_t row = rows.start + of.row * rows.step + tap * rows.spacing;
    const int64_t at = tap * columns.count * image.depth;
    if (row < 0 || row >= rows.source || first == last) {
      fill(columns.count * image.depth, at);
      continue;
    }
    const int8_t* const line = image.data +
        ((of.sample * rows.source + row) * columns.source + left) * image.channels + image.first_channel;
    if (first > 0) {
      fill(first * image.depth, at);
    }
    if (side_by_side) {
      copy(line + first * image.channels, (last - first) * image.depth, at + first * image.depth);
    } else {
      for (int64_t column = first; column < last; ++column) {
        copy(line + column * columns.spacing * image.channels, image.depth, at + column * image.depth);
      }
    }
    if (last < columns.count) {
      fill((columns.count - last) * image.depth, at + last * image.depth);
    }
  }
}

// Whether outputs are what lies in the source, one for one.
inline bool is_pointwise(const Taps& rows, const Taps& columns) {
  const auto alone = [](const Taps& axis) {
    return axis.count == 1 && axis.start == 0 && axis.step == 1 && axis.outputs == axis.source;
  };
  return alone(rows) && alone(columns);
}

} // namespace torch_odt::kernels::int8
