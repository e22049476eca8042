// Products cut into tiles of one panel.
#pragma once

#include "table.h"

namespace torch_odt::kernels::int8 {

// Calls tile(product, left, right, sums) for every kRows rows of every panel.
template <int kRows, auto tile>
TORCH_ODT_INLINE void multiply_in_tiles(const Product& of) {
  for (int64_t panel = 0; panel < of.panels; ++panel) {
    const char* const right = static_cast<const char*>(of.right) + panel * of.panel_bytes;
    for (int64_t row = 0; row < of.rows; row += kRows) {
      const char* const left = static_cast<const char*>(of.left) + row * of.left_row_bytes;
      tile(of, left, right, of.sums + row * of.sums_stride + panel * kPanelColumns);
    }
  }
}

} // namespace torch_odt::kernels::int8
