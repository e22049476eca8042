#include "finish_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "draws.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kWhole = 64; // columns whose bytes are one vector

// What all rows share, in registers.
struct Constants {
  __m512i low;
  __m512i high;
  __m512i zero_point;
  __m512i draw_steps;
  // Of pseudo-stochastic rounding: how many bits are lost, half of them and the rest; all that are lost, and the lower half.
  __m128i shift;
  __m128i half;
  __m128i rest;
  __m512i lost;
  __m512i lower;
};

// Large values as others that int8 is clamped to as well. What int32 does not hold becomes its lowest number, which needs
// care above zero, and below it where a zero point would wrap it around.
template <bool kFullRange>
TORCH_ODT_TARGET_INLINE __m512 limited(__m512 values) {
  values = _mm512_min_ps(values, _mm512_set1_ps(4194304.0F));
  return kFullRange ? values : _mm512_max_ps(values, _mm512_set1_ps(-4194304.0F));
}

// Of numbers side by side from `first` on, each times kGolden.
TORCH_ODT_TARGET_INLINE __m512i hashes(const Constants& all, uint32_t first) {
  __m512i bits = _mm512_add_epi32(all.draw_steps, _mm512_set1_epi32(static_cast<int32_t>(first)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kFirstFactor)));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 15));
  bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kSecondFactor)));
  return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
}

// `draws` are 16-bit numbers.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE __m512i rounded(__m512 values, __m512i draws) {
  if constexpr (kRounding == Rounding::nearest) {
    return _mm512_cvt_roundps_epi32(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    // The product is exact: as a fused multiply-add it has the bits of a multiplication and an addition.
    const __m512 raised = _mm512_fmadd_ps(_mm512_cvtepi32_ps(draws), _mm512_set1_ps(kDrawUnit), values);
    return _mm512_cvt_roundps_epi32(raised, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
}

// NITI's rounding, as in lanes.h.
TORCH_ODT_TARGET_INLINE __m512i shifted(__m512i sum, const Constants& all) {
  const __m512i magnitude = _mm512_abs_epi32(sum);
  const __m512i lost = _mm512_and_si512(magnitude, all.lost);
  const __m512i upper = _mm512_srl_epi32(lost, all.half);
  const __m512i random = _mm512_sll_epi32(_mm512_and_si512(lost, all.lower), all.rest);
  const __mmask16 up = _mm512_cmpgt_epu32_mask(upper, random);
  const __m512i whole = _mm512_srl_epi32(magnitude, all.shift);
  const __m512i raised = _mm512_mask_add_epi32(whole, up, whole, _mm512_set1_epi32(1));
  return _mm512_mask_sub_epi32(raised, _mm512_movepi32_mask(sum), _mm512_setzero_si512(), raised);
}

// What changes from one place to the next.
struct Place {
  const int32_t* sums;
  int64_t column;
  int64_t index; // in the output
  __m512i row_term;
};

// kFullRange: there is neither a zero point nor a clamp above what int8 holds, nor a mask, nor terms of rows.
template <Rounding kRounding, bool kFullRange, bool kAll>
TORCH_ODT_TARGET_INLINE void lanes_to_int8(
    const Finish& how,
    const Columns& columns,
    const Constants& all,
    const Place& at,
    __m512i draws,
    int64_t lanes,
    __m512& largest) {
  const auto inside = static_cast<__mmask16>(kAll ? 0xffff : (1U << lanes) - 1);
  __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(at.sums + at.column), _mm512_load_si512(columns.terms + at.column));
  if constexpr (!kFullRange) {
    sum = _mm512_add_epi32(sum, at.row_term);
  }
  const __m512 multiplier = _mm512_load_ps(columns.multipliers + at.column);
  const __m512 values = _mm512_maskz_mul_ps(inside, _mm512_cvtepi32_ps(sum), multiplier);
  largest = _mm512_range_ps(largest, values, 0xb);
  auto* const output = static_cast<int8_t*>(how.output) + at.index;
  __m512i nearby;
  if constexpr (kRounding == Rounding::pseudo_stochastic) {
    nearby = shifted(sum, all);
    if constexpr (!kFullRange) {
      // So that the zero point wraps nothing around.
      nearby = _mm512_min_epi32(_mm512_max_epi32(nearby, _mm512_set1_epi32(-(1 << 22))), _mm512_set1_epi32(1 << 22));
    }
  } else {
    nearby = rounded<kRounding>(limited<kFullRange>(values), draws);
  }
  const __m512i whole = kFullRange ? nearby : _mm512_add_epi32(nearby, all.zero_point);
  const __m512i between = kFullRange ? whole : _mm512_min_epi32(_mm512_max_epi32(whole, all.low), all.high);
  const __m128i bytes = _mm512_cvtsepi32_epi8(between);
  if constexpr (kAll) {
    _mm_storeu_si128((__m128i*)output, bytes);
  } else {
    _mm_mask_storeu_epi8(output, inside, bytes);
  }
  if (!kFullRange && how.mask != nullptr) {
    const __mmask16 kept = _mm512_mask_cmpeq_epi32_mask(inside, whole, between);
    if (kAll && at.index % 8 == 0) {
      __builtin_memcpy(how.mask + at.index / 8, &kept, sizeof(kept));
    } else {
      note_bits(how.mask, at.index, lanes, kept);
    }
  }
}

TORCH_ODT_TARGET_INLINE __m512i lower_half(__m512i bits) {
  return _mm512_and_si512(bits, _mm512_set1_epi32(0xffff));
}

TORCH_ODT_TARGET_INLINE __m512i upper_half(__m512i bits) {
  return _mm512_srli_epi32(bits, 16);
}

// 64 columns in the full range, whose values int32 holds: nothing but int8's own ends limits them. `first` is what their
// hashes begin with.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE void whole_to_int8(
    const int32_t* sums,
    const Columns& columns,
    const Constants& all,
    int64_t column,
    uint32_t first,
    int8_t* to,
    __m512& largest) {
  __m512i whole[4];
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    __m512i bits = _mm512_setzero_si512();
    if constexpr (kRounding == Rounding::stochastic) {
      bits = hashes(all, first + static_cast<uint32_t>(pair * kLanes) * kGolden);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = column + (2 * pair + half) * kLanes;
      const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(sums + at), _mm512_load_si512(columns.terms + at));
      const __m512 values = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_load_ps(columns.multipliers + at));
      largest = _mm512_range_ps(largest, values, 0xb);
      whole[2 * pair + half] = rounded<kRounding>(values, half == 0 ? lower_half(bits) : upper_half(bits));
    }
  }
  // Packing works on lanes of 16 bytes: four columns of each vector in turn.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes =
      _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

