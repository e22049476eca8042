// AVX2: vpmaddwd multiplies pairs of 16-bit numbers. Its product of bytes saturates, and would not be exact.
#if defined(__x86_64__) && defined(__GNUC__)

#include "interleave.h"
#include "intrinsics_x86.h"
#include "lanes_avx2.h"
#include "short_rows.h"
#include "table.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2")]]
#define TORCH_ODT_TARGET_INLINE [[gnu::target("avx2"), gnu::always_inline]] static inline

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

// Of 16 registers, what is left after sums is for a step of the right operand and one value of the left.
template <int kRows>
TORCH_ODT_TARGET_INLINE void add_steps(
    const Product& of, const char* left, const char* right, __m256i (&tile)[kRows][2]) {
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
}

template <int kRows>
TORCH_ODT_TARGET void multiply_tile(const Product& of, const char* left, const char* right, int32_t* sums) {
  __m256i tile[kRows][2];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const auto* const from = (const __m256i*)(sums + row * of.sums_stride);
    tile[row][0] = of.accumulate ? _mm256_loadu_si256(from) : _mm256_setzero_si256();
    tile[row][1] = of.accumulate ? _mm256_loadu_si256(from + 1) : _mm256_setzero_si256();
  }
  add_steps<kRows>(of, left, right, tile);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    auto* const to = (__m256i*)(sums + row * of.sums_stride);
    _mm256_storeu_si256(to, tile[row][0]);
    _mm256_storeu_si256(to + 1, tile[row][1]);
  }
}

// Six rows at a time; the last ones in tiles that compute as few others as there can be.
void multiply(const Product& of) {
  for (int64_t panel = 0; panel < of.panels; ++panel) {
    const char* const right = static_cast<const char*>(of.right) + panel * of.panel_bytes;
    int64_t rows = 0;
    for (int64_t row = 0; row < of.rows; row += rows) {
      const int64_t rest = of.rows - row;
      const char* const left = static_cast<const char*>(of.left) + row * of.left_row_bytes;
      int32_t* const sums = of.sums + row * of.sums_stride + panel * kPanelColumns;
      if (rest <= 2) {
        rows = 2;
        multiply_tile<2>(of, left, right, sums);
      } else if (rest <= 4 || rest == 7 || rest == 8) {
        rows = 4;
        multiply_tile<4>(of, left, right, sums);
      } else {
        rows = 6;
        multiply_tile<6>(of, left, right, sums);
      }
    }
  }
}

// Some rows of a panel of the product.
template <int kRows>
TORCH_ODT_TARGET_INLINE void tile_to_floats(
    const Product& of, const Floats& to, int64_t row, int64_t panel, __m256& largest) {
  constexpr int64_t kLanes = 8;
  // There are no terms of columns, because the left operand has no offset; those of rows are where sums begin.
  __m256i tile[kRows][2];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    const int64_t last = of.rows - 1 < row + i ? of.rows - 1 : row + i;
    tile[i][0] = tile[i][1] = _mm256_set1_epi32(to.row_terms[last]);
  }
  add_steps<kRows>(
      of,
      static_cast<const char*>(of.left) + row * of.left_row_bytes,
      static_cast<const char*>(of.right) + panel * of.panel_bytes,
      tile);
  const int64_t column = panel * kPanelColumns;
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    if (row + i >= of.rows) {
      return;
    }
    float* const output = to.output + (row + i) * to.stride + column;
    const __m256 multiplier =
        _mm256_set1_ps(to.row_multipliers == nullptr ? to.multiplier : to.row_multipliers[row + i]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t first = column + half * kLanes;
      __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(tile[i][half]), multiplier);
      if (first + kLanes <= to.columns) {
        _mm256_storeu_ps(output + half * kLanes, values);
      } else {
        const __m256i some = inside(to.columns - first);
        values = _mm256_and_ps(values, _mm256_castsi256_ps(some));
        _mm256_maskstore_ps(output + half * kLanes, some, values);
      }
      largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0F), values));
    }
  }
}

TORCH_ODT_TARGET float multiply_to_floats(const Product& of, const Floats& to) {
  constexpr int kRows = 4;
  __m256 largest = _mm256_setzero_ps();
  for (int64_t row = 0; row < of.rows; row += kRows) {
    for (int64_t panel = 0; panel < of.panels; ++panel) {
      tile_to_floats<kRows>(of, to, row, panel, largest);
    }
  }
  return largest_of(largest);
}

} // namespace

const Table& avx2_table() {
  static constexpr Table result = {
      .name = "avx2",
      .value_bytes = 2,
      .depth_multiple = 2,
      .left_offset = 0,
      .left_by_rows = false,
      .pack_left_rows = pack_left_rows,
      .pack_left_columns = interleave,
      .pack_right = interleave,
      .multiply = multiply,
      .multiply_to_floats = multiply_to_floats,
  };
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
