// How the lines of a depthwise pass are shared out among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "conv2d.h"
#include "memory.h"

namespace torch_odt::kernels::int8 {

// Channels at a time, so that they and the rows that they come from stay in caches near the processor; and sums, where
// nothing else needs the first one.
inline constexpr int64_t kChannelsAtOnce = 192;
inline constexpr int64_t kCachedSums = 8192;

// Some lines of a sample, and some panels of channels.
struct LineRange {
  int64_t sample;
  int64_t begin;
  int64_t end;
  int64_t first_panel;
  int64_t last_panel;
};

// Calls function(thread, lines) for all lines that there are, and returns the largest of what comes back.
template <typename Function>
float share_lines(
    const Conv2d& conv,
    int64_t target_pixels,
    int64_t lines,
    const Finish& how,
    const Threads& threads,
    const Function& function) {
  constexpr int64_t kAtOnce = 8; // a multiple of eight, so that threads share no byte of a mask
  // Where samples begin within a byte, they are taken eight at a time.
  const bool masked = how.mask != nullptr;
  const bool whole = masked && target_pixels * conv.in_channels % 8 != 0;
  const int64_t samples_at_once = whole ? 8 : 1;
  const int64_t lines_at_once = whole ? std::max<int64_t>(1, lines) : kAtOnce;
  const int64_t chunks = divided(lines, lines_at_once);
  // Few rows are shared out by channels, if masks allow it.
  const int64_t items = divided(conv.batch, samples_at_once) * chunks;
  const int64_t panels = divided(conv.in_channels, kPanelColumns);
  const bool by_channels = items < threads.count && (!masked || conv.in_channels % 8 == 0);
  const int64_t cuts = by_channels ? std::min(panels, threads.count) : 1;
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  threads.share(items * cuts, [&](int64_t thread, int64_t begin, int64_t end) {
    float& most = largest[static_cast<size_t>(thread)];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t cut = item % cuts;
      const int64_t first = item / cuts / chunks * samples_at_once;
      const int64_t line = item / cuts % chunks * lines_at_once;
      const int64_t last = std::min(lines, line + lines_at_once);
      for (int64_t sample = first; sample < std::min(conv.batch, first + samples_at_once); ++sample) {
        most = std::max(
            most, function(thread, LineRange{sample, line, last, panels * cut / cuts, panels * (cut + 1) / cuts}));
      }
    }
  });
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