// Whether no sum times its multiplier is more than int32 holds.
TORCH_ODT_TARGET_INLINE bool are_fractions(const Columns& columns, int64_t count) {
  __mmask16 result = 0xffff;
  for (int64_t column = 0; column < count; column += kLanes) {
    const __m512 magnitude = _mm512_abs_ps(_mm512_load_ps(columns.multipliers + column));
    result &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1), _CMP_LT_OQ);
  }
  return result == 0xffff;
}

template <Rounding kRounding, bool kFullRange>
TORCH_ODT_TARGET_INLINE float to_int8(const Finish& how, const Block<int32_t>& block) {
  const Columns columns(how, block);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Constants all = {
      _mm512_set1_epi32(how.low),
      _mm512_set1_epi32(how.high),
      _mm512_set1_epi32(how.zero_point),
      _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(kGolden))),
      _mm_cvtsi64_si128(how.shift),
      _mm_cvtsi64_si128(how.shift / 2),
      _mm_cvtsi64_si128(how.shift - 2 * (how.shift / 2)),
      _mm512_set1_epi32((1 << how.shift) - 1),
      _mm512_set1_epi32((1 << how.shift / 2) - 1)};
  Keys keys(how.seed);
  __m512 largest = _mm512_setzero_ps();
  const int64_t whole = block.columns / kLanes * kLanes;
  constexpr bool kInWholes = kFullRange && kRounding != Rounding::pseudo_stochastic;
  const bool in_wholes = kInWholes && block.first_column % 32 == 0 && are_fractions(columns, block.columns);
  const int64_t wholes_end = in_wholes ? block.columns / kWhole * kWhole : 0;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t index = block.places[row];
    const uint32_t key = keys.at(index - block.first_column);
    const __m512i row_term = _mm512_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]);
    Place at{block.sums + row * block.stride, 0, index, row_term};
    if constexpr (kInWholes) {
      uint32_t first = static_cast<uint32_t>(index - block.first_column + hash_of(block.first_column)) * kGolden + key;
      for (; at.column < wholes_end; at.column += kWhole, at.index += kWhole, first += kWhole / 2 * kGolden) {
        auto* const to = static_cast<int8_t*>(how.output) + at.index;
        whole_to_int8<kRounding>(at.sums, columns, all, at.column, first, to, largest);
      }
    }
    __m512i bits = _mm512_setzero_si512();
    const auto draw = [&]() __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), always_inline)) {
      const int64_t column = block.first_column + at.column;
      const bool upper = takes_upper_half(column);
      if (!upper || at.column == wholes_end) {
        const auto first = static_cast<uint32_t>(at.index - column + hash_of(column));
        bits = hashes(all, first * kGolden + key);
      }
      return upper ? upper_half(bits) : lower_half(bits);
    };
    constexpr bool kDraws = kRounding == Rounding::stochastic;
    for (; at.column < whole; at.column += kLanes, at.index += kLanes) {
      const __m512i draws = kDraws ? draw() : bits;
      lanes_to_int8<kRounding, kFullRange, true>(how, columns, all, at, draws, kLanes, largest);
    }
    if (at.column < block.columns) {
      const __m512i draws = kDraws ? draw() : bits;
      lanes_to_int8<kRounding, kFullRange, false>(how, columns, all, at, draws, block.columns - at.column, largest);
    }
  }
  return _mm512_reduce_max_ps(_mm512_abs_ps(largest));
}

