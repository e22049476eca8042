// Lanes of AVX2's vectors, for the files that are written with it. Inlined, so that each file has its own.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstdint>

#include "intrinsics_x86.h"

#define TORCH_ODT_LANES_INLINE [[gnu::target("avx2"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

// Lanes that are columns, where `count` of them are left.
TORCH_ODT_LANES_INLINE __m256i inside(int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count)), lanes);
}

// Of values that are not negative.
TORCH_ODT_LANES_INLINE float largest_of(__m256 values) {
  float lanes[8];
  _mm256_storeu_ps(lanes, values);
  float largest = 0;
  for (const float lane : lanes) {
    largest = lane > largest ? lane : largest;
  }
  return largest;
}

} // namespace torch_odt::kernels::int8

#endif
