// NEON, as every 64-bit Arm has it: smull's products of bytes fit into 16 bits one by one, and are added in pairs.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "interleave.h"
#include "short_rows.h"
#include "table.h"
#include "tiles.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int kRows = 2;
constexpr int kPairs = 8; // of columns in a panel

void pack_left_rows(const LeftRows& of) {
  copy_rows(rows_from(of, copy_short_rows(of, 0)));
}

void interleave(const Interleaving& of) {
  interleave_bytes(of, 0);
}

void multiply_tile(const Product& of, const char* left, const char* right, int32_t* sums) {
  // Each holds two halves of the sums of two columns.
  int32x4_t tile[kRows][kPairs];
  for (auto& row : tile) {
    for (int32x4_t& pair : row) {
      pair = vdupq_n_s32(0);
    }
  }
  for (int64_t step = 0; step < of.steps; ++step) {
    int8x8_t values[kRows];
    for (int row = 0; row < kRows; ++row) {
      int32_t four;
      __builtin_memcpy(&four, left + row * of.left_row_bytes, sizeof(four));
      values[row] = vreinterpret_s8_s32(vdup_n_s32(four));
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      const int8x8_t columns = vld1_s8(reinterpret_cast<const int8_t*>(right) + 8 * pair);
      for (int row = 0; row < kRows; ++row) {
        tile[row][pair] = vpadalq_s16(tile[row][pair], vmull_s8(columns, values[row]));
      }
    }
    left += of.left_step_bytes;
    right += kPanelStepBytes;
  }
  for (int row = 0; row < kRows; ++row) {
    for (int pair = 0; pair < kPairs; pair += 2) {
      int32_t* const to = sums + row * of.sums_stride + 2 * pair;
      const int32x4_t four = vpaddq_s32(tile[row][pair], tile[row][pair + 1]);
      vst1q_s32(to, of.accumulate ? vaddq_s32(four, vld1q_s32(to)) : four);
    }
  }
}

void multiply(const Product& of) {
  multiply_in_tiles<kRows, multiply_tile>(of);
}

} // namespace

const Table& neon_table() {
  static constexpr Table result = {
      .name = "neon",
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