// What does not change from one column of a row to the next.
struct FloatRow {
  const int32_t* sums;
  float* to;
  __m512i term;
  __m512 multiplier;
};

template <bool kByRows, bool kAll>
TORCH_ODT_TARGET_INLINE void lanes_to_floats(
    const FloatRow& row, const Columns& columns, int64_t column, int64_t lanes, __m512& largest) {
  const auto inside = static_cast<__mmask16>(kAll ? 0xffff : (1U << lanes) - 1);
  __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(row.sums + column), _mm512_load_si512(columns.terms + column));
  sum = _mm512_add_epi32(sum, row.term);
  const __m512 multiplier = kByRows ? row.multiplier : _mm512_load_ps(columns.multipliers + column);
  const __m512 values = _mm512_maskz_mul_ps(inside, _mm512_cvtepi32_ps(sum), multiplier);
  largest = _mm512_range_ps(largest, values, 0xb);
  if constexpr (kAll) {
    _mm512_storeu_ps(row.to + column, values);
  } else {
    _mm512_mask_storeu_ps(row.to + column, inside, values);
  }
}

template <bool kByRows>
TORCH_ODT_TARGET_INLINE float rows_to_floats(const Finish& how, const Block<int32_t>& block) {
  const Columns columns(how, block);
  const int64_t whole = block.columns / kLanes * kLanes;
  __m512 largest = _mm512_setzero_ps();
  for (int64_t i = 0; i < block.rows; ++i) {
    const FloatRow row = {
        block.sums + i * block.stride,
        static_cast<float*>(how.output) + block.places[i],
        _mm512_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[i]),
        _mm512_set1_ps(kByRows ? how.multipliers[block.first_channel + i] : 0)};
    for (int64_t column = 0; column < whole; column += kLanes) {
      lanes_to_floats<kByRows, true>(row, columns, column, kLanes, largest);
    }
    if (whole < block.columns) {
      lanes_to_floats<kByRows, false>(row, columns, whole, block.columns - whole, largest);
    }
  }
  return _mm512_reduce_max_ps(_mm512_abs_ps(largest));
}

TORCH_ODT_TARGET float to_floats(const Finish& how, const Block<int32_t>& block) {
  return how.per_channel && how.channels_are_rows ? rows_to_floats<true>(how, block) : rows_to_floats<false>(how, block);
}

bool has_full_range(const Finish& how, const Block<int32_t>& block) {
  return how.zero_point == 0 && how.low == -128 && how.high == 127 && how.mask == nullptr && block.row_terms == nullptr;
}

TORCH_ODT_TARGET float to_int8_nearest(const Finish& how, const Block<int32_t>& block) {
  return has_full_range(how, block) ? to_int8<Rounding::nearest, true>(how, block)
                                    : to_int8<Rounding::nearest, false>(how, block);
}

TORCH_ODT_TARGET float to_int8_stochastic(const Finish& how, const Block<int32_t>& block) {
  return has_full_range(how, block) ? to_int8<Rounding::stochastic, true>(how, block)
                                    : to_int8<Rounding::stochastic, false>(how, block);
}

TORCH_ODT_TARGET float to_int8_shifted(const Finish& how, const Block<int32_t>& block) {
  return has_full_range(how, block) ? to_int8<Rounding::pseudo_stochastic, true>(how, block)
                                    : to_int8<Rounding::pseudo_stochastic, false>(how, block);
}

} // namespace

bool has_finish_avx512(const Finish& how) {
  const bool by_columns = !(how.per_channel && how.channels_are_rows);
  return how.result == Result::floats ||
      (how.result == Result::int8 && by_columns);
}

float finish_avx512(const Finish& how, const Block<int32_t>& block) {
  if (how.result == Result::floats) {
    return to_floats(how, block);
  }
  switch (how.rounding) {
    case Rounding::nearest:
      return to_int8_nearest(how, block);
    case Rounding::stochastic:
      return to_int8_stochastic(how, block);
    case Rounding::pseudo_stochastic:
      break;
  }
  return to_int8_shifted(how, block);
}

} // namespace torch_odt::kernels::int8

#endif
