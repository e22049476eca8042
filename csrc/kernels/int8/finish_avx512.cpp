#include "finish_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "../storage.h"
#include "bytes_avx512.h"
#include "draws_avx512.h"
#include "intrinsics_x86.h"
#include "rows_by_shift_avx512.h"
#include "shift_avx512.h"

#define TORCH_ODT_SETS "avx512f,avx512bw,avx512vl,avx512dq"
#define TORCH_ODT_TARGET [[gnu::target(TORCH_ODT_SETS)]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target(TORCH_ODT_SETS), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kWhole = kByteColumns; // columns whose bytes are one vector, and whose draws are one vector's

// What all rows share, in registers.
struct Constants {
  __m512i low;
  __m512i high;
  __m512i zero_point;
  __m512i draw_steps;
  Shift shift; // of pseudo-stochastic rounding
};

// The nearest whole numbers; what int32 does not hold keeps its sign, and is clamped later on. kHeld: int32 holds all.
template <bool kHeld = false>
TORCH_ODT_TARGET_INLINE __m512i nearest(__m512 values) {
  const __m512 held = kHeld ? values : _mm512_min_ps(values, _mm512_set1_ps(1073741824.0F));
  return _mm512_cvt_roundps_epi32(held, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Of the bytes that 64 columns draw those of 16 that begin with `column`, as numbers.
TORCH_ODT_TARGET_INLINE __m512i draws_of(__m512i bits, int64_t column) {
  const __m512i pairs = column / kLanes % 2 == 0 ? _mm512_shuffle_epi32(bits, (_MM_PERM_ENUM)0x50)
                                                 : _mm512_shuffle_epi32(bits, (_MM_PERM_ENUM)0xfa);
  const __m512i lane = _mm512_setr_epi32(0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16);
  const __m512i shifts = _mm512_add_epi32(lane, _mm512_set1_epi32(byte_shift_of(column)));
  return _mm512_and_si512(_mm512_srlv_epi32(pairs, shifts), _mm512_set1_epi32(0xff));
}

TORCH_ODT_TARGET_INLINE Constants constants_of(const Finish& how) {
  return {
      _mm512_set1_epi32(how.low),
      _mm512_set1_epi32(how.high),
      _mm512_set1_epi32(how.zero_point),
      golden_steps(),
      Shift::by(how.shift)};
}

// What changes from one place to the next.
struct Place {
  const int32_t* sums;
  int64_t column;
  int64_t index; // in the output
  __m512i row_term;
};

// The values of 16 columns or fewer, and their sums.
struct Values {
  __m512i sums;
  __m512 scaled;
};

// Sums lie in whole vectors, and behind the last column multipliers are zero.
TORCH_ODT_TARGET_INLINE Values values_at(
    const Columns& columns, const int32_t* sums, int64_t column, __m512i row_term) {
  const __m512i terms = _mm512_load_si512(columns.terms + column);
  const __m512i all = _mm512_add_epi32(_mm512_add_epi32(_mm512_loadu_si512(sums + column), terms), row_term);
  return {all, _mm512_mul_ps(_mm512_cvtepi32_ps(all), _mm512_load_ps(columns.multipliers + column))};
}

// Any way to int8, for 16 columns or fewer; `draws` are those of stochastic rounding.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE void lanes_to_int8(
    const Finish& how,
    const Columns& columns,
    const Constants& all,
    const Place& at,
    __m512i draws,
    int64_t lanes,
    __m512& largest) {
  const auto inside = static_cast<__mmask16>((1U << lanes) - 1);
  const Values values = values_at(columns, at.sums, at.column, at.row_term);
  largest = _mm512_range_ps(largest, values.scaled, 0xb);
  __m512i nearby;
  if constexpr (kRounding == Rounding::pseudo_stochastic) {
    nearby = Shift::rounded(all.shift, values.sums, _mm512_abs_epi32(values.sums));
  } else if constexpr (kRounding == Rounding::stochastic) {
    const __m512i steps = nearest(_mm512_mul_ps(values.scaled, _mm512_set1_ps(kByteSteps)));
    nearby = _mm512_srai_epi32(_mm512_add_epi32(steps, draws), 8);
  } else {
    nearby = nearest(values.scaled);
  }
  // So that the zero point wraps nothing around.
  nearby = _mm512_min_epi32(_mm512_max_epi32(nearby, _mm512_set1_epi32(-(1 << 22))), _mm512_set1_epi32(1 << 22));
  const __m512i whole = _mm512_add_epi32(nearby, all.zero_point);
  const __m512i between = _mm512_min_epi32(_mm512_max_epi32(whole, all.low), all.high);
  _mm_mask_storeu_epi8(static_cast<int8_t*>(how.output) + at.index, inside, _mm512_cvtsepi32_epi8(between));
  if (how.mask != nullptr) {
    note_bits(how.mask, at.index, lanes, _mm512_mask_cmpeq_epi32_mask(inside, whole, between));
  }
}

template <Rounding kRounding>
TORCH_ODT_TARGET float to_int8(const Finish& how, const Block<int32_t>& block) {
  const Columns columns(how, block);
  const Constants all = constants_of(how);
  Keys keys(how.seed);
  __m512 largest = _mm512_setzero_ps();
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t place = block.places[row] - block.first_column;
    const uint32_t key = keys.at(place);
    const __m512i row_term = _mm512_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]);
    for (int64_t column = 0; column < block.columns; column += kLanes) {
      const int64_t in_row = block.first_column + column;
      __m512i draws = _mm512_setzero_si512();
      if constexpr (kRounding == Rounding::stochastic) {
        const auto first = static_cast<uint32_t>(place + in_row / kByteColumns * kByteHashes);
        draws = draws_of(hashes(all.draw_steps, first * kGolden + key), in_row);
      }
      const int64_t left = block.columns - column;
      lanes_to_int8<kRounding>(
          how,
          columns,
          all,
          {block.sums + row * block.stride, column, place + in_row, row_term},
          draws,
          left < kLanes ? left : kLanes,
          largest);
    }
  }
  return _mm512_reduce_max_ps(_mm512_abs_ps(largest));
}

