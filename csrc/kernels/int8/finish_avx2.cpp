#include "finish_avx2.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "../storage.h"
#include "draws.h"
#include "intrinsics_x86.h"
#include "lanes_avx2.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2,fma")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kHalf = 16;
constexpr int64_t kWhole = 32; // columns whose bytes are one vector

// What all rows share, in registers.
struct Constants {
  __m256i low;
  __m256i high;
  __m256i zero_point;
  __m256i draw_steps;
};

TORCH_ODT_TARGET_INLINE __m256i hashes(const Constants& all, uint32_t first) {
  __m256i bits = _mm256_add_epi32(all.draw_steps, _mm256_set1_epi32(static_cast<int32_t>(first)));
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int32_t>(kFirstFactor)));
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 15));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int32_t>(kSecondFactor)));
  return _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16));
}

// The hashes of 64 columns.
struct Draws {
  __m256i bits[2];

  TORCH_ODT_TARGET_INLINE void draw(Draws& to, const Constants& all, uint32_t first) {
    to.bits[0] = hashes(all, first);
    to.bits[1] = hashes(all, first + static_cast<uint32_t>(kLanes) * kGolden);
  }
  // Those of 8 columns from `column` of the row on, the first or second ones of 16.
  TORCH_ODT_TARGET_INLINE __m256i of(const Draws& draws, int part, int64_t column) {
    const __m256i bits = draws.bits[part];
    const __m256i pairs =
        column / kHalf % 2 == 0 ? _mm256_shuffle_epi32(bits, 0x50) : _mm256_shuffle_epi32(bits, 0xfa);
    const __m256i lane = _mm256_setr_epi32(0, 16, 0, 16, 0, 16, 0, 16);
    const __m256i shifts = _mm256_add_epi32(lane, _mm256_set1_epi32(byte_shift_of(column)));
    return _mm256_and_si256(_mm256_srlv_epi32(pairs, shifts), _mm256_set1_epi32(0xff));
  }
};

TORCH_ODT_TARGET_INLINE __m256 larger(__m256 largest, __m256 values) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  return _mm256_max_ps(largest, _mm256_andnot_ps(sign, values));
}

TORCH_ODT_TARGET_INLINE __m256 scaled(const int32_t* sums, const Columns& columns, __m256i row_term, int64_t column) {
  const __m256i terms = _mm256_load_si256((const __m256i*)(columns.terms + column));
  __m256i sum = _mm256_add_epi32(_mm256_loadu_si256((const __m256i*)(sums + column)), terms);
  sum = _mm256_add_epi32(sum, row_term);
  return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_load_ps(columns.multipliers + column));
}

// Whole numbers: of 256ths where rounding is stochastic.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE __m256i nearest(__m256 values) {
  if constexpr (kRounding == Rounding::stochastic) {
    values = _mm256_mul_ps(values, _mm256_set1_ps(kByteSteps));
  }
  return _mm256_cvtps_epi32(values);
}

// Large values as others that int8 is clamped to as well: what int32 does not hold becomes its lowest number.
TORCH_ODT_TARGET_INLINE __m256 limited(__m256 values) {
  values = _mm256_min_ps(values, _mm256_set1_ps(4194304.0F));
  return _mm256_max_ps(values, _mm256_set1_ps(-4194304.0F));
}

// 32 columns in the full range, the first or second ones of 64: nothing but int8's own ends limits them.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE void whole_to_int8(
    const int32_t* sums, const Columns& columns, const Draws& draws, int64_t column, bool second, int8_t* to, __m256& largest) {
  __m256i words[2];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    __m256i whole[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 values = scaled(sums, columns, _mm256_setzero_si256(), column + half * kHalf + part * kLanes);
      largest = larger(largest, values);
      whole[half] = nearest<kRounding>(_mm256_min_ps(values, _mm256_set1_ps(4194304.0F)));
    }
    words[part] = _mm256_packs_epi32(whole[0], whole[1]);
    if constexpr (kRounding == Rounding::stochastic) {
      const __m256i bits = draws.bits[part];
      const __m256i drawn =
          second ? _mm256_srli_epi16(bits, 8) : _mm256_and_si256(bits, _mm256_set1_epi16(0xff));
      words[part] = _mm256_srai_epi16(_mm256_adds_epi16(words[part], drawn), 8);
    }
  }
  // Packing works on lanes of 16 bytes: four columns of each vector in turn.
  const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
  const __m256i bytes = _mm256_packs_epi16(words[0], words[1]);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
}

// 16 columns, or fewer at the end of a row, with zero point, clamp and mask.
template <Rounding kRounding>
TORCH_ODT_TARGET_INLINE void half_to_int8(
    const Finish& how,
    const int32_t* sums,
    const Columns& columns,
    const Constants& all,
    __m256i row_term,
    int64_t first_column,
    int64_t column,
    int64_t count,
    const Draws& draws,
    int64_t index,
    __m256& largest) {
  __m256i between[2];
  uint64_t kept = 0;
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    __m256 values = scaled(sums, columns, row_term, column + part * kLanes);
    values = _mm256_and_ps(values, _mm256_castsi256_ps(inside(count - part * kLanes)));
    largest = larger(largest, values);
    __m256i nearby = nearest<kRounding>(limited(values));
    if constexpr (kRounding == Rounding::stochastic) {
      const __m256i drawn = Draws::of(draws, part, first_column + column);
      nearby = _mm256_srai_epi32(_mm256_add_epi32(nearby, drawn), 8);
    }
    const __m256i whole = _mm256_add_epi32(nearby, all.zero_point);
    between[part] = _mm256_min_epi32(_mm256_max_epi32(whole, all.low), all.high);
    const __m256i same = _mm256_cmpeq_epi32(whole, between[part]);
    kept |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) << (part * kLanes);
  }
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(between[0], between[1]), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  auto* const to = static_cast<int8_t*>(how.output) + index;
  if (count >= kHalf) {
    _mm_storeu_si128((__m128i*)to, bytes);
  } else {
    __builtin_memcpy(to, &bytes, static_cast<unsigned long>(count));
  }
  if (how.mask != nullptr) {
    const int64_t some = count < kHalf ? count : kHalf;
    note_bits(how.mask, index, some, kept & ((uint64_t{1} << some) - 1));
  }
}

