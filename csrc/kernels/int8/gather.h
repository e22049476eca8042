// Rows of a left operand, gathered from an image.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "taps.h"

namespace torch_odt::kernels::int8 {

struct Image {
  const int8_t* data;
  const int8_t* end; // of all its samples
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

// Calls copy(row, rows, from, from_stride, count, at) and fill(row, count, at) for all values under the taps of the
// outputs from `begin` up to but without `end`, each of which is a row in the order [row][column][channel] of its taps:
// `row` is counted from `begin`, `at` are values from the beginning of a row, which is filled from there to its end.
// Outputs side by side in an image whose taps all lie inside of it are copied at once.
template <typename Copy, typename Fill>
class Gather {
 public:
  Gather(const Image& image, const Taps& rows, const Taps& columns, const Copy& copy, const Fill& fill)
      : image_(image), rows_(rows), columns_(columns), copy_(copy), fill_(fill) {}

  void operator()(int64_t begin, int64_t end) const {
    Pixel pixel(begin, rows_, columns_);
    for (int64_t row = 0; row < end - begin;) {
      const int64_t outputs = std::min(end - begin - row, columns_.outputs - pixel.column);
      gather_line(pixel, outputs, row);
      row += outputs;
      pixel.column += outputs - 1;
      pixel.advance(rows_, columns_);
    }
  }

 private:
  // Outputs of one row of the image.
  void gather_line(const Pixel& first, int64_t outputs, int64_t row) const {
    const auto [begin, end] = inside(first.column, outputs);
    const int64_t width = columns_.count * image_.depth;
    for (int64_t tap = 0; tap < rows_.count; ++tap) {
      const int64_t source_row = rows_.start + first.row * rows_.step + tap * rows_.spacing;
      const int64_t at = tap * width;
      if (source_row < 0 || source_row >= rows_.source) {
        for (int64_t i = 0; i < outputs; ++i) {
          fill_(row + i, width, at);
        }
        continue;
      }
      const int8_t* const line = image_.data +
          (first.sample * rows_.source + source_row) * columns_.source * image_.channels + image_.first_channel;
      for (int64_t i = 0; i < begin; ++i) {
        gather_taps(line, first.column + i, row + i, at);
      }
      if (begin < end) {
        copy_inside(line, first.column + begin, row + begin, end - begin, at);
      }
      for (int64_t i = end; i < outputs; ++i) {
        gather_taps(line, first.column + i, row + i, at);
      }
    }
  }

  // Which of the outputs from a column on have all taps inside the image.
  std::pair<int64_t, int64_t> inside(int64_t column, int64_t outputs) const {
    const auto is_inside = [&](int64_t i) {
      const int64_t left = columns_.start + (column + i) * columns_.step;
      return left >= 0 && left + (columns_.count - 1) * columns_.spacing < columns_.source;
    };
    int64_t begin = 0;
    while (begin < outputs && !is_inside(begin)) {
      ++begin;
    }
    int64_t end = outputs;
    while (end > begin && !is_inside(end - 1)) {
      --end;
    }
    return {begin, end};
  }

  void copy_inside(const int8_t* line, int64_t column, int64_t row, int64_t outputs, int64_t at) const {
    const int8_t* const from = line + (columns_.start + column * columns_.step) * image_.channels;
    const int64_t stride = columns_.step * image_.channels;
    if (columns_.spacing == 1 && image_.depth == image_.channels) {
      copy_(row, outputs, from, stride, columns_.count * image_.depth, at);
      return;
    }
    for (int64_t tap = 0; tap < columns_.count; ++tap) {
      const int8_t* const place = from + tap * columns_.spacing * image_.channels;
      copy_(row, outputs, place, stride, image_.depth, at + tap * image_.depth);
    }
  }

  void gather_taps(const int8_t* line, int64_t column, int64_t row, int64_t at) const {
    if (columns_.spacing == 1 && image_.depth == image_.channels) {
      gather_taps_at_once(line, column, row, at);
      return;
    }
    for (int64_t tap = 0; tap < columns_.count; ++tap) {
      const int64_t position = columns_.start + column * columns_.step + tap * columns_.spacing;
      const int64_t place = at + tap * image_.depth;
      if (position >= 0 && position < columns_.source) {
        copy_(row, 1, line + position * image_.channels, 0, image_.depth, place);
      } else {
        fill_(row, image_.depth, place);
      }
    }
  }

  // Those inside of the image lie side by side.
  void gather_taps_at_once(const int8_t* line, int64_t column, int64_t row, int64_t at) const {
    const int64_t left = columns_.start + column * columns_.step;
    const int64_t first = std::clamp<int64_t>(-left, 0, columns_.count);
    const int64_t last = std::clamp(columns_.source - left, first, columns_.count);
    const auto fill_some = [&](int64_t from, int64_t to) {
      if (from < to) {
        fill_(row, (to - from) * image_.depth, at + from * image_.depth);
      }
    };
    fill_some(0, first);
    if (first < last) {
      const int8_t* const from = line + (left + first) * image_.channels;
      copy_(row, 1, from, 0, (last - first) * image_.depth, at + first * image_.depth);
    }
    fill_some(last, columns_.count);
  }

  const Image& image_;
  const Taps& rows_;
  const Taps& columns_;
  const Copy& copy_;
  const Fill& fill_;
};

// A part of the values under the taps.
struct Range {
  int64_t first;
  int64_t count;
};

// The same for the values in a range, with `at` counted from its first one.
template <typename Copy, typename Fill>
void gather(
    const Image& image,
    const Taps& rows,
    const Taps& columns,
    const Range& range,
    const Copy& copy,
    const Fill& fill,
    int64_t begin,
    int64_t end) {
  const int64_t width = columns.count * image.depth;
  if (range.first == 0 && range.count == rows.count * width) {
    Gather(image, rows, columns, copy, fill)(begin, end);
    return;
  }
  const int64_t first_row = range.first / width;
  const int64_t last = range.first + range.count - first_row * width;
  Taps some_rows = rows;
  some_rows.start += first_row * rows.spacing;
  some_rows.count = (last + width - 1) / width;
  const int64_t skipped = range.first - first_row * width;
  const auto inside = [&](int64_t count, int64_t at) {
    const int64_t first = std::max(at, skipped);
    return Range{first, std::min(at + count, last) - first};
  };
  const auto copy_part = [&](int64_t row, int64_t of, const int8_t* from, int64_t stride, int64_t count, int64_t at) {
    if (const auto [first, some] = inside(count, at); some > 0) {
      copy(row, of, from + (first - at), stride, some, first - skipped);
    }
  };
  const auto fill_part = [&](int64_t row, int64_t count, int64_t at) {
    if (const auto [first, some] = inside(count, at); some > 0) {
      fill(row, some, first - skipped);
    }
  };
  Gather(image, some_rows, columns, copy_part, fill_part)(begin, end);
}

// Whether outputs are what lies in the source, one for one.
inline bool is_pointwise(const Taps& rows, const Taps& columns) {
  const auto alone = [](const Taps& axis) {
    return axis.count == 1 && axis.start == 0 && axis.step == 1 && axis.outputs == axis.source;
  };
  return alone(rows) && alone(columns);
}

} // namespace torch_odt::kernels::int8