// What becomes of whole numbers. Of 64 columns, these are two vectors of 16 bits: four columns of each quarter in turn.
struct Limits {
  __m512i zero_point;
  __m512i low;
  __m512i high;
};

// The first columns of 64, those of `inside`.
TORCH_ODT_TARGET_INLINE void note_mask(uint8_t* mask, int64_t index, __mmask64 kept, __mmask64 inside) {
  if (index % 8 == 0 && inside == ~__mmask64{0}) {
    __builtin_memcpy(mask + index / 8, &kept, sizeof(kept));
    return;
  }
  const auto count = static_cast<int64_t>(__builtin_popcountll(inside));
  const uint64_t bits = kept & inside;
  note_bits(mask, index, count < 32 ? count : 32, bits & 0xffffffffU);
  if (count > 32) {
    note_bits(mask, index + 32, count - 32, bits >> 32);
  }
}

// Where 64 columns of a row are, and what is drawn for them.
struct Whole {
  const int32_t* sums;
  const int32_t* terms;
  const float* multipliers;
  int8_t* output;
  __m512i bits;

  template <bool kTerms>
  TORCH_ODT_TARGET_INLINE __m512 values(const Whole& at, int part) {
    __m512i sums = _mm512_loadu_si512(at.sums + part * kLanes);
    if constexpr (kTerms) {
      sums = _mm512_add_epi32(sums, _mm512_load_si512(at.terms + part * kLanes));
    }
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_load_ps(at.multipliers + part * kLanes));
  }
};

