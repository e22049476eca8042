// AVX2 with VNNI: vpdpbusd multiplies unsigned bytes, the left operand's, by signed ones.
#if defined(__x86_64__) && defined(__GNUC__)

#include "interleave.h"
#include "intrinsics_x86.h"
#include "short_rows.h"
#include "table.h"
#include "tiles.h"

#define TORCH_ODT_TARGET [[gnu::target("avx2,avxvnni")]]

namespace torch_odt::kernels::int8 {

namespace {

constexpr int8_t kFlip = -128;
constexpr int kRows = 6;

TORCH_ODT_TARGET void pack_left_rows(const LeftRows& all) {
  const LeftRows of = rows_from(all, copy_short_rows(all, kFlip));
  const __m256i flip = _mm256_set1_epi8(kFlip);
  for (int64_t row = 0; row < of.rows; ++row) {
    const int8_t* const values = of.from + row * of.from_stride;
    char* const bytes = static_cast<char*>(of.to) + row * of.to_stride;
    int64_t i = 0;
    for (; i + 32 <= of.count; i += 32) {
      const __m256i some = _mm256_loadu_si256((const __m256i*)(values + i));
      _mm256_storeu_si256((__m256i*)(bytes + i), _mm256_xor_si256(some, flip));
    }
    for (; i < of.count; ++i) {
      bytes[i] = static_cast<char>(values[i] ^ kFlip);
    }
  }
}

TORCH_ODT_TARGET void pack_left_columns(const Interleaving& of) {
  interleave_bytes(of, kFlip);
}

TORCH_ODT_TARGET void pack_right(const Interleaving& of) {
  interleave_bytes(of, 0);
}

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
      tile[row][0] = _mm256_dpbusd_avx_epi32(tile[row][0], everywhere, low);
      tile[row][1] = _mm256_dpbusd_avx_epi32(tile[row][1], everywhere, high);
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

TORCH_ODT_TARGET void add_column_sums(const void* panel, int64_t steps, int32_t* sums) {
  const auto* const bytes = static_cast<const char*>(panel);
  const __m256i ones = _mm256_set1_epi8(1);
  auto* const to = (__m256i*)sums;
  __m256i low = _mm256_loadu_si256(to);
  __m256i high = _mm256_loadu_si256(to + 1);
  for (int64_t step = 0; step < steps; ++step) {
    const auto* const some = (const __m256i*)(bytes + step * kPanelStepBytes);
    low = _mm256_dpbusd_avx_epi32(low, ones, _mm256_loadu_si256(some));
    high = _mm256_dpbusd_avx_epi32(high, ones, _mm256_loadu_si256(some + 1));
  }
  _mm256_storeu_si256(to, low);
  _mm256_storeu_si256(to + 1, high);
}

} // namespace

const Table& avx_vnni_table() {
  static constexpr Table result = {
      .name = "avx_vnni",
      .value_bytes = 1,
      .depth_multiple = 4,
      .left_offset = 128,
      .left_by_rows = false,
      .pack_left_rows = pack_left_rows,
      .pack_left_columns = pack_left_columns,
      .pack_right = pack_right,
      .multiply = multiply,
      .add_column_sums = add_column_sums,
  };
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
