#include "descent_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "draws_avx512.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;

// Keeps a product from becoming part of a fused multiply-add.
TORCH_ODT_TARGET_INLINE __m512 product(__m512 a, __m512 b) {
  __m512 result = _mm512_mul_ps(a, b);
  asm("" : "+v"(result));
  return result;
}

template <bool kAll>
TORCH_ODT_TARGET_INLINE void
lanes(
    const DescentPart& how, float rate, int8_t* to, const float* from, int64_t left, __m512i draws, int64_t& clamped) {
  const auto inside = static_cast<__mmask16>(kAll ? 0xffff : (1U << left) - 1);
  const __m128i bytes = kAll ? _mm_loadu_si128((const __m128i*)to) : _mm_maskz_loadu_epi8(inside, to);
  const __m512 gradients = kAll ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(inside, from);
  const __m512 before = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  const __m512 taken =
      _mm512_add_ps(product(gradients, _mm512_set1_ps(rate)), product(before, _mm512_set1_ps(how.shrink)));
  const __m512 after = _mm512_sub_ps(before, taken);
  // The draw is a product that is exact: with a fused multiply-add the sum has the same bits.
  __m512 raised = _mm512_fmadd_ps(_mm512_cvtepi32_ps(draws), _mm512_set1_ps(kHalfUnit), after);
  // What int32 does not hold becomes its lowest number, which needs care above zero.
  raised = _mm512_min_ps(raised, _mm512_set1_ps(4194304.0F));
  const __m512i whole = _mm512_cvt_roundps_epi32(raised, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512i between = _mm512_min_epi32(_mm512_max_epi32(whole, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
  clamped += __builtin_popcount(_mm512_mask_cmpneq_epi32_mask(inside, whole, between));
  const __m128i result = _mm512_cvtepi32_epi8(between);
  if constexpr (kAll) {
    _mm_storeu_si128((__m128i*)to, result);
  } else {
    _mm_mask_storeu_epi8(to, inside, result);
  }
}

} // namespace

TORCH_ODT_TARGET void descend_avx512(DescentPart& part) {
  const DescentPart how = part;
  const __m512i steps = golden_steps();
  const __m512i low_half = _mm512_set1_epi32(0xffff);
  Keys keys(how.seed);
  int64_t clamped = 0;
  for (int64_t row = 0; row < how.rows; ++row) {
    const int64_t begins = how.begins + row * how.weights_stride;
    int8_t* const to = how.weights + row * how.weights_stride;
    const float* const from = how.gradients + row * how.gradients_stride;
    const float rate = how.rates[row];
    const uint32_t key = keys.at(begins);
    int64_t at = 0;
    const auto draw = [&]() __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), always_inline)) {
      return hashes(steps, static_cast<uint32_t>(begins + half_hash_of(how.first_column + at)) * kGolden + key);
    };
    if (takes_upper_half(how.first_column) && how.columns > 0) {
      const int64_t some = how.columns < kLanes ? how.columns : kLanes;
      lanes<false>(how, rate, to, from, some, _mm512_srli_epi32(draw(), 16), clamped);
      at = some;
    }
    for (; at + 2 * kLanes <= how.columns; at += 2 * kLanes) {
      const __m512i bits = draw();
      lanes<true>(how, rate, to + at, from + at, kLanes, _mm512_and_si512(bits, low_half), clamped);
      lanes<true>(how, rate, to + at + kLanes, from + at + kLanes, kLanes, _mm512_srli_epi32(bits, 16), clamped);
    }
    if (at < how.columns) {
      const __m512i bits = draw();
      const int64_t left = how.columns - at;
      const int64_t some = left < kLanes ? left : kLanes;
      lanes<false>(how, rate, to + at, from + at, some, _mm512_and_si512(bits, low_half), clamped);
      if (left > kLanes) {
        const int64_t next = at + kLanes;
        lanes<false>(how, rate, to + next, from + next, left - kLanes, _mm512_srli_epi32(bits, 16), clamped);
      }
    }
  }
  part.clamped += clamped;
}

} // namespace torch_odt::kernels::int8

#endif
