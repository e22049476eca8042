// NITI's rounding, 16 at a time, for the files that are written with AVX-512. Inlined, so that each file has its own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstdint>

#include "intrinsics_x86.h"

#define TORCH_ODT_SHIFT_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

// NITI's rounding (lanes.h) of the bits that a shift loses: up where their upper half, as a number, is above the lower
// one, which is where all ones less the lower one carry out of the upper one. Counts of bits are vectors, since shifts
// by those are one instruction, and shifts by a register two.
struct Shift {
  __m512i lower_bits;
  __m512i upper_bits;
  __m512i odd; // how many bits the upper half has more
  __m512i ones; // as many as `upper_bits`
  __m512i lower; // the lower half's place, moved by `odd`

  TORCH_ODT_SHIFT_INLINE Shift by(int64_t shift) {
    const auto lower_bits = static_cast<int>(shift / 2);
    const auto upper_bits = static_cast<int>(shift) - lower_bits;
    const int odd = upper_bits - lower_bits;
    return {
        _mm512_set1_epi32(lower_bits),
        _mm512_set1_epi32(upper_bits),
        _mm512_set1_epi32(odd),
        _mm512_set1_epi32((1 << upper_bits) - 1),
        _mm512_set1_epi32(((1 << lower_bits) - 1) << odd)};
  }

  TORCH_ODT_SHIFT_INLINE __m512i rounded(const Shift& shift, __m512i sum, __m512i magnitude) {
    const __m512i random = _mm512_sllv_epi32(magnitude, shift.odd);
    // (random & lower) ^ ones, which is ones - (random & lower): there are no bits elsewhere.
    const __m512i carries = _mm512_ternarylogic_epi32(random, shift.lower, shift.ones, 0x6a);
    const __m512i raised = _mm512_add_epi32(_mm512_srlv_epi32(magnitude, shift.lower_bits), carries);
    const __m512i whole = _mm512_srlv_epi32(raised, shift.upper_bits);
    return _mm512_mask_sub_epi32(whole, _mm512_movepi32_mask(sum), _mm512_setzero_si512(), whole);
  }
};

} // namespace torch_odt::kernels::int8

#endif
