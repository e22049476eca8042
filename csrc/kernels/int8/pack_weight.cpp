#include <algorithm>
#include <array>
#include <cstring>

#include "depthwise.h"
#include "pack_weight.h"
#include "patches.h"
#include "shuffle.h"
#include "sums.h"

namespace torch_odt::kernels::int8 {

// The rows of the right operand for the input's gradient lie in memory as rows of weights.
void pack_gradient_panels(
    const Conv2d& conv,
    const Correlation& part,
    const int8_t* weight,
    int64_t group,
    int64_t first_column,
    int64_t columns,
    char* panels,
    int32_t* sums) {
  static constexpr int8_t kZeros[kMostPanelsAtOnce * kPanelColumns] = {};
  constexpr int64_t kRowsAtOnce = 4096; // a multiple of every table's depth_multiple
  std::array<const int8_t*, kRowsAtOnce> rows;
  // Where a tap's first row lies, and how far apart its others are.
  const auto tap_of = [&](int64_t tap) {
    const int64_t element =
        part.rows.element(tap / part.columns.count) * conv.columns.kernel + part.columns.element(tap % part.columns.count);
    return weight + (group * part.source_depth * conv.taps() + element) * part.target_depth + first_column;
  };
  const int64_t stride = conv.taps() * part.target_depth;
  for (int64_t first = 0; first < part.depth(); first += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, part.depth() - first);
    for (int64_t i = 0; i < count;) {
      const int64_t channel = (first + i) % part.source_depth;
      const int64_t channels = std::min(part.source_depth - channel, count - i);
      const int8_t* from = tap_of((first + i) / part.source_depth) + channel * stride;
      for (const int64_t last = i + channels; i < last; ++i, from += stride) {
        rows[static_cast<size_t>(i)] = from;
      }
    }
    std::fill(rows.begin() + count, rows.begin() + part.kernels().padded(count), kZeros);
    const int64_t steps = part.kernels().steps(count);
    char* const to = panels + part.kernels().steps(first) * kPanelStepBytes;
    const bool adds = part.kernels().adds_columns;
    part.kernels().pack_right({rows.data(), steps, columns, to, part.panel_bytes(), kPanelStepBytes, adds ? sums : nullptr});
    const bool sums_left = part.kernels().add_column_sums != nullptr && !adds;
    for (int64_t panel = 0; sums_left && panel * kPanelColumns < columns; ++panel) {
      part.kernels().add_column_sums(to + panel * part.panel_bytes(), steps, sums + panel * kPanelColumns);
    }
  }
}

