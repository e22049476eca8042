#include "rows_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "bytes_avx512.h"
#include "draws_avx512.h"
#include "intrinsics_x86.h"

#define TORCH_ODT_SETS "avx512f,avx512bw,avx512vl,avx512dq"
#define TORCH_ODT_TARGET [[gnu::target(TORCH_ODT_SETS)]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target(TORCH_ODT_SETS), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;

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

// Which of 64 elements a mask keeps; bits behind its last byte are 0.
TORCH_ODT_TARGET_INLINE __mmask64 kept_at(const uint8_t* mask, int64_t bytes, int64_t index) {
  const int64_t byte = index / 8;
  if (index % 8 == 0 && byte + 8 <= bytes) [[likely]] {
    uint64_t found = 0;
    __builtin_memcpy(&found, mask + byte, sizeof(found));
    return found;
  }
  uint64_t found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= static_cast<uint64_t>(bits_at(mask, bytes, index + i * kLanes) & 0xffffU) << (i * kLanes);
  }
  return found;
}

template <bool kMasked>
TORCH_ODT_TARGET_INLINE __m512
weights_at(const Rows& rows, int64_t mask_bytes, int64_t value, int64_t index, __mmask16 inside) {
  auto kept = inside;
  if constexpr (kMasked) {
    kept = static_cast<__mmask16>(inside & bits_at(rows.mask, mask_bytes, index));
  }
  return _mm512_maskz_loadu_ps(kept, static_cast<const float*>(rows.values) + value);
}

// Weights. Returns how many were clamped. What int32 does not hold becomes its lowest number, which needs care above zero.
TORCH_ODT_TARGET_INLINE int store_weights(__m512 values, __m512i draws, int8_t* to, __mmask16 inside) {
  // The draw is a product that is exact: with a fused multiply-add the sum has the same bits.
  __m512 raised = _mm512_fmadd_ps(_mm512_cvtepi32_ps(draws), _mm512_set1_ps(kHalfUnit), values);
  raised = _mm512_min_ps(raised, _mm512_set1_ps(4194304.0F));
  const __m512i whole = _mm512_cvt_roundps_epi32(raised, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512i kept = _mm512_max_epi32(whole, _mm512_set1_epi32(-127));
  _mm_mask_storeu_epi8(to, inside, _mm512_cvtsepi32_epi8(kept));
  const __m512i between = _mm512_min_epi32(kept, _mm512_set1_epi32(127));
  return __builtin_popcount(_mm512_mask_cmpneq_epi32_mask(inside, whole, between));
}

template <bool kMasked>
TORCH_ODT_TARGET void round_weights(RowsPart& part) {
  const Rows rows = part.rows;
  const int64_t mask_bytes = (rows.count * rows.columns + 7) / 8;
  const __m512i steps = golden_steps();
  Keys keys(part.seed);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const int64_t begins = row * rows.columns;
    const int64_t first_value = rows.first_value(row);
    const uint32_t key = keys.at(begins);
    __m512i bits = _mm512_setzero_si512();
    for (int64_t column = 0; column < rows.columns; column += kLanes) {
      const bool upper = takes_upper_half(column);
      if (!upper) {
        bits = hashes(steps, static_cast<uint32_t>(begins + half_hash_of(column)) * kGolden + key);
      }
      const __m512i draws = upper ? _mm512_srli_epi32(bits, 16) : _mm512_and_si512(bits, _mm512_set1_epi32(0xffff));
      const int64_t left = rows.columns - column;
      const auto inside = static_cast<__mmask16>(left >= kLanes ? 0xffff : (1U << left) - 1);
      const __m512 values = weights_at<kMasked>(rows, mask_bytes, first_value + column, begins + column, inside);
      part.clamped += store_weights(values, draws, part.first.output + begins + column, inside);
    }
  }
}

// The sixteens of 64 columns, kParts of them, or fewer columns where not kAll.
template <typename Storage, int kParts, bool kAll>
struct Whole {
  __m512 values[kParts];
  __mmask64 inside;

  TORCH_ODT_TARGET_INLINE __m512 load(const float* from, __mmask64 kept, int part) {
    const auto lanes = static_cast<__mmask16>(kept >> (part * kLanes));
    return _mm512_maskz_loadu_ps(lanes, from + part * kLanes);
  }

