// Rows of the left operand that overlap: where an image is copied with its padding, what is under the taps of an output
// lies there already, a row of taps at a time, and nothing is gathered.
#pragma once

#include <cstdint>

#include "left.h"

namespace torch_odt::kernels::int8 {

// A sample with its padding, as pixels side by side: an output's are those under its taps, from its position on. At the
// end of each line are positions without an output.
class Padded {
 public:
  Padded(const Taps& rows, const Taps& columns) : rows_(rows), columns_(columns) {}

  // Of a line.
  int64_t width() const {
    return columns_.outputs + columns_.count - 1;
  }
  // Of a sample, up to its last output.
  int64_t positions() const {
    return (rows_.outputs - 1) * width() + columns_.outputs;
  }
  // Between a position and the last of the pixels under its taps.
  int64_t reach() const {
    return (rows_.count - 1) * rows_.spacing * width() + columns_.count - 1;
  }
  // What a copy for so many positions takes, whatever the product reads behind the last one included.
  int64_t copy_bytes(int64_t positions, int64_t channels) const {
    return (positions + kSlackRows + reach()) * channels + kSlackValues;
  }

 private:
  const Taps& rows_;
  const Taps& columns_;
};

// Whether a product's rows may be such, where all channels of the image take part: it moves on by one, and they fill
// steps; and whether that is less work, with few positions that have no output.
bool goes_padded(const Table& kernels, const Taps& rows, const Taps& columns, int64_t channels);

// The positions of a sample from `begin` up to but without `end`, copied `to` rows that overlap.
Left copy_padded(
    const Table& kernels,
    const Image& image,
    const Taps& rows,
    const Taps& columns,
    int64_t sample,
    int64_t begin,
    int64_t end,
    char* to);

} // namespace torch_odt::kernels::int8