// The first `kParts` sixteens of 64 columns, all of them or some of the last. Multipliers are 256 times as large where
// rounding is stochastic. kTerms: something is added to each column. kPlain: nothing but int8's own ends limits what is written, and there is no mask. Returns which
// columns the limits changed nothing of.
template <Rounding kRounding, bool kPlain, bool kHeld, bool kTerms, int kParts>
TORCH_ODT_TARGET_INLINE __mmask64
whole_to_int8(const Whole& at, const Limits& limits, __mmask64 inside, __m512& largest) {
  __m512i whole[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  __m512i kept[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 2
  for (int pair = 0; pair < (kParts + 1) / 2; ++pair) {
    __m512i words[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if (2 * pair + half < kParts) {
        const __m512 values = Whole::values<kTerms>(at, 2 * pair + half);
        largest = _mm512_range_ps(largest, values, 0xb);
        words[half] = nearest<kHeld>(values);
      }
    }
    whole[pair] = _mm512_packs_epi32(words[0], words[1]);
    if constexpr (kRounding == Rounding::stochastic) {
      const __m512i draws =
          pair == 0 ? _mm512_and_si512(at.bits, _mm512_set1_epi16(0xff)) : _mm512_srli_epi16(at.bits, 8);
      whole[pair] = _mm512_srai_epi16(_mm512_adds_epi16(whole[pair], draws), 8);
    }
    if constexpr (!kPlain) {
      const __m512i moved = _mm512_adds_epi16(whole[pair], limits.zero_point);
      whole[pair] = _mm512_min_epi16(_mm512_max_epi16(moved, limits.low), limits.high);
      kept[pair] = _mm512_movm_epi16(_mm512_cmpeq_epi16_mask(moved, whole[pair]));
    }
  }
  if (inside == ~__mmask64{0}) {
    _mm512_storeu_si512(at.output, bytes_of(whole[0], whole[1]));
  } else {
    _mm512_mask_storeu_epi8(at.output, inside, bytes_of(whole[0], whole[1]));
  }
  return kPlain ? 0 : _mm512_movepi8_mask(bytes_of(kept[0], kept[1]));
}

// Rows whose last columns, which are no 64 any more, are in `kTail` sixteens.
template <Rounding kRounding, bool kPlain, bool kHeld, bool kTerms, int kTail>
TORCH_ODT_TARGET float rows_to_int8(const Finish& how, const Block<int32_t>& of, const Columns& columns) {
  // Copies, so that no store makes them be read again.
  const Block<int32_t> block = of;
  auto* const output = static_cast<int8_t*>(how.output);
  uint8_t* const mask = how.mask;
  const Limits limits = {
      _mm512_set1_epi16(static_cast<int16_t>(how.zero_point)),
      _mm512_set1_epi16(static_cast<int16_t>(how.low)),
      _mm512_set1_epi16(static_cast<int16_t>(how.high))};
  const __m512i draw_steps = golden_steps();
  const int64_t wholes_end = block.columns / kWhole * kWhole;
  const auto tail = static_cast<__mmask64>((uint64_t{1} << (block.columns - wholes_end)) - 1);
  const int64_t hashes_before = block.first_column / kByteColumns * kByteHashes - block.first_column;
  Keys keys(how.seed);
  __m512 largest = _mm512_setzero_ps();
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t place = block.places[row];
    Whole at = {
        block.sums + row * block.stride,
        columns.terms,
        columns.multipliers,
        output + place,
        _mm512_setzero_si512()};
    uint32_t first = 0;
    if constexpr (kRounding == Rounding::stochastic) {
      first = static_cast<uint32_t>(place + hashes_before) * kGolden + keys.at(place - block.first_column);
    }
    for (int64_t column = 0; column < wholes_end; column += kWhole, first += kByteHashes * kGolden) {
      if constexpr (kRounding == Rounding::stochastic) {
        at.bits = hashes(draw_steps, first);
      }
      const __mmask64 kept = whole_to_int8<kRounding, kPlain, kHeld, kTerms, 4>(at, limits, ~__mmask64{0}, largest);
      if (!kPlain && mask != nullptr) {
        note_mask(mask, place + column, kept, ~__mmask64{0});
      }
      at = {at.sums + kWhole, at.terms + kWhole, at.multipliers + kWhole, at.output + kWhole, at.bits};
    }
    if constexpr (kTail > 0) {
      if constexpr (kRounding == Rounding::stochastic) {
        at.bits = hashes(draw_steps, first);
      }
      const __mmask64 kept = whole_to_int8<kRounding, kPlain, kHeld, kTerms, kTail>(at, limits, tail, largest);
      if (!kPlain && mask != nullptr) {
        note_mask(mask, place + wholes_end, kept, tail);
      }
    }
  }
  constexpr float kUnit = kRounding == Rounding::stochastic ? 1 / kByteSteps : 1;
  return _mm512_reduce_max_ps(_mm512_abs_ps(largest)) * kUnit;
}

template <Rounding kRounding, bool kPlain, bool kHeld, bool kTerms>
float rows_to_int8(const Finish& how, const Block<int32_t>& block, const Columns& columns) {
  switch ((block.columns % kWhole + kLanes - 1) / kLanes) {
    case 0:
      return rows_to_int8<kRounding, kPlain, kHeld, kTerms, 0>(how, block, columns);
    case 1:
      return rows_to_int8<kRounding, kPlain, kHeld, kTerms, 1>(how, block, columns);
    case 2:
      return rows_to_int8<kRounding, kPlain, kHeld, kTerms, 2>(how, block, columns);
    case 3:
      return rows_to_int8<kRounding, kPlain, kHeld, kTerms, 3>(how, block, columns);
    default:
      return rows_to_int8<kRounding, kPlain, kHeld, kTerms, 4>(how, block, columns);
  }
}

// Whether the magnitude of each multiplier that is not zero is between these two.
TORCH_ODT_TARGET_INLINE bool are_between(const Columns& columns, int64_t count, float low, float high) {
  __mmask16 result = 0xffff;
  for (int64_t column = 0; column < count; column += kLanes) {
    const __m512 magnitude = _mm512_abs_ps(_mm512_load_ps(columns.multipliers + column));
    const __mmask16 none = _mm512_cmp_ps_mask(magnitude, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __mmask16 above = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(low), _CMP_GE_OQ);
    result &= none | (above & _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(high), _CMP_LT_OQ));
  }
  return result == 0xffff;
}

