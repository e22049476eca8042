// Packing in steps of four bytes, with the vectors of 16 bytes that every processor has.
#pragma once

#include <cstdint>

#include "shuffle.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

// A file that is compiled for one instruction set must not hold functions that others share (see isa.h), and what such
// a file includes is its own: everything here is inlined.
typedef int8_t Bytes16 __attribute__((vector_size(16)));
typedef int16_t Words8 __attribute__((vector_size(16)));

TORCH_ODT_INLINE Bytes16 zip_low(Bytes16 a, Bytes16 b) {
  return TORCH_ODT_SHUFFLE(Bytes16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

TORCH_ODT_INLINE Bytes16 zip_high(Bytes16 a, Bytes16 b) {
  return TORCH_ODT_SHUFFLE(Bytes16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

TORCH_ODT_INLINE Bytes16 zip_words_low(Bytes16 a, Bytes16 b) {
  return (Bytes16)TORCH_ODT_SHUFFLE(Words8, (Words8)a, (Words8)b, 0, 8, 1, 9, 2, 10, 3, 11);
}

TORCH_ODT_INLINE Bytes16 zip_words_high(Bytes16 a, Bytes16 b) {
  return (Bytes16)TORCH_ODT_SHUFFLE(Words8, (Words8)a, (Words8)b, 4, 12, 5, 13, 6, 14, 7, 15);
}

TORCH_ODT_INLINE Bytes16 load16(const int8_t* from) {
  Bytes16 result;
  __builtin_memcpy(&result, from, sizeof(result));
  return result;
}

TORCH_ODT_INLINE Bytes16 load_some(const int8_t* from, int64_t count) {
  Bytes16 result = {};
  __builtin_memcpy(&result, from, static_cast<unsigned long>(count));
  return result;
}

// 16 columns of four rows as four vectors of four columns.
struct Steps16 {
  Bytes16 fours[4];
};

TORCH_ODT_INLINE Steps16 interleaved(Bytes16 a, Bytes16 b, Bytes16 c, Bytes16 d) {
  const Bytes16 low_ab = zip_low(a, b);
  const Bytes16 low_cd = zip_low(c, d);
  const Bytes16 high_ab = zip_high(a, b);
  const Bytes16 high_cd = zip_high(c, d);
  return {
      {zip_words_low(low_ab, low_cd),
       zip_words_high(low_ab, low_cd),
       zip_words_low(high_ab, high_cd),
       zip_words_high(high_ab, high_cd)}};
}

// The same as 64 bytes, each with the bits of `flip` turned.
TORCH_ODT_INLINE void interleave_block(Bytes16 a, Bytes16 b, Bytes16 c, Bytes16 d, int8_t flip, void* to) {
  const Bytes16 flips = Bytes16{} + flip;
  const Steps16 result = interleaved(a ^ flips, b ^ flips, c ^ flips, d ^ flips);
  __builtin_memcpy(to, &result, sizeof(result));
}

TORCH_ODT_INLINE void copy_rows(const LeftRows& of) {
  for (int64_t row = 0; row < of.rows; ++row) {
    __builtin_memcpy(
        static_cast<char*>(of.to) + row * of.to_stride,
        of.from + row * of.from_stride,
        static_cast<unsigned long>(of.count));
  }
}

TORCH_ODT_INLINE void interleave_bytes(const Interleaving& of, int8_t flip) {
  const int64_t whole = of.columns / kPanelColumns * kPanelColumns;
  for (int64_t step = 0; step < of.steps; ++step) {
    const int8_t* const* const rows = of.rows + 4 * step;
    char* to = static_cast<char*>(of.to) + step * of.step_bytes;
    for (int64_t column = 0; column < whole; column += kPanelColumns, to += of.block_bytes) {
      interleave_block(
          load16(rows[0] + column), load16(rows[1] + column), load16(rows[2] + column), load16(rows[3] + column), flip, to);
    }
    if (whole < of.columns) {
      const int64_t rest = of.columns - whole;
      interleave_block(
          load_some(rows[0] + whole, rest),
          load_some(rows[1] + whole, rest),
          load_some(rows[2] + whole, rest),
          load_some(rows[3] + whole, rest),
          flip,
          to);
    }
  }
}

} // namespace torch_odt::kernels::int8
