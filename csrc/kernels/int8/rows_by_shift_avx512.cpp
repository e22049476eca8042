#include "rows_by_shift_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "bytes_avx512.h"
#include "intrinsics_x86.h"
#include "shift_avx512.h"

#define TORCH_ODT_SETS "avx512f,avx512bw,avx512vl,avx512dq"
#define TORCH_ODT_TARGET [[gnu::target(TORCH_ODT_SETS)]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target(TORCH_ODT_SETS), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kWhole = 64; // columns whose bytes are one vector

// What all rows of a block share.
struct Shared {
  Shift shift;
  __m512i low;
  __m512i high;
};

// Where 64 columns of a row are.
struct Place {
  const int32_t* sums;
  const int32_t* terms; // of the columns, or null
  __m512i row_term;
  int8_t* output;
};

// The columns of `inside`, which are all 64 where kAll. kTerms: there may be something to add to sums.
template <bool kAll, bool kTerms>
TORCH_ODT_TARGET_INLINE void whole_by_shift(const Shared& all, const Place& at, uint64_t inside, __m512i& largest) {
  __m512i words[kWhole / kLanes];
#pragma GCC unroll 4
  for (int part = 0; part < kWhole / kLanes; ++part) {
    const auto lanes = static_cast<__mmask16>(inside >> part * kLanes);
    const int64_t column = part * kLanes;
    __m512i sum = kAll ? _mm512_loadu_si512(at.sums + column) : _mm512_maskz_loadu_epi32(lanes, at.sums + column);
    if constexpr (kTerms) {
      sum = kAll ? _mm512_add_epi32(sum, at.row_term) : _mm512_maskz_add_epi32(lanes, sum, at.row_term);
      if (at.terms != nullptr) {
        sum = _mm512_add_epi32(sum, _mm512_maskz_loadu_epi32(lanes, at.terms + column));
      }
    }
    const __m512i magnitude = _mm512_abs_epi32(sum);
    largest = _mm512_max_epu32(largest, magnitude);
    words[part] = Shift::rounded(all.shift, sum, magnitude);
  }
  const __m512i bytes = bytes_of(_mm512_packs_epi32(words[0], words[1]), _mm512_packs_epi32(words[2], words[3]));
  const __m512i between = _mm512_min_epi8(_mm512_max_epi8(bytes, all.low), all.high);
  if constexpr (kAll) {
    _mm512_storeu_si512(at.output, between);
  } else {
    _mm512_mask_storeu_epi8(at.output, inside, between);
  }
}

template <bool kTerms>
TORCH_ODT_TARGET float rows_by_shift(const Finish& how, const Block<int32_t>& of) {
  // A copy, so that no store makes it be read again.
  const Block<int32_t> block = of;
  const Shared all = {
      Shift::by(how.shift),
      _mm512_set1_epi8(static_cast<int8_t>(how.low)),
      _mm512_set1_epi8(static_cast<int8_t>(how.high))};
  const int64_t tail = block.columns % kWhole;
  auto* const output = static_cast<int8_t*>(how.output);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t row = 0; row < block.rows; ++row) {
    Place at = {
        block.sums + row * block.stride,
        block.column_terms,
        _mm512_set1_epi32(block.row_terms == nullptr ? 0 : block.row_terms[row]),
        output + block.places[row]};
    for (int64_t left = block.columns; left >= kWhole; left -= kWhole) {
      whole_by_shift<true, kTerms>(all, at, ~uint64_t{0}, largest);
      at = {at.sums + kWhole, at.terms == nullptr ? nullptr : at.terms + kWhole, at.row_term, at.output + kWhole};
    }
    if (tail != 0) {
      whole_by_shift<false, kTerms>(all, at, (uint64_t{1} << tail) - 1, largest);
    }
  }
  // Multipliers are a power of two, so that the largest value is that of the largest sum. Magnitudes are 2^31 at most,
  // which a signed conversion would take for a negative number.
  return static_cast<float>(_mm512_reduce_max_epu32(largest)) * __builtin_fabsf(*how.multipliers);
}

} // namespace

float rows_by_shift_avx512(const Finish& how, const Block<int32_t>& block) {
  const bool has_terms = block.column_terms != nullptr || block.row_terms != nullptr;
  return has_terms ? rows_by_shift<true>(how, block) : rows_by_shift<false>(how, block);
}

} // namespace torch_odt::kernels::int8

#endif