template <Rounding kRounding, bool kPlain>
TORCH_ODT_TARGET float wholes_to_int8(const Finish& how, const Block<int32_t>& block, Columns& columns) {
  if constexpr (kRounding == Rounding::stochastic) {
    for (int64_t column = 0; column < block.columns; column += kLanes) {
      float* const at = columns.multipliers + column;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(kByteSteps)));
    }
  }
  if (!are_between(columns, block.columns, 0, 1)) {
    return rows_to_int8<kRounding, kPlain, false, true>(how, block, columns);
  }
  return block.column_terms == nullptr ? rows_to_int8<kRounding, kPlain, true, false>(how, block, columns)
                                       : rows_to_int8<kRounding, kPlain, true, true>(how, block, columns);
}

bool is_plain(const Finish& how) {
  return how.zero_point == 0 && how.low == -128 && how.high == 127 && how.mask == nullptr;
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

// Of 16 columns, numbers whose upper halves are bfloat16: to the nearest, ties to even. Not of NaN.
template <bool kTerms>
TORCH_ODT_TARGET_INLINE __m512i lanes_to_bfloat16(const int32_t* sums, const Columns& columns, int64_t column) {
  __m512i sum = _mm512_loadu_si512(sums + column);
  if constexpr (kTerms) {
    sum = _mm512_add_epi32(sum, _mm512_load_si512(columns.terms + column));
  }
  const __m512 values = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_load_ps(columns.multipliers + column));
  const __m512i bits = _mm512_castps_si512(values);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i raised = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(raised, odd, bits, _mm512_set1_epi32(0x8000));
}

