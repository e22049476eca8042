// Rows of the left operand of a pass, as its table multiplies them.
#pragma once

#include <cstdint>

#include "gather.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

// Packed rows, in memory of their own or where they lie already.
struct Left {
  const void* data;
  int64_t row_bytes;
  // Where rows lie in segments, see Product.
  int64_t segment_steps = 0;
  int64_t segment_bytes = 0;
};

// Some outputs of all that there are.
struct Outputs {
  int64_t begin;
  int64_t end;
  int64_t all;
};

// As `kernels` take it: the values in a range of what is under the taps of each output, packed `to` rows of `row_bytes`: those have room for
// kSlackValues behind their own, which are overwritten.
Left gather_left(
    const Table& kernels,
    const Image& image,
    const Taps& rows,
    const Taps& columns,
    const Range& depth,
    const Outputs& outputs,
    int64_t row_bytes,
    char* to);

} // namespace torch_odt::kernels::int8
