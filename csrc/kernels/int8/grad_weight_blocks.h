// How the gradient of a weight is cut into blocks, and a thread's memory for one of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv2d.h"
#include "gather.h"
#include "memory.h"

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kMostGradientRows = 256;
inline constexpr int64_t kMostGradientColumns = 512;
// Where there are few pixels, writing the gradient is most of the work: sums have to stay in the first cache.
inline constexpr int64_t kFewGradientPixels = 128;

// How the gradient of a group's weight, out_depth rows of taps x in_depth columns, is cut into blocks, and the pixels,
// over which is summed, into chunks. Threads share the blocks; or, where the sums of all fit into one, the pixels,
// because threads that share rows pack the same columns, each for itself.
struct GradientCut {
  static constexpr int64_t kWideColumns = 256; // of sums in 64 bits
  static constexpr int64_t kFewRows = 64;
  static constexpr int64_t kFewColumns = 512;
  static constexpr int64_t kMostPixels = 2048;
  static constexpr int64_t kPackedBytes = 393216;
  static constexpr int64_t kLongestSide = 1024; // of the one block, whatever its other side
  static constexpr int64_t kLeastPixels = 1024; // of a thread, so that adding sums up does not show
  static constexpr int64_t kManyBlocks = 8; // for each thread, of which one more or less does not show

  const Table* kernels;
  int64_t block_rows;
  int64_t block_panels;
  int64_t row_blocks;
  int64_t column_blocks;
  int64_t chunk_pixels;
  int64_t pixel_parts; // 1, where threads share blocks
  bool by_taps; // panels hold channels of one tap
  bool wide; // more pixels than int32 can sum over

  GradientCut(const Conv2d& conv, const Threads& threads) : kernels(&table_for_depth(conv.out_pixels())) {
    const int64_t rows = conv.out_depth();
    const int64_t panels = divided(conv.taps() * conv.in_depth(), kPanelColumns);
    by_taps = conv.taps() == 1 || conv.in_depth() % kPanelColumns == 0;
    wide = conv.out_pixels() > kMostDepth;
    const bool few = conv.out_pixels() <= kFewGradientPixels;
    row_blocks = divided(rows, few ? kFewRows : kMostGradientRows);
    column_blocks = divided(panels, (few ? kFewColumns : wide ? kWideColumns : kMostGradientColumns) / kPanelColumns);
    const int64_t wanted = divided(threads.count, conv.groups);
    const int64_t columns = panels * kPanelColumns;
    const int64_t most_sums = kMostGradientRows * (wide ? kWideColumns : kMostGradientColumns);
    const bool one_block = conv.groups == 1 && rows * columns <= most_sums && std::max(rows, columns) <= kLongestSide;
    pixel_parts = one_block && conv.out_pixels() >= kLeastPixels * threads.count ? threads.count : 1;
    if (pixel_parts > 1) {
      row_blocks = 1;
      column_blocks = 1;
    } else if (row_blocks * column_blocks < kManyBlocks * wanted) {
      // What is cut into more blocks is packed once, the other operand once for each of them.
      if (row_blocks > 1 || rows > columns) {
        row_blocks = std::min(divided(rows, kSlackRows), divided(row_blocks, wanted) * wanted);
      } else {
        column_blocks = std::min(panels, divided(column_blocks, wanted) * wanted);
      }
      if (row_blocks * column_blocks < wanted) {
        column_blocks = std::min(panels, divided(wanted, row_blocks));
        row_blocks = std::max(row_blocks, std::min(divided(rows, kSlackRows), divided(wanted, column_blocks)));
      }
    }
    block_rows = divided(divided(rows, row_blocks), kPanelColumns) * kPanelColumns;
    row_blocks = divided(rows, block_rows);
    block_panels = divided(panels, column_blocks);
    column_blocks = divided(panels, block_panels);
    const int64_t packed_values = block_rows + kSlackRows + block_panels * kPanelColumns;
    const int64_t gathered_values = by_taps ? 0 : gathered_row_bytes();
    const int64_t pixel_bytes = packed_values * kernels->value_bytes + gathered_values;
    const int64_t fitting = kPackedBytes / pixel_bytes / kAlignment * kAlignment;
    const int64_t line = kAlignment / kernels->value_bytes; // pixels, of a whole line of memory
    const int64_t all = divided(conv.out_pixels(), line) * line;
    chunk_pixels = std::min(std::clamp(fitting, kAlignment, kMostPixels), std::max(all, line));
  }

  // Of a thread that shares pixels.
  int64_t part_pixels(int64_t pixels) const {
    return divided(divided(pixels, pixel_parts), kAlignment) * kAlignment;
  }
  int64_t block_columns() const {
    return block_panels * kPanelColumns;
  }
  // The columns for one output, and what copies overwrite behind them.
  int64_t gathered_row_bytes() const {
    return block_columns() + divided(kSlackValues, kPanelColumns) * kPanelColumns;
  }
  // Of the left operand: its rows side by side in each step, or each row on its own.
  int64_t left_step_bytes() const {
    return kernels->left_by_rows ? kStepBytes : (block_rows + kSlackRows) * kStepBytes;
  }
  int64_t left_row_bytes() const {
    return kernels->left_by_rows ? chunk_pixels * kernels->value_bytes + kAlignment : kStepBytes;
  }
  int64_t left_bytes() const {
    return aligned((block_rows + kSlackRows) * (chunk_pixels * kernels->value_bytes + kAlignment));
  }
  int64_t panel_bytes() const {
    return kernels->steps(chunk_pixels) * kPanelStepBytes;
  }
};

// A thread's own memory.
struct GradientWorkspace {
  Pieces pieces;
  int32_t* sums;
  int64_t* wide_sums;
  int32_t* column_sums;
  int32_t* row_sums; // of the output's gradient
  int64_t* wide_row_sums;
  int8_t* zeros;
  int8_t* padding; // what lies around the image
  int8_t* gathered;
  const int8_t** left_rows;
  const int8_t** right_rows;
  char* left;
  char* right;

  GradientWorkspace(const GradientCut& cut, void* at) : pieces(at) {
    const int64_t sums_count = (cut.block_rows + kSlackRows) * cut.block_columns();
    sums = pieces.take<int32_t>(sums_count);
    wide_sums = pieces.take<int64_t>(cut.wide ? sums_count : 0);
    column_sums = pieces.take<int32_t>(cut.block_columns());
    row_sums = pieces.take<int32_t>(cut.block_rows);
    wide_row_sums = pieces.take<int64_t>(cut.block_rows);
    zeros = pieces.take<int8_t>(std::max(cut.block_rows, cut.block_columns()) + kAlignment);
    padding = pieces.take<int8_t>(cut.block_columns() + kAlignment);
    gathered = pieces.take<int8_t>(cut.by_taps ? 0 : cut.chunk_pixels * cut.gathered_row_bytes() + kAlignment);
    left_rows = pieces.take<const int8_t*>(cut.chunk_pixels);
    right_rows = pieces.take<const int8_t*>(cut.chunk_pixels);
    left = pieces.take<char>(cut.left_bytes());
    right = pieces.take<char>(cut.block_panels * cut.panel_bytes());
  }
};

} // namespace torch_odt::kernels::int8