// Whether nothing but int8's own ends limits what is written.
bool has_full_range(const Finish& how, const Block<int32_t>& block) {
  return how.zero_point == 0 && how.low == -128 && how.high == 127 && how.mask == nullptr && block.row_terms == nullptr;
}

template <Rounding kRounding>
TORCH_ODT_TARGET float to_int8(const Finish& how, const Block<int32_t>& block) {
  const Columns columns(how, block);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Constants all = {
      _mm256_set1_epi32(how.low),
      _mm256_set1_epi32(how.high),
      _mm256_set1_epi32(how.zero_point),
      _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int32_t>(kGolden)))};
  Keys keys(how.seed);
  __m256 largest = _mm256_setzero_ps();
  const bool in_wholes = block.first_column % kWhole == 0 && has_full_range(how, block);
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t place = block.places[row] - block.first_column;
    const uint32_t key = keys.at(place);
    const int32_t* const sums = block.sums + row * block.stride;
    const __m256i row_term = _mm256_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]);
    Draws draws{};
    int64_t drawn = -1; // of which 64 columns
    for (int64_t column = 0; column < block.columns;) {
      const int64_t in_row = block.first_column + column;
      const int64_t left = block.columns - column;
      if (kRounding == Rounding::stochastic && in_row / kByteColumns != drawn) {
        drawn = in_row / kByteColumns;
        Draws::draw(draws, all, static_cast<uint32_t>(place + drawn * kByteHashes) * kGolden + key);
      }
      if (in_wholes && left >= kWhole) {
        auto* const to = static_cast<int8_t*>(how.output) + place + in_row;
        whole_to_int8<kRounding>(sums, columns, draws, column, in_row / kWhole % 2 != 0, to, largest);
        column += kWhole;
        continue;
      }
      half_to_int8<kRounding>(
          how, sums, columns, all, row_term, block.first_column, column, left, draws, place + in_row, largest);
      column += kHalf;
    }
  }
  return largest_of(largest);
}

// The first `count` of eight, or all of them.
TORCH_ODT_TARGET_INLINE void store_floats(float* to, int64_t count, __m256 values) {
  if (count >= kLanes) {
    _mm256_storeu_ps(to, values);
  } else {
    _mm256_maskstore_ps(to, inside(count), values);
  }
}

// To the nearest, ties to even. Not of NaN.
TORCH_ODT_TARGET_INLINE void store_floats(BFloat16* to, int64_t count, __m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i raised = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256i upper = _mm256_srli_epi32(raised, 16);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
  const __m128i eight = _mm256_castsi256_si128(halves);
  if (count >= kLanes) {
    _mm_storeu_si128((__m128i*)to, eight);
  } else {
    __builtin_memcpy(to, &eight, static_cast<unsigned long>(count) * sizeof(BFloat16));
  }
}

template <typename Storage>
TORCH_ODT_TARGET float to_floats(const Finish& how, const Block<int32_t>& block) {
  const Columns columns(how, block);
  const bool by_rows = how.per_channel && how.channels_are_rows;
  __m256 largest = _mm256_setzero_ps();
  auto* const output = static_cast<Storage*>(how.output);
  for (int64_t row = 0; row < block.rows; ++row) {
    const int32_t* const sums = block.sums + row * block.stride;
    Storage* const to = output + block.places[row];
    const __m256i row_term = _mm256_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]);
    const __m256 of_row = _mm256_set1_ps(by_rows ? how.multipliers[block.first_channel + row] : 0);
    for (int64_t column = 0; column < block.columns; column += kLanes) {
      const __m256i terms = _mm256_load_si256((const __m256i*)(columns.terms + column));
      __m256i sum = _mm256_add_epi32(_mm256_loadu_si256((const __m256i*)(sums + column)), terms);
      sum = _mm256_add_epi32(sum, row_term);
      const __m256 multiplier = by_rows ? of_row : _mm256_load_ps(columns.multipliers + column);
      const int64_t left = block.columns - column;
      __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), multiplier);
      if (left < kLanes) {
        values = _mm256_and_ps(values, _mm256_castsi256_ps(inside(left)));
      }
      store_floats(to + column, left, values);
      largest = larger(largest, values);
    }
  }
  return largest_of(largest);
}

} // namespace

bool has_finish_avx2(const Finish& how, const Block<int32_t>& block) {
  const bool by_columns = !(how.per_channel && how.channels_are_rows);
  const bool in_order = how.rounding != Rounding::stochastic || block.first_column % kHalf == 0;
  return how.result == Result::floats || how.result == Result::bfloat16s ||
      (how.result == Result::int8 && how.rounding != Rounding::pseudo_stochastic && by_columns && in_order);
}

float finish_avx2(const Finish& how, const Block<int32_t>& block) {
  if (how.result == Result::floats) {
    return to_floats<float>(how, block);
  }
  if (how.result == Result::bfloat16s) {
    to_floats<BFloat16>(how, block);
    return 0;
  }
  return how.rounding == Rounding::nearest ? to_int8<Rounding::nearest>(how, block)
                                           : to_int8<Rounding::stochastic>(how, block);
}

} // namespace torch_odt::kernels::int8

#endif
