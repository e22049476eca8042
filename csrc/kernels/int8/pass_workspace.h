// The memory of a thread in a pass: as much as the rows and columns of the product have use for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "correlation.h"
#include "memory.h"
#include "padded.h"
#include "panel_sums.h"

namespace torch_odt::kernels::int8 {

// What a block takes at most: how many rows there are, and how many panels of packed weights or of sums at a time.
struct Extent {
  int64_t rows;
  int64_t panels;
  int64_t sums;
  // A few rows are finished after the other, see Table::sums_at_once: not of rows that overlap, whose depth is never
  // small, nor of a depth in chunks.
  bool in_turn;

  Extent(const Conv2d& conv, const Correlation& part, bool padded, bool packs)
      : rows(padded ? kMostRows : std::min(part.block_rows(), conv.batch * part.rows.outputs * part.columns.outputs)),
        in_turn(part.kernels().sums_at_once > 0 && part.chunk() >= part.depth() && !padded) {
    const int64_t at_once = part.kernels().sums_at_once;
    panels = std::min(part.panels(), (in_turn ? at_once / kSlackRows : kCachedColumns) / kPanelColumns);
    if (packs) {
      panels = std::min(panels, packed_panels(part));
    }
    const int64_t all = rows * panels * kPanelColumns;
    sums = (in_turn ? std::min(all, at_once) : all) + kTileRows * panels * kPanelColumns;
  }

 private:
  // How many are packed on the way at a time: a few of small weights, with sums that are small, too; of large weights a
  // quarter, and as many as whole lines of memory hold columns of, since lines are not in a cache any more when they are
  // read again. With an eighth, a linear layer of 1280 x 1000 took a quarter longer; with these, layers as long as with
  // as many as there is room for.
  int64_t packed_panels(const Correlation& part) const {
    constexpr int64_t kFewBytes = 49152;
    constexpr int64_t kManyBytes = 1 << 19;
    constexpr int64_t kShare = 4;
    constexpr int64_t kSums = 8192;
    constexpr int64_t kPanelsOfLine = 4;
    const int64_t panel_bytes = std::max<int64_t>(part.panel_bytes(), 1);
    const int64_t weights = std::clamp(part.panels() * panel_bytes / kShare, kFewBytes, kManyBytes) / panel_bytes;
    const int64_t fitting = std::min(weights, kSums / kPanelColumns / std::max<int64_t>(rows, 1));
    return fitting > kPanelsOfLine ? fitting / kPanelsOfLine * kPanelsOfLine : std::max<int64_t>(fitting, 1);
  }
};

// A thread's own memory.
struct PassWorkspace {
  Pieces pieces;
  int32_t* sums;
  int64_t* wide_sums;
  char* left;
  char* packed; // some panels
  int32_t* packed_sums;

  PassWorkspace(const Conv2d& conv, const Correlation& part, bool packs, void* at) : pieces(at) {
    // Whether it is turns out with the pass; blocks of padded rows are the larger ones in every respect.
    const bool may_be_padded = !packs && goes_padded(part.kernels(), part.rows, part.columns, part.source_depth);
    const Extent most(conv, part, may_be_padded, packs);
    sums = pieces.take<int32_t>(most.sums);
    wide_sums = pieces.take<int64_t>(part.wide() ? most.sums : 0);
    left = pieces.take<char>(may_be_padded ? part.most_copy_bytes() : part.left_bytes(most.rows));
    packed = pieces.take<char>(packs ? most.panels * part.panel_bytes() : 0);
    packed_sums = pieces.take<int32_t>(packs ? kCachedColumns : 0);
  }
};

} // namespace torch_odt::kernels::int8