namespace {

typedef int32_t Words4 __attribute__((vector_size(16)));

// Of four columns, 16 bytes each: four steps of a panel. Steps follow each other as they do in memory, so that a panel
// larger than the first cache is written once, from its beginning to its end.
TORCH_ODT_INLINE void pack_steps(const int8_t* values, int64_t depth, char* to) {
  Words4 columns[4];
  for (int i = 0; i < 4; ++i) {
    __builtin_memcpy(&columns[i], values + i * depth, sizeof(Words4));
  }
  const Words4 low01 = TORCH_ODT_SHUFFLE(Words4, columns[0], columns[1], 0, 4, 1, 5);
  const Words4 low23 = TORCH_ODT_SHUFFLE(Words4, columns[2], columns[3], 0, 4, 1, 5);
  const Words4 high01 = TORCH_ODT_SHUFFLE(Words4, columns[0], columns[1], 2, 6, 3, 7);
  const Words4 high23 = TORCH_ODT_SHUFFLE(Words4, columns[2], columns[3], 2, 6, 3, 7);
  const Words4 steps[4] = {
      TORCH_ODT_SHUFFLE(Words4, low01, low23, 0, 1, 4, 5),
      TORCH_ODT_SHUFFLE(Words4, low01, low23, 2, 3, 6, 7),
      TORCH_ODT_SHUFFLE(Words4, high01, high23, 0, 1, 4, 5),
      TORCH_ODT_SHUFFLE(Words4, high01, high23, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) {
    __builtin_memcpy(to + i * kPanelStepBytes, &steps[i], sizeof(Words4));
  }
}

void pack_forward_panel(
    const Correlation& part, const int8_t* weight, int64_t columns, char* panel, int32_t* sums) {
  const int64_t depth = part.depth();
  int64_t packed = 0;
  if (part.kernels().value_bytes == 1 && columns == kPanelColumns) {
    for (; packed + 4 * kStepBytes <= depth; packed += 4 * kStepBytes) {
      for (int64_t column = 0; column < kPanelColumns; column += 4) {
        pack_steps(weight + column * depth + packed, depth, panel + packed * kPanelColumns + column * kStepBytes);
      }
    }
  }
  const int64_t bytes_packed = packed * kPanelColumns;
  std::memset(panel + bytes_packed, 0, static_cast<size_t>(part.panel_bytes() - bytes_packed));
  for (int64_t column = 0; column < columns; ++column) {
    const int8_t* const values = weight + column * depth;
    char* const to = panel + column * kStepBytes;
    if (part.kernels().value_bytes == 2) {
      for (int64_t i = 0; i < depth; ++i) {
        const int16_t word = values[i];
        std::memcpy(to + i / 2 * kPanelStepBytes + i % 2 * 2, &word, sizeof(word));
      }
    } else {
      for (int64_t i = packed; i < depth; i += kStepBytes) {
        std::memcpy(to + i * kPanelColumns, values + i, static_cast<size_t>(std::min(kStepBytes, depth - i)));
      }
    }
    sums[column] = sum_of(values, depth);
  }
}

} // namespace

// The columns of the right operand for the output lie in memory as rows of weights.
void pack_forward_panels(
    const Conv2d&,
    const Correlation& part,
    const int8_t* weight,
    int64_t group,
    int64_t first_column,
    int64_t columns,
    char* panels,
    int32_t* sums) {
  const int8_t* from = weight + (group * part.target_depth + first_column) * part.depth();
  for (int64_t first = 0; first < columns; first += kPanelColumns) {
    pack_forward_panel(part, from, std::min(kPanelColumns, columns - first), panels, sums + first);
    from += kPanelColumns * part.depth();
    panels += part.panel_bytes();
  }
}

int64_t packed_bytes(const Conv2d& conv, Pass pass) {
  if (goes_by_channels(conv, pass)) {
    return depthwise_packed_bytes(conv, pass);
  }
  if (goes_by_patches(conv, pass)) {
    return patches_packed_bytes(conv);
  }
  int64_t bytes = 0;
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    bytes += correlation_of(conv, pass, phase).group_bytes() * conv.groups;
  }
  return bytes;
}

void pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, const Threads& threads, void* packed) {
  if (goes_by_channels(conv, pass)) {
    depthwise_pack_weight(conv, pass, weight, packed);
    return;
  }
  if (goes_by_patches(conv, pass)) {
    patches_pack_weight(conv, weight, packed);
    return;
  }
  constexpr int64_t kPanelsAtOnce = 4;
  const Threads packing = conv.out_channels * conv.taps() * conv.in_depth() < kManyWeights ? Threads{} : threads;
  char* to = static_cast<char*>(packed);
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    const int64_t chunks = (part.panels() + kPanelsAtOnce - 1) / kPanelsAtOnce;
    packing.share(conv.groups * chunks, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end;) {
        const int64_t group = item / chunks;
        // Many of a group's, so that rows of weights are read a good way on.
        const int64_t next = std::min({end, (group + 1) * chunks, item + kMostPanelsAtOnce / kPanelsAtOnce});
        const int64_t first_panel = item % chunks * kPanelsAtOnce;
        const int64_t last_panel = std::min(part.panels(), first_panel + (next - item) * kPanelsAtOnce);
        item = next;
        char* const base = to + group * part.group_bytes();
        auto* const sums = reinterpret_cast<int32_t*>(base + part.panels() * part.panel_bytes());
        std::fill(sums + first_panel * kPanelColumns, sums + last_panel * kPanelColumns, 0);
        const int64_t first = first_panel * kPanelColumns;
        const int64_t columns = std::min(part.target_depth, last_panel * kPanelColumns) - first;
        char* const panels = base + first_panel * part.panel_bytes();
        const auto pack_panels = pass == Pass::forward ? pack_forward_panels : pack_gradient_panels;
        pack_panels(conv, part, weight, group, first, columns, panels, sums + first);
      }
    });
    to += part.group_bytes() * conv.groups;
  }
}

} // namespace torch_odt::kernels::int8