  // Of 32 numbers the first sixteen, or the last, as upper halves of floats.
  TORCH_ODT_TARGET_INLINE __m512 load(const BFloat16* from, __mmask64 kept, int part) {
    const int first = part / 2 * 2 * kLanes;
    const __m512i halves = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kept >> first), from + first);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(part % 2 * kLanes));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(places, 16), halves));
  }

  template <bool kMasked>
  TORCH_ODT_TARGET_INLINE Whole
  read(const Rows& rows, int64_t mask_bytes, int64_t value, int64_t index, int64_t columns) {
    Whole result;
    result.inside = kAll ? ~__mmask64{0} : (__mmask64{1} << columns) - 1;
    const __mmask64 kept = kMasked ? result.inside & kept_at(rows.mask, mask_bytes, index) : result.inside;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      result.values[i] = load(static_cast<const Storage*>(rows.values) + value, kept, i);
    }
    return result;
  }

  TORCH_ODT_TARGET_INLINE void
  store(const Whole& whole, __m512i bits, const RoundedRows& to, int64_t column, int64_t index) {
    __m512i steps[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const __m512 factors = load(to.factors + column, whole.inside, i);
      const __m512 scaled = _mm512_mul_ps(whole.values[i], factors);
      steps[i] = _mm512_cvt_roundps_epi32(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    const __m512i lower = _mm512_and_si512(bits, _mm512_set1_epi16(0xff));
    const __m512i upper = _mm512_srli_epi16(bits, 8);
    const __m512i least = _mm512_set1_epi16(-127);
    const __m512i first = _mm512_adds_epi16(_mm512_packs_epi32(steps[0], steps[1]), lower);
    const __m512i second = _mm512_adds_epi16(_mm512_packs_epi32(steps[2], steps[3]), upper);
    const __m512i bytes = bytes_of(
        _mm512_max_epi16(_mm512_srai_epi16(first, 8), least), _mm512_max_epi16(_mm512_srai_epi16(second, 8), least));
    if constexpr (kAll) {
      _mm512_storeu_si512(to.output + index, bytes);
    } else {
      _mm512_mask_storeu_epi8(to.output + index, whole.inside, bytes);
    }
  }
};

// Calls `body` for each 64 columns, as template arguments how many sixteens they are and whether these are whole.
template <typename Body>
TORCH_ODT_TARGET_INLINE void each_whole(int64_t columns, const Body& body) {
  int64_t column = 0;
  for (; column + kByteColumns <= columns; column += kByteColumns) {
    body.template operator()<4, true>(column, kByteColumns);
  }
  const int64_t left = columns - column;
  switch ((left + kLanes - 1) / kLanes) {
    case 0:
      return;
    case 1:
      return body.template operator()<1, false>(column, left);
    case 2:
      return body.template operator()<2, false>(column, left);
    case 3:
      return body.template operator()<3, false>(column, left);
    default:
      return body.template operator()<4, false>(column, left);
  }
}

template <typename Storage, bool kMasked, bool kTwo>
TORCH_ODT_TARGET void round_gradients(const RowsPart& of) {
  // A copy, so that no store makes it be read again.
  const RowsPart part = of;
  const Rows rows = part.rows;
  const int64_t mask_bytes = (rows.count * rows.columns + 7) / 8;
  const __m512i steps = golden_steps();
  Keys keys(part.seed);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const int64_t begins = row * rows.columns;
    const int64_t first_value = rows.first_value(row);
    const uint32_t key = keys.at(begins);
    each_whole(
        rows.columns,
        [&]<int kParts, bool kAll>(int64_t column, int64_t columns)
            __attribute__((always_inline, target(TORCH_ODT_SETS))) {
              const __m512i bits = hashes(steps, static_cast<uint32_t>(begins + byte_hash_of(column)) * kGolden + key);
              using Columns = Whole<Storage, kParts, kAll>;
              const auto whole =
                  Columns::template read<kMasked>(rows, mask_bytes, first_value + column, begins + column, columns);
              Columns::store(whole, bits, part.first, column, begins + column);
              if constexpr (kTwo) {
                Columns::store(whole, bits, part.second, column, begins + column);
              }
            });
  }
}

// The sums and largest magnitudes of some columns.
template <typename Storage, bool kMasked, int kParts, bool kAll>
TORCH_ODT_TARGET_INLINE void scan_whole(const ScannedRows& of, int64_t mask_bytes, int64_t column, int64_t columns) {
  __m512i largest[kParts];
  __m512 sums[kParts];
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    largest[i] = _mm512_setzero_si512();
    sums[i] = _mm512_setzero_ps();
  }
  __mmask64 inside = 0;
  for (int64_t row = of.begin; row < of.end; ++row) {
    const auto whole = Whole<Storage, kParts, kAll>::template read<kMasked>(
        of.rows, mask_bytes, of.rows.first_value(row) + column, row * of.rows.columns + column, columns);
    inside = whole.inside;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      // As bits, magnitudes are ordered as their numbers are, and NaN is above all of them.
      largest[i] = _mm512_max_epi32(largest[i], _mm512_castps_si512(_mm512_abs_ps(whole.values[i])));
      sums[i] = _mm512_add_ps(sums[i], whole.values[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const auto lanes = static_cast<__mmask16>(inside >> (i * kLanes));
    _mm512_mask_storeu_ps(of.largest + column + i * kLanes, lanes, _mm512_castsi512_ps(largest[i]));
    _mm512_mask_storeu_ps(of.sums + column + i * kLanes, lanes, sums[i]);
  }
}

template <typename Storage, bool kMasked>
TORCH_ODT_TARGET void scan_some(const ScannedRows& from) {
  const ScannedRows of = from;
  const int64_t mask_bytes = (of.rows.count * of.rows.columns + 7) / 8;
  each_whole(
      of.rows.columns,
      [&]<int kParts, bool kAll>(int64_t column, int64_t columns)
          __attribute__((always_inline, target(TORCH_ODT_SETS))) {
            scan_whole<Storage, kMasked, kParts, kAll>(of, mask_bytes, column, columns);
          });
}

template <bool kMasked>
void round_some(RowsPart& part) {
  if (part.first.factors == nullptr) {
    round_weights<kMasked>(part);
    return;
  }
  with_storage(part.rows, [&]<typename Storage>() {
    if (part.second.output == nullptr) {
      round_gradients<Storage, kMasked, false>(part);
    } else {
      round_gradients<Storage, kMasked, true>(part);
    }
  });
}

} // namespace

void scan_rows_avx512(const ScannedRows& of) {
  with_storage(of.rows, [&]<typename Storage>() {
    if (of.rows.mask == nullptr) {
      scan_some<Storage, false>(of);
    } else {
      scan_some<Storage, true>(of);
    }
  });
}

void round_rows_avx512(RowsPart& part) {
  if (part.rows.mask == nullptr) {
    round_some<false>(part);
  } else {
    round_some<true>(part);
  }
}

} // namespace torch_odt::kernels::int8

#endif