template <bool kTerms>
TORCH_ODT_TARGET void rows_to_bfloat16(const Finish& how, const Block<int32_t>& block) {
  constexpr int64_t kTwo = 2 * kLanes;
  const Columns columns(how, block);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // The odd ones of 64 halves: 4 i + 1 and 4 i + 3, two in each number.
  const __m512i fours = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00040004));
  const __m512i upper = _mm512_add_epi32(fours, _mm512_set1_epi32(0x00030001));
  for (int64_t i = 0; i < block.rows; ++i) {
    const int32_t* const sums = block.sums + i * block.stride;
    BFloat16* const to = static_cast<BFloat16*>(how.output) + block.places[i];
    for (int64_t column = 0; column < block.columns; column += kTwo) {
      const int64_t left = block.columns - column;
      const __m512i first = lanes_to_bfloat16<kTerms>(sums, columns, column);
      const __m512i second = left > kLanes ? lanes_to_bfloat16<kTerms>(sums, columns, column + kLanes) : first;
      const __m512i halves = _mm512_permutex2var_epi16(first, upper, second);
      const auto inside = static_cast<__mmask32>(left >= kTwo ? ~0U : (1U << left) - 1);
      _mm512_mask_storeu_epi16(to + column, inside, halves);
    }
  }
}

TORCH_ODT_TARGET float to_int8_nearest(const Finish& how, const Block<int32_t>& block) {
  if (block.row_terms != nullptr) {
    return to_int8<Rounding::nearest>(how, block);
  }
  Columns columns(how, block);
  return is_plain(how) ? wholes_to_int8<Rounding::nearest, true>(how, block, columns)
                       : wholes_to_int8<Rounding::nearest, false>(how, block, columns);
}

TORCH_ODT_TARGET float to_int8_stochastic(const Finish& how, const Block<int32_t>& block) {
  Columns columns(how, block);
  // 16 bits hold no more than int8 and its 256ths: what is moved or told apart beyond that needs 32. 256 times as much
  // must neither overflow nor have bits that it lacks. And 64 columns have to begin where those that share draws do.
  const bool narrow = is_plain(how) && block.row_terms == nullptr && block.first_column % kWhole == 0 &&
      are_between(columns, block.columns, 0x1p-100F, 0x1p60F);
  return narrow ? wholes_to_int8<Rounding::stochastic, true>(how, block, columns)
                : to_int8<Rounding::stochastic>(how, block);
}

} // namespace

bool has_finish_avx512(const Finish& how, const Block<int32_t>& block) {
  const bool by_columns = !(how.per_channel && how.channels_are_rows);
  const bool in_order = how.rounding != Rounding::stochastic || block.first_column % kLanes == 0;
  return how.result == Result::floats || (how.result == Result::int8 && by_columns && in_order) ||
      (how.result == Result::bfloat16s && by_columns && block.row_terms == nullptr);
}

float finish_avx512(const Finish& how, const Block<int32_t>& block) {
  if (how.result == Result::floats) {
    return to_floats(how, block);
  }
  if (how.result == Result::bfloat16s) {
    if (block.column_terms == nullptr) {
      rows_to_bfloat16<false>(how, block);
    } else {
      rows_to_bfloat16<true>(how, block);
    }
    return 0;
  }
  switch (how.rounding) {
    case Rounding::nearest:
      return to_int8_nearest(how, block);
    case Rounding::stochastic:
      return to_int8_stochastic(how, block);
    case Rounding::pseudo_stochastic:
      break;
  }
  const bool is_simple = how.zero_point == 0 && how.mask == nullptr && !how.per_channel;
  return is_simple ? rows_by_shift_avx512(how, block) : to_int8<Rounding::pseudo_stochastic>(how, block);
}

} // namespace torch_odt::kernels::int8

#endif
