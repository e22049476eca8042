// The hashes of draws.h, 16 at a time, for the files that are written with AVX-512. Inlined, so that each file has its own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include "draws.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_DRAWS_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

// The numbers of 16 hashes side by side, each times kGolden.
TORCH_ODT_DRAWS_INLINE __m512i golden_steps() {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(kGolden)));
}

// Of numbers from `first` on, which is times kGolden and has the key added.
TORCH_ODT_DRAWS_INLINE __m512i hashes(__m512i steps, uint32_t first) {
  __m512i bits = _mm512_add_epi32(steps, _mm512_set1_epi32(static_cast<int32_t>(first)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kFirstFactor)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 15));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kSecondFactor)));
  return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
}

} // namespace torch_odt::kernels::int8

#endif
