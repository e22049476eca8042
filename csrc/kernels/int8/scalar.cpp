// Plain C++ for any processor, and what the others are compared with.
#include "interleave.h"
#include "short_rows.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

namespace {

void pack_left_rows(const LeftRows& of) {
  copy_rows(rows_from(of, copy_short_rows(of, 0)));
}

void interleave(const Interleaving& of) {
  interleave_bytes(of, 0);
}

void multiply(const Product& of) {
  for (int64_t row = 0; row < of.rows; ++row) {
    for (int64_t panel = 0; panel < of.panels; ++panel) {
      uint32_t sums[kPanelColumns] = {};
      const auto* left = static_cast<const int8_t*>(of.left) + row * of.left_row_bytes;
      const auto* right = static_cast<const int8_t*>(of.right) + panel * of.panel_bytes;
      for (int64_t step = 0; step < of.steps; ++step, left += of.left_step_bytes, right += kPanelStepBytes) {
        for (int64_t column = 0; column < kPanelColumns; ++column) {
          int32_t sum = 0;
          for (int64_t i = 0; i < kStepBytes; ++i) {
            sum += int32_t{left[i]} * right[column * kStepBytes + i];
          }
          sums[column] += static_cast<uint32_t>(sum);
        }
      }
      int32_t* const to = of.sums + row * of.sums_stride + panel * kPanelColumns;
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        const uint32_t before = of.accumulate ? static_cast<uint32_t>(to[column]) : 0;
        to[column] = static_cast<int32_t>(before + sums[column]);
      }
    }
  }
}

} // namespace

const Table& scalar_table() {
  static constexpr Table result = {
      .name = "scalar",
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
