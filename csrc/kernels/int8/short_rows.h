// Copies of rows too short for a call each, in whole vectors of the 16 bytes that every processor has. Inlined as
// everything of interleave.h is.
#pragma once

#include <cstdint>

#include "interleave.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

template <int kVectors>
TORCH_ODT_INLINE void copy_vectors(const LeftRows& of, int64_t rows, int8_t flip) {
  const Bytes16 flips = Bytes16{} + flip;
  const int8_t* from = of.from;
  char* to = static_cast<char*>(of.to);
  for (int64_t row = 0; row < rows; ++row, from += of.from_stride, to += of.to_stride) {
    for (int i = 0; i < kVectors; ++i) {
      const Bytes16 values = load16(from + 16 * i) ^ flips;
      __builtin_memcpy(to + 16 * i, &values, sizeof(values));
    }
  }
}

// How many rows are short, one vector or two, and have memory for those from their beginning on.
TORCH_ODT_INLINE int64_t short_rows(const LeftRows& of) {
  const int64_t bytes = of.count <= 16 ? 16 : 32;
  int64_t rows = of.count <= bytes ? of.rows : 0;
  while (rows > 0 && of.end - of.from - (rows - 1) * of.from_stride < bytes) {
    --rows;
  }
  return rows;
}

// Copies those with the bits of `flip` turned, and returns how many they are.
TORCH_ODT_INLINE int64_t copy_short_rows(const LeftRows& of, int8_t flip) {
  const int64_t rows = short_rows(of);
  if (of.count <= 16) {
    copy_vectors<1>(of, rows, flip);
  } else {
    copy_vectors<2>(of, rows, flip);
  }
  return rows;
}

// What is left of them.
TORCH_ODT_INLINE LeftRows rows_from(const LeftRows& of, int64_t row) {
  LeftRows rest = of;
  rest.from += row * of.from_stride;
  rest.to = static_cast<char*>(of.to) + row * of.to_stride;
  rest.rows -= row;
  return rest;
}

} // namespace torch_odt::kernels::int8
