// NEON with matrix products: smmla multiplies two rows of eight bytes by two columns.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "interleave.h"
#include "short_rows.h"
#include "table.h"
#include "tiles.h"

#define TORCH_ODT_TARGET [[gnu::target("arch=armv8.2-a+dotprod+i8mm")]]

namespace torch_odt::kernels::int8 {

namespace {

constexpr int kRowPairs = 2;
constexpr int kColumnPairs = 8; // in a panel

void pack_left_rows(const LeftRows& of) {
  copy_rows(rows_from(of, copy_short_rows(of, 0)));
}

void interleave(const Interleaving& of) {
  interleave_bytes(of, 0);
}

// Two steps of two rows, row by row.
TORCH_ODT_TARGET int8x16_t two_rows(const Product& of, const char* left) {
  int32_t steps[4];
  __builtin_memcpy(steps, left, 4);
  __builtin_memcpy(steps + 1, left + of.left_step_bytes, 4);
  __builtin_memcpy(steps + 2, left + of.left_row_bytes, 4);
  __builtin_memcpy(steps + 3, left + of.left_row_bytes + of.left_step_bytes, 4);
  return vreinterpretq_s8_s32(vld1q_s32(steps));
}

TORCH_ODT_TARGET void multiply_tile(const Product& of, const char* left, const char* right, int32_t* sums) {
  int32x4_t tile[kRowPairs][kColumnPairs];
#pragma GCC unroll 2
  for (int row = 0; row < kRowPairs; ++row) {
#pragma GCC unroll 8
    for (int column = 0; column < kColumnPairs; ++column) {
      tile[row][column] = vdupq_n_s32(0);
    }
  }
  for (int64_t step = 0; step < of.steps; step += 2) {
    int8x16_t rows[kRowPairs];
#pragma GCC unroll 2
    for (int row = 0; row < kRowPairs; ++row) {
      rows[row] = two_rows(of, left + 2 * row * of.left_row_bytes);
    }
#pragma GCC unroll 4
    for (int four = 0; four < kColumnPairs / 2; ++four) {
      const auto* const from = reinterpret_cast<const int32_t*>(right) + 4 * four;
      const int32x4_t first = vld1q_s32(from);
      const int32x4_t second = vld1q_s32(from + kPanelColumns);
      const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(first, second));
#pragma GCC unroll 2
      for (int row = 0; row < kRowPairs; ++row) {
        tile[row][2 * four] = vmmlaq_s32(tile[row][2 * four], rows[row], low);
        tile[row][2 * four + 1] = vmmlaq_s32(tile[row][2 * four + 1], rows[row], high);
      }
    }
    left += 2 * of.left_step_bytes;
    right += 2 * kPanelStepBytes;
  }
#pragma GCC unroll 2
  for (int row = 0; row < kRowPairs; ++row) {
#pragma GCC unroll 4
    for (int column = 0; column < kColumnPairs; column += 2) {
      int32_t* const to = sums + 2 * row * of.sums_stride + 2 * column;
      const int32x4_t first = tile[row][column];
      const int32x4_t second = tile[row][column + 1];
      const int32x4_t upper = vcombine_s32(vget_low_s32(first), vget_low_s32(second));
      const int32x4_t lower = vcombine_s32(vget_high_s32(first), vget_high_s32(second));
      vst1q_s32(to, of.accumulate ? vaddq_s32(upper, vld1q_s32(to)) : upper);
      int32_t* const below = to + of.sums_stride;
      vst1q_s32(below, of.accumulate ? vaddq_s32(lower, vld1q_s32(below)) : lower);
    }
  }
}

void multiply(const Product& of) {
  multiply_in_tiles<2 * kRowPairs, multiply_tile>(of);
}

} // namespace

const Table& neon_i8mm_table() {
  static constexpr Table result = {
      .name = "neon_i8mm",
      .value_bytes = 1,
      .depth_multiple = 8,
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
