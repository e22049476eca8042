// NITI's rounding of whole blocks with AVX-512, for finish_avx512.cpp.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include "draws.h"
#include "finish.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_SHIFT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#define TORCH_ODT_SHIFT_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kWhole = kByteColumns; // columns whose bytes are one vector, and whose draws are one vector's

// Vectors of 16 bits as bytes in the order of columns.
TORCH_ODT_SHIFT_INLINE __m512i bytes_of(__m512i lower, __m512i upper) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(lower, upper));
}

// What NITI's rounding (lanes.h) shifts by, each lane: the upper half of the bits that are lost rounds up where it is
// above the lower half, which is where all ones less the lower half carry into what is kept.
struct Shifts {
  __m512i half;
  __m512i upper;
  __m512i ones; // as many as the upper half has bits
  __m512i lower; // ones where the lower half is, moved to the top of the upper one's

  TORCH_ODT_SHIFT_TARGET static Shifts of(int64_t shift) {
    const auto half = static_cast<int>(shift / 2);
    const auto upper = static_cast<int>(shift) - half;
    return {
        _mm512_set1_epi32(half),
        _mm512_set1_epi32(upper),
        _mm512_set1_epi32((1 << upper) - 1),
        _mm512_set1_epi32(((1 << half) - 1) << (upper - half))};
  }
};

// What all rows of a block share.
struct ShiftedRows {
  Shifts shifts;
  __m512i low;
  __m512i high;
};

// 64 columns, those of `inside`; without terms there are none of the columns or the row.
template <bool kAll, bool kTerms, bool kOdd>
TORCH_ODT_SHIFT_INLINE void whole_by_shift(
    const ShiftedRows& by,
    const int32_t* sums,
    const int32_t* terms,
    __m512i row_term,
    int8_t* output,
    uint64_t inside,
    __m512i& largest) {
  __m512i words[kWhole / kLanes];
#pragma GCC unroll 4
  for (int part = 0; part < kWhole / kLanes; ++part) {
    const auto lanes = static_cast<__mmask16>(inside >> part * kLanes);
    const int32_t* const at = sums + part * kLanes;
    __m512i sum = kAll ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32(lanes, at);
    if constexpr (kTerms) {
      sum = kAll ? _mm512_add_epi32(sum, row_term) : _mm512_maskz_add_epi32(lanes, sum, row_term);
      if (terms != nullptr) {
        sum = _mm512_add_epi32(sum, _mm512_maskz_loadu_epi32(lanes, terms + part * kLanes));
      }
    }
    const __m512i magnitude = _mm512_abs_epi32(sum);
    largest = _mm512_max_epu32(largest, magnitude);
    const __m512i random = kOdd ? _mm512_add_epi32(magnitude, magnitude) : magnitude;
    // (random & lower) ^ ones
    const __m512i carries = _mm512_ternarylogic_epi32(random, by.shifts.lower, by.shifts.ones, 0x6a);
    const __m512i raised = _mm512_add_epi32(_mm512_srlv_epi32(magnitude, by.shifts.half), carries);
    const __m512i whole = _mm512_srlv_epi32(raised, by.shifts.upper);
    words[part] = _mm512_mask_sub_epi32(whole, _mm512_movepi32_mask(sum), _mm512_setzero_si512(), whole);
  }
  const __m512i bytes = bytes_of(_mm512_packs_epi32(words[0], words[1]), _mm512_packs_epi32(words[2], words[3]));
  const __m512i between = _mm512_min_epi8(_mm512_max_epi8(bytes, by.low), by.high);
  if constexpr (kAll) {
    _mm512_storeu_si512(output, between);
  } else {
    _mm512_mask_storeu_epi8(output, inside, between);
  }
}

template <bool kTerms, bool kOdd>
TORCH_ODT_SHIFT_TARGET float rows_by_shift(const Finish& how, const Block<int32_t>& of) {
  // A copy, so that no store makes it be read again.
  const Block<int32_t> block = of;
  const ShiftedRows by = {
      Shifts::of(how.shift),
      _mm512_set1_epi8(static_cast<int8_t>(how.low)),
      _mm512_set1_epi8(static_cast<int8_t>(how.high))};
  const int64_t wholes_end = block.columns / kWhole * kWhole;
  const uint64_t tail = (uint64_t{1} << (block.columns - wholes_end)) - 1;
  auto* const output = static_cast<int8_t*>(how.output);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t row = 0; row < block.rows; ++row) {
    const int32_t* const sums = block.sums + row * block.stride;
    const int32_t* const terms = block.column_terms;
    int8_t* const to = output + block.places[row];
    const __m512i row_term = _mm512_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]);
    for (int64_t column = 0; column < wholes_end; column += kWhole) {
      const int32_t* const at = terms == nullptr ? nullptr : terms + column;
      whole_by_shift<true, kTerms, kOdd>(by, sums + column, at, row_term, to + column, ~uint64_t{0}, largest);
    }
    if (tail != 0) {
      const int32_t* const at = terms == nullptr ? nullptr : terms + wholes_end;
      whole_by_shift<false, kTerms, kOdd>(by, sums + wholes_end, at, row_term, to + wholes_end, tail, largest);
    }
  }
  // Magnitudes are 2^31 at most, which a signed conversion would take for a negative number.
  return static_cast<float>(_mm512_reduce_max_epu32(largest)) * __builtin_fabsf(*how.multipliers);
}

// NITI's rounding of 64 columns at a time, without a mask and a zero point. Multipliers are a power of two, so that the
// largest value is that of the largest sum.
float rows_by_shift(const Finish& how, const Block<int32_t>& block) {
  const bool has_terms = block.column_terms != nullptr || block.row_terms != nullptr;
  if (how.shift % 2 == 0) {
    return has_terms ? rows_by_shift<true, false>(how, block) : rows_by_shift<false, false>(how, block);
  }
  return has_terms ? rows_by_shift<true, true>(how, block) : rows_by_shift<false, true>(how, block);
}

} // namespace

} // namespace torch_odt::kernels::int8

#endif
