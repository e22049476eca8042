// Where the pixels of an image's rows lie, column by column, as depthwise convolutions read them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "memory.h"

namespace torch_odt::kernels::int8 {

// An image's part: some columns, the first of which may lie before it, and some channels.
struct Strip {
  const int8_t* image;
  int64_t rows;
  int64_t columns;
  int64_t pixel_stride;
  int64_t first_column;
  int64_t width;
  int64_t channels; // from where `image` points on
};

class PixelColumns {
 public:
  // Of so many rows, from one of which it is `spacing` to the next.
  PixelColumns(int64_t rows, int64_t spacing, int64_t most_width, Pieces& pieces)
      : rows_(rows), spacing_(spacing), pixels_(pieces.take<const int8_t*>(rows * most_width)) {}

  // [column][row]: the first channels of pixels of rows from `start` on; around the image, what `padding` points to.
  const int8_t* const* find(const Strip& strip, int64_t start, const int8_t* padding) const {
    const int64_t first_inside = std::clamp<int64_t>(-strip.first_column, 0, strip.width);
    const int64_t last_inside = std::clamp<int64_t>(strip.columns - strip.first_column, first_inside, strip.width);
    std::fill_n(pixels_, first_inside * rows_, padding);
    std::fill(pixels_ + last_inside * rows_, pixels_ + strip.width * rows_, padding);
    const auto first_of = [&](int64_t i) {
      const int64_t row = start + i * spacing_;
      const bool shown = row >= 0 && row < strip.rows;
      const int64_t place = (row * strip.columns + strip.first_column + first_inside) * strip.pixel_stride;
      return shown ? Run{strip.image + place, strip.pixel_stride} : Run{padding, 0};
    };
    const int8_t** const to = pixels_ + first_inside * rows_;
    const int64_t count = last_inside - first_inside;
    for (int64_t i = 0; i + 2 <= rows_; i += 2) {
      find_two(first_of(i), first_of(i + 1), count, to + i);
    }
    if (rows_ % 2 != 0) {
      find_last(first_of(rows_ - 1), count, to + rows_ - 1);
    }
    return pixels_;
  }

 private:
  // Pixels that lie as far apart as each other.
  struct Run {
    const int8_t* pixel;
    int64_t stride;
  };

  void find_two(Run first, Run second, int64_t count, const int8_t** to) const {
    for (int64_t i = 0; i < count; ++i, to += rows_) {
      to[0] = first.pixel;
      to[1] = second.pixel;
      first.pixel += first.stride;
      second.pixel += second.stride;
    }
  }

  void find_last(Run run, int64_t count, const int8_t** to) const {
    for (int64_t i = 0; i < count; ++i, to += rows_, run.pixel += run.stride) {
      *to = run.pixel;
    }
  }

  const int64_t rows_;
  const int64_t spacing_;
  const int8_t** const pixels_;
};

} // namespace torch_odt::kernels::int8
