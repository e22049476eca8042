#include "rows_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "draws.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;

TORCH_ODT_TARGET_INLINE __m512i hashes(__m512i steps, uint32_t first) {
  __m512i bits = _mm512_add_epi32(steps, _mm512_set1_epi32(static_cast<int32_t>(first)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kFirstFactor)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 15));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kSecondFactor)));
  return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
}

// The bits of 16 elements; bits behind the last byte are 0.
TORCH_ODT_TARGET_INLINE uint32_t bits_at(const uint8_t* mask, int64_t bytes, int64_t index) {
  const int64_t byte = index / 8;
  uint32_t found = 0;
  if (byte + 4 <= bytes) [[likely]] {
    __builtin_memcpy(&found, mask + byte, 4);
  } else {
    for (int64_t i = 0; byte + i < bytes; ++i) {
      found |= static_cast<uint32_t>(mask[byte + i]) << (8 * i);
    }
  }
  return found >> (index % 8);
}

// Returns how many were clamped; counts only where kCounts. What int32 does not hold becomes its lowest number, which
// needs care above zero.
template <bool kCounts>
TORCH_ODT_TARGET_INLINE int store(__m512 values, __m512 drawn, int8_t* to, __mmask16 inside) {
  // The draw is a product that is exact: with a fused multiply-add the sum has the same bits.
  __m512 raised = _mm512_fmadd_ps(drawn, _mm512_set1_ps(kDrawUnit), values);
  raised = _mm512_min_ps(raised, _mm512_set1_ps(4194304.0F));
  const __m512i whole = _mm512_cvt_roundps_epi32(raised, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512i kept = _mm512_max_epi32(whole, _mm512_set1_epi32(-127));
  _mm_mask_storeu_epi8(to, inside, _mm512_cvtsepi32_epi8(kept));
  if constexpr (!kCounts) {
    return 0;
  }
  const __m512i between = _mm512_min_epi32(kept, _mm512_set1_epi32(127));
  return __builtin_popcount(_mm512_mask_cmpneq_epi32_mask(inside, whole, between));
}

template <bool kMasked, bool kScaled, bool kTwo>
TORCH_ODT_TARGET_INLINE void round_part(RowsPart& part) {
  const Rows rows = part.rows;
  const RoundedRows first = part.first;
  const RoundedRows second = part.second;
  const int64_t mask_bytes = (rows.count * rows.columns + 7) / 8;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i steps = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(kGolden)));
  const __m512i low_half = _mm512_set1_epi32(0xffff);
  Keys keys(part.seed);
  int64_t clamped = 0;
  for (int64_t row = part.begin; row < part.end; ++row) {
    const int64_t begins = row * rows.columns;
    const uint32_t key = keys.at(begins);
    const auto some = [&](int64_t column, __m512i draws)
        __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), always_inline)) {
      const int64_t index = begins + column;
      const int64_t left = rows.columns - column;
      const auto inside = static_cast<__mmask16>(left >= kLanes ? 0xffff : (1U << left) - 1);
      auto read = inside;
      if constexpr (kMasked) {
        read = static_cast<__mmask16>(inside & bits_at(rows.mask, mask_bytes, index));
      }
      const __m512 values = _mm512_maskz_loadu_ps(read, rows.values + index);
      const __m512 drawn = _mm512_cvtepi32_ps(draws);
      if constexpr (!kScaled) {
        clamped += store<true>(values, drawn, first.output + index, inside);
      } else {
        store<false>(_mm512_mul_ps(values, _mm512_loadu_ps(first.factors + column)), drawn, first.output + index, inside);
      }
      if constexpr (kTwo) {
        store<false>(_mm512_mul_ps(values, _mm512_loadu_ps(second.factors + column)), drawn, second.output + index, inside);
      }
    };
    for (int64_t column = 0; column < rows.columns; column += 2 * kLanes) {
      const auto place = static_cast<uint32_t>(begins + hash_of(column));
      const __m512i bits = hashes(steps, place * kGolden + key);
      some(column, _mm512_and_si512(bits, low_half));
      if (column + kLanes < rows.columns) {
        some(column + kLanes, _mm512_srli_epi32(bits, 16));
      }
    }
  }
  part.clamped += clamped;
}

template <bool kMasked>
TORCH_ODT_TARGET void round_some(RowsPart& part) {
  if (part.first.factors == nullptr) {
    round_part<kMasked, false, false>(part);
  } else if (part.second.output == nullptr) {
    round_part<kMasked, true, false>(part);
  } else {
    round_part<kMasked, true, true>(part);
  }
}

} // namespace

void round_rows_avx512(RowsPart& part) {
  if (part.rows.mask == nullptr) {
    round_some<false>(part);
  } else {
    round_some<true>(part);
  }
}

} // namespace torch_odt::kernels::int8

#endif
