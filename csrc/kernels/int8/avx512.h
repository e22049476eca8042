// Packing with AVX-512, for the tables that have it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include "intrinsics_x86.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

#define TORCH_ODT_AVX512_INLINE \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), gnu::always_inline]] static inline

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
template <bool kAll, bool kDeals>
TORCH_ODT_AVX512_INLINE void interleave_64_columns(
    const int8_t* const* rows, int64_t column, int64_t columns, __m512i flip, __m512i (&packed)[4]) {
  // Unpacking works on lanes of 16 bytes: where columns are dealt to them beforehand, they end up in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto some = static_cast<__mmask64>(kAll ? ~uint64_t{0} : (uint64_t{1} << columns) - 1);
  __m512i dealt[4];
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    const int8_t* const from = rows[row] + column;
    const __m512i values = kAll ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(some, from);
    dealt[row] = _mm512_xor_si512(kDeals ? _mm512_permutexvar_epi32(order, values) : values, flip);
  }
  const __m512i low_ab = _mm512_unpacklo_epi8(dealt[0], dealt[1]);
  const __m512i low_cd = _mm512_unpacklo_epi8(dealt[2], dealt[3]);
  const __m512i high_ab = _mm512_unpackhi_epi8(dealt[0], dealt[1]);
  const __m512i high_cd = _mm512_unpackhi_epi8(dealt[2], dealt[3]);
  packed[0] = _mm512_unpacklo_epi16(low_ab, low_cd);
  packed[1] = _mm512_unpackhi_epi16(low_ab, low_cd);
  packed[2] = _mm512_unpacklo_epi16(high_ab, high_cd);
  packed[3] = _mm512_unpackhi_epi16(high_ab, high_cd);
}

// Some steps of 64 columns or fewer.
template <bool kAll, bool kDeals, bool kFlips, bool kSums>
TORCH_ODT_AVX512_INLINE void interleave_columns(
    const Interleaving& of, int64_t first_step, int64_t last_step, int64_t column, int64_t columns) {
  const __m512i flip = _mm512_set1_epi8(kFlips ? -128 : 0);
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[4] = {};
  char* to = static_cast<char*>(of.to) + column / kPanelColumns * of.block_bytes + first_step * of.step_bytes;
  for (int64_t step = first_step; step < last_step; ++step, to += of.step_bytes) {
    __m512i packed[4];
    interleave_64_columns<kAll, kDeals>(of.rows + 4 * step, column, columns, flip, packed);
#pragma GCC unroll 4
    for (int block = 0; block < 4; ++block) {
      if (kAll || columns > block * kPanelColumns) {
        _mm512_storeu_si512(to + block * of.block_bytes, packed[block]);
      }
      if constexpr (kSums) {
        sums[block] = kFlips ? _mm512_dpbusd_epi32(sums[block], packed[block], ones)
                             : _mm512_dpbusd_epi32(sums[block], ones, packed[block]);
      }
    }
  }
  if constexpr (kSums) {
    const auto flipped = static_cast<int32_t>(kFlips ? 128 * 4 * (last_step - first_step) : 0);
    for (int64_t block = 0; block * kPanelColumns < columns; ++block) {
      int32_t* const at = of.sums + column + block * kPanelColumns;
      const __m512i own = _mm512_sub_epi32(sums[block], _mm512_set1_epi32(flipped));
      _mm512_storeu_si512(at, _mm512_add_epi32(_mm512_loadu_si512(at), own));
    }
  }
}

// So many steps at a time that what their rows hold of 64 columns is read once, and each block is written in a run.
template <bool kDeals, bool kFlips, bool kSums>
TORCH_ODT_AVX512_INLINE void interleave_all(const Interleaving& of) {
  constexpr int64_t kStepsAtOnce = 4;
  for (int64_t step = 0; step < of.steps; step += kStepsAtOnce) {
    const int64_t last = step + kStepsAtOnce < of.steps ? step + kStepsAtOnce : of.steps;
    int64_t column = 0;
    for (; column + 64 <= of.columns; column += 64) {
      interleave_columns<true, kDeals, kFlips, kSums>(of, step, last, column, 64);
    }
    if (column < of.columns) {
      interleave_columns<false, true, kFlips, kSums>(of, step, last, column, of.columns - column);
    }
  }
}

template <bool kFlips>
TORCH_ODT_AVX512_INLINE void interleave_bytes_avx512(const Interleaving& of) {
  if (of.by_lanes) {
    of.sums != nullptr ? interleave_all<false, kFlips, true>(of) : interleave_all<false, kFlips, false>(of);
  } else {
    of.sums != nullptr ? interleave_all<true, kFlips, true>(of) : interleave_all<true, kFlips, false>(of);
  }
}

} // namespace torch_odt::kernels::int8

#endif
