// Packing with AVX-512, for the tables that have it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include "interleave.h"
#include "intrinsics_x86.h"

namespace torch_odt::kernels::int8 {

#define TORCH_ODT_AVX512_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

TORCH_ODT_AVX512_INLINE void copy_rows_avx512(const LeftRows& of, int8_t flip) {
  const __m512i flips = _mm512_set1_epi8(flip);
  const int64_t whole = of.count / 64 * 64;
  const __mmask64 rest = (uint64_t{1} << (of.count - whole)) - 1;
  const int8_t* from = of.from;
  char* to = static_cast<char*>(of.to);
  for (int64_t row = 0; row < of.rows; ++row, from += of.from_stride, to += of.to_stride) {
    for (int64_t i = 0; i < whole; i += 64) {
      _mm512_storeu_si512(to + i, _mm512_xor_si512(_mm512_loadu_si512(from + i), flips));
    }
    if (rest != 0) {
      const __m512i some = _mm512_maskz_loadu_epi8(rest, from + whole);
      _mm512_mask_storeu_epi8(to + whole, rest, _mm512_xor_si512(some, flips));
    }
  }
}

// As interleave_block for some of four blocks of 16 columns at once.
template <bool kAll>
TORCH_ODT_AVX512_INLINE void interleave_64_columns(
    const int8_t* const* rows, int64_t column, int64_t columns, __m512i flip, char* to, int64_t block_bytes) {
  // Unpacking works on lanes of 16 bytes: columns are dealt to them beforehand, so that they end up in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto some = static_cast<__mmask64>(kAll ? ~uint64_t{0} : (uint64_t{1} << columns) - 1);
  __m512i dealt[4];
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    const int8_t* const from = rows[row] + column;
    const __m512i values = kAll ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(some, from);
    dealt[row] = _mm512_xor_si512(_mm512_permutexvar_epi32(order, values), flip);
  }
  const __m512i low_ab = _mm512_unpacklo_epi8(dealt[0], dealt[1]);
  const __m512i low_cd = _mm512_unpacklo_epi8(dealt[2], dealt[3]);
  const __m512i high_ab = _mm512_unpackhi_epi8(dealt[0], dealt[1]);
  const __m512i high_cd = _mm512_unpackhi_epi8(dealt[2], dealt[3]);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low_ab, low_cd));
  if (kAll || columns > kPanelColumns) {
    _mm512_storeu_si512(to + block_bytes, _mm512_unpackhi_epi16(low_ab, low_cd));
  }
  if (kAll || columns > 2 * kPanelColumns) {
    _mm512_storeu_si512(to + 2 * block_bytes, _mm512_unpacklo_epi16(high_ab, high_cd));
  }
  if (kAll || columns > 3 * kPanelColumns) {
    _mm512_storeu_si512(to + 3 * block_bytes, _mm512_unpackhi_epi16(high_ab, high_cd));
  }
}

TORCH_ODT_AVX512_INLINE void interleave_bytes_avx512(const Interleaving& of, int8_t flip) {
  const int64_t whole = of.columns / 64 * 64;
  const __m512i flips = _mm512_set1_epi8(flip);
  for (int64_t step = 0; step < of.steps; ++step) {
    const int8_t* const* const rows = of.rows + 4 * step;
    char* to = static_cast<char*>(of.to) + step * of.step_bytes;
    for (int64_t column = 0; column < whole; column += 64, to += 4 * of.block_bytes) {
      interleave_64_columns<true>(rows, column, 64, flips, to, of.block_bytes);
    }
    if (const int64_t rest = of.columns - whole; rest > kPanelColumns) {
      interleave_64_columns<false>(rows, whole, rest, flips, to, of.block_bytes);
    } else if (rest > 0) {
      const auto some = static_cast<__mmask16>((1 << rest) - 1);
      interleave_block(
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[0] + whole),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[1] + whole),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[2] + whole),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[3] + whole),
          flip,
          to);
    }
  }
}

} // namespace torch_odt::kernels::int8

#endif
