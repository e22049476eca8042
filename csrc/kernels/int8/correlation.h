// A pass as products of matrices, see table.h: what its weights, its packing and its loops have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv2d.h"
#include "memory.h"
#include "taps.h"

namespace torch_odt::kernels::int8 {

// One product: all outputs of a phase, for one group after the other.
struct Correlation {
  Taps rows;
  Taps columns;
  int64_t source_depth;
  int64_t target_depth;

  int64_t depth() const {
    return rows.count * columns.count * source_depth;
  }
  const Table& kernels() const {
    return table_for_depth(depth());
  }
  int64_t steps() const {
    return kernels().steps(depth());
  }
  int64_t panels() const {
    return (target_depth + kPanelColumns - 1) / kPanelColumns;
  }
  int64_t panel_bytes() const {
    return steps() * kPanelStepBytes;
  }
  // Panels, and behind them the sum of each column, for the offsets of the left operand.
  int64_t group_bytes() const {
    return aligned(panels() * (panel_bytes() + kPanelColumns * 4));
  }
  // More terms than int32 can sum over.
  bool wide() const {
    return depth() > kMostDepth;
  }
  // How much of the depth is multiplied at a time: all of it, or a multiple of every table's depth_multiple.
  int64_t chunk() const {
    return std::min(kernels().padded(depth()), kMostRowBytes / kernels().value_bytes);
  }
  // Of a packed row, and of what copies overwrite behind it. Rows a power of two apart would fall on the same lines of
  // a cache: they are an odd number of lines apart.
  int64_t left_row_bytes() const {
    const int64_t lines = divided(kernels().steps(chunk()) * kStepBytes + kSlackValues * kernels().value_bytes, kAlignment);
    return (lines / 2 * 2 + 1) * kAlignment;
  }
  // Rows at a time: what is gathered has to stay in a cache near the processor. A multiple of eight, so that bits of
  // masks are written by one thread a byte.
  int64_t block_rows() const {
    return std::clamp<int64_t>(kLeftBytes / left_row_bytes() / kTileRows * kTileRows, kSlackRows, kMostRows);
  }
  // Of packed rows, with those that a tile reads behind the last one.
  int64_t left_bytes(int64_t most_rows) const {
    return aligned((std::min(most_rows, block_rows()) + kTileRows) * left_row_bytes());
  }
  // Of a padded copy in their place, see padded.h: as much as is worth it.
  int64_t most_copy_bytes() const {
    return aligned((block_rows() + kSlackRows) * left_row_bytes());
  }

  static constexpr int64_t kMostRows = 112; // whole tiles of most tables; pixels of common images are a multiple
  static constexpr int64_t kLeftBytes = 131072;
  static constexpr int64_t kMostRowBytes = 16384; // beside which some packed weights have room in the workspace
};

inline Correlation correlation_of(const Conv2d& conv, Pass pass, int64_t phase) {
  if (pass == Pass::forward) {
    return {forward_taps(conv.rows), forward_taps(conv.columns), conv.in_depth(), conv.out_depth()};
  }
  const int64_t stride = conv.columns.stride;
  return {
      gradient_taps(conv.rows, phase / stride),
      gradient_taps(conv.columns, phase % stride),
      conv.out_depth(),
      conv.in_depth()};
}

} // namespace torch_odt::kernels::int8
