// NEON with dot products: sdot adds four products of signed bytes.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "interleave.h"
#include "short_rows.h"
#include "table.h"
#include "tiles.h"

// Spelled out with the architecture: GCC does not inline the intrinsics into a function that only adds the extension.
#define TORCH_ODT_TARGET [[gnu::target("arch=armv8.2-a+dotprod")]]

namespace torch_odt::kernels::int8 {

namespace {

constexpr int kRows = 6;
constexpr int kFours = 4; // of columns in a panel

void pack_left_rows(const LeftRows& of) {
  copy_rows(rows_from(of, copy_short_rows(of, 0)));
}

void interleave(const Interleaving& of) {
  interleave_bytes(of, 0);
}

TORCH_ODT_TARGET void multiply_tile(const Product& of, const char* left, const char* right, int32_t* sums) {
  int32x4_t tile[kRows][kFours];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int four = 0; four < kFours; ++four) {
      tile[row][four] = of.accumulate ? vld1q_s32(sums + row * of.sums_stride + 4 * four) : vdupq_n_s32(0);
    }
  }
  for (int64_t step = 0; step < of.steps; ++step) {
    int8x16_t columns[kFours];
#pragma GCC unroll 4
    for (int four = 0; four < kFours; ++four) {
      columns[four] = vld1q_s8(reinterpret_cast<const int8_t*>(right) + 16 * four);
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      int32_t values;
      __builtin_memcpy(&values, left + row * of.left_row_bytes, sizeof(values));
      const int8x16_t everywhere = vreinterpretq_s8_s32(vdupq_n_s32(values));
#pragma GCC unroll 4
      for (int four = 0; four < kFours; ++four) {
        tile[row][four] = vdotq_s32(tile[row][four], columns[four], everywhere);
      }
    }
    left += of.left_step_bytes;
    right += kPanelStepBytes;
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int four = 0; four < kFours; ++four) {
      vst1q_s32(sums + row * of.sums_stride + 4 * four, tile[row][four]);
    }
  }
}

void multiply(const Product& of) {
  multiply_in_tiles<kRows, multiply_tile>(of);
}

} // namespace

const Table& neon_dotprod_table() {
  static constexpr Table result = {
      .name = "neon_dotprod",
      .value_bytes = 1,
      .depth_multiple = 4,
      .left_offset = 0,
      .left_by_rows = false,
      .pack_left_rows = pack_left_rows,
      .pack_left_columns = interleave,
      .pack_right = interleave,
      .multiply = multiply,
  };
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
