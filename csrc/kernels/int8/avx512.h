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

// As interleave_block for four blocks of 16 columns at once.
TORCH_ODT_AVX512_INLINE void interleave_64_columns(
    const int8_t* const* rows, int64_t column, __m512i flip, char* to, int64_t block_bytes) {
  const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(rows[0] + column), flip);
  const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(rows[1] + column), flip);
  const __m512i c = _mm512_xor_si512(_mm512_loadu_si512(rows[2] + column), flip);
  const __m512i d = _mm512_xor_si512(_mm512_loadu_si512(rows[3] + column), flip);
  const __m512i low_ab = _mm512_unpacklo_epi8(a, b);
  const __m512i low_cd = _mm512_unpacklo_epi8(c, d);
  const __m512i high_ab = _mm512_unpackhi_epi8(a, b);
  const __m512i high_cd = _mm512_unpackhi_epi8(c, d);
  // Each holds four columns of every block.
  const __m512i parts[4] = {
      _mm512_unpacklo_epi16(low_ab, low_cd),
      _mm512_unpackhi_epi16(low_ab, low_cd),
      _mm512_unpacklo_epi16(high_ab, high_cd),
      _mm512_unpackhi_epi16(high_ab, high_cd)};
  for (int part = 0; part < 4; ++part) {
    char* const place = to + 16 * part;
    _mm_storeu_si128((__m128i*)place, _mm512_castsi512_si128(parts[part]));
    _mm_storeu_si128((__m128i*)(place + block_bytes), _mm512_extracti32x4_epi32(parts[part], 1));
    _mm_storeu_si128((__m128i*)(place + 2 * block_bytes), _mm512_extracti32x4_epi32(parts[part], 2));
    _mm_storeu_si128((__m128i*)(place + 3 * block_bytes), _mm512_extracti32x4_epi32(parts[part], 3));
  }
}

TORCH_ODT_AVX512_INLINE void interleave_bytes_avx512(const Interleaving& of, int8_t flip) {
  const int64_t whole = of.columns / 64 * 64;
  const __m512i flips = _mm512_set1_epi8(flip);
  for (int64_t step = 0; step < of.steps; ++step) {
    char* to = static_cast<char*>(of.to) + step * of.step_bytes;
    for (int64_t column = 0; column < whole; column += 64, to += 4 * of.block_bytes) {
      interleave_64_columns(of.rows + 4 * step, column, flips, to, of.block_bytes);
    }
    for (int64_t column = whole; column < of.columns; column += kPanelColumns, to += of.block_bytes) {
      const int64_t rest = of.columns - column;
      const auto some = static_cast<__mmask16>(rest >= kPanelColumns ? 0xffff : (1 << rest) - 1);
      const int8_t* const* const rows = of.rows + 4 * step;
      interleave_block(
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[0] + column),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[1] + column),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[2] + column),
          (Bytes16)_mm_maskz_loadu_epi8(some, rows[3] + column),
          flip,
          to);
    }
  }
}

} // namespace torch_odt::kernels::int8

#endif
