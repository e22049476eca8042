// AVX2: vpmaddwd multiplies pairs of 16-bit numbers. Its product of bytes saturates, and would not be exact.
#if defined(__x86_64__) && defined(__GNUC__)

#include "interleave.h"
#include "intrinsics_x86.h"
#include "short_rows.h"
#include "table.h"
#include "tiles.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2")]]

namespace torch_odt::kernels::int8 {

namespace {

TORCH_ODT_TARGET void pack_left_rows(const LeftRows& of) {
  const int64_t in_vectors = short_rows(of);
  for (int64_t row = 0; row < of.rows; ++row) {
    const int8_t* const values = of.from + row * of.from_stride;
    auto* const words = reinterpret_cast<int16_t*>(static_cast<char*>(of.to) + row * of.to_stride);
    const int64_t in_vector = row < in_vectors ? of.count : of.count - 15;
    int64_t i = 0;
    for (; i < in_vector; i += 16) {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(values + i));
      _mm256_storeu_si256((__m256i*)(words + i), _mm256_cvtepi8_epi16(bytes));
    }
    for (; i < of.count; ++i) {
      words[i] = values[i];
    }
  }
}

// Steps of two values.
TORCH_ODT_TARGET void interleave(const Interleaving& of) {
  const int64_t whole = of.columns / kPanelColumns * kPanelColumns;
  for (int64_t step = 0; step < of.steps; ++step) {
    const int8_t* const first = of.rows[2 * step];
    const int8_t* const second = of.rows[2 * step + 1];
    char* to = static_cast<char*>(of.to) + step * of.step_bytes;
    for (int64_t column = 0; column < of.columns; column += kPanelColumns, to += of.block_bytes) {
      const int64_t rest = of.columns - column;
      const Bytes16 a = column < whole ? load16(first + column) : load_some(first + column, rest);
      const Bytes16 b = column < whole ? load16(second + column) : load_some(second + column, rest);
      _mm256_storeu_si256((__m256i*)to, _mm256_cvtepi8_epi16((__m128i)zip_low(a, b)));
      _mm256_storeu_si256((__m256i*)(to + 32), _mm256_cvtepi8_epi16((__m128i)zip_high(a, b)));
    }
  }
}

constexpr int kRows = 6;

TORCH_ODT_TARGET void multiply_tile(const Product& of, const char* left, const char* right, int32_t* sums) {
  __m256i tile[kRows][2];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const auto* const from = (const __m256i*)(sums + row * of.sums_stride);
    tile[row][0] = of.accumulate ? _mm256_loadu_si256(from) : _mm256_setzero_si256();
    tile[row][1] = of.accumulate ? _mm256_loadu_si256(from + 1) : _mm256_setzero_si256();
  }
  for (int64_t step = 0; step < of.steps; ++step) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)right);
    const __m256i high = _mm256_loadu_si256((const __m256i*)(right + 32));
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      int32_t values;
      __builtin_memcpy(&values, left + row * of.left_row_bytes, sizeof(values));
      const __m256i everywhere = _mm256_set1_epi32(values);
      tile[row][0] = _mm256_add_epi32(tile[row][0], _mm256_madd_epi16(everywhere, low));
      tile[row][1] = _mm256_add_epi32(tile[row][1], _mm256_madd_epi16(everywhere, high));
    }
    left += of.left_step_bytes;
    right += kPanelStepBytes;
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    auto* const to = (__m256i*)(sums + row * of.sums_stride);
    _mm256_storeu_si256(to, tile[row][0]);
    _mm256_storeu_si256(to + 1, tile[row][1]);
  }
}

void multiply(const Product& of) {
  multiply_in_tiles<kRows, multiply_tile>(of);
}

} // namespace

const Table& avx2_table() {
  static constexpr Table result = {"avx2", 2, 2, 0, false, pack_left_rows, interleave, interleave, multiply};
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
