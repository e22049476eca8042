// What products of int8 matrices touch, and how little memory passes of small layers take.

#include <algorithm>
#include <vector>

#include "../../kernels/int8/conv2d.h"
#include "../../kernels/int8/table.h"
#include "int8_samples.h"

namespace torch_odt::tests {
namespace {

using kernels::int8::Pass;

// Memory ends where a product may read and write no further, which sanitizers tell of the left operand.
TEST(int8_products_touch_no_more_rows_than_a_tile) {
  using kernels::int8::kPanelColumns;
  using kernels::int8::kTileRows;
  for (const int64_t depth : {8, 64, 200}) {
    const kernels::int8::Table& table = kernels::int8::table_for_depth(depth);
    const kernels::int8::Multiplying multiplying(table);
    const int64_t row_bytes = table.steps(depth) * kernels::int8::kStepBytes;
    const int64_t panel_bytes = table.steps(depth) * kernels::int8::kPanelStepBytes;
    for (int64_t rows = 1; rows <= 2 * kTileRows + 1; ++rows) {
      for (int64_t panels = 1; panels <= 5; ++panels) {
        const std::vector<char> left(static_cast<size_t>((rows + kTileRows - 1) * row_bytes));
        const std::vector<char> right(static_cast<size_t>(panels * panel_bytes));
        constexpr int32_t kUntouched = 77;
        const int64_t columns = panels * kPanelColumns;
        std::vector<int32_t> sums(static_cast<size_t>((rows + 3 * kTileRows) * columns), kUntouched);
        table.multiply(
            {left.data(), row_bytes, kernels::int8::kStepBytes, rows, right.data(), panel_bytes, panels,
             table.steps(depth), sums.data(), columns, false});
        const auto written = sums.begin() + rows * columns;
        CHECK(std::all_of(sums.begin(), written, [](int32_t sum) { return sum == 0; }));
        CHECK(std::all_of(
            written + (kTileRows - 1) * columns, sums.end(), [](int32_t sum) { return sum == kUntouched; }));
      }
    }
  }
}

TEST(int8_layers_of_few_rows_take_little) {
  using kernels::int8::workspace_bytes;
  const auto layer = [](int64_t size, int64_t in, int64_t out) { return Conv2d{1, axis(size, 1), axis(size, 1), in, out, 1}; };
  for (const Pass pass : {Pass::forward, Pass::grad_input}) {
    CHECK(workspace_bytes(layer(1, 16, 16), pass) <= 8192);
    CHECK(packing_workspace_bytes(layer(1, 16, 16), pass) <= 10240);
    CHECK(workspace_bytes(layer(8, 32, 192), pass) < workspace_bytes(layer(16, 32, 192), pass));
    // Of a weight of 140 KiB.
    CHECK(packing_workspace_bytes(layer(4, 112, 1280), pass) <= 131072);
  }
}

} // namespace
} // namespace torch_odt::tests
