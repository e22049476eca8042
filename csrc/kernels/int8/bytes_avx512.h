// Bytes in the order of columns, for the files that are written with AVX-512. Inlined, so that each file has its own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include "intrinsics_x86.h"

namespace torch_odt::kernels::int8 {

// Of 64 columns, vectors of 16 bits that hold four columns of each quarter in turn, as packs leave them.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline __m512i bytes_of(
    __m512i lower, __m512i upper) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(lower, upper));
}

} // namespace torch_odt::kernels::int8

#endif
