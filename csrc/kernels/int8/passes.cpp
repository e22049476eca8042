#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "conv2d.h"
#include "depthwise.h"
#include "gather.h"
#include "memory.h"
#include "sums.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kMostRows = 96; // whole tiles of all tables, or nearly so
constexpr int64_t kLeftBytes = 131072;

// One product: all outputs of a phase, for one group after the other.
struct Correlation {
  Taps rows;
  Taps columns;
  int64_t source_depth;
  int64_t target_depth;

  int64_t depth() const {
    return rows.count * columns.count * source_depth;
  }
  int64_t steps() const {
    return table().steps(depth());
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
  // Of a packed row. Rows a power of two apart would fall on the same lines of a cache.
  int64_t left_row_bytes() const {
    return aligned(steps() * kStepBytes) + kAlignment;
  }
  // Rows at a time: what is gathered has to stay in a cache near the processor. A multiple of eight, so that bits of
  // masks are written by one thread a byte.
  int64_t block_rows() const {
    return std::clamp<int64_t>(kLeftBytes / left_row_bytes() / kSlackRows * kSlackRows, kSlackRows, kMostRows);
  }
  int64_t left_bytes() const {
    return aligned((block_rows() + kSlackRows) * left_row_bytes());
  }
};

constexpr int64_t kSumsBytes = (kMostRows + kSlackRows) * kCachedColumns * 4;

int64_t phases_of(const Conv2d& conv, Pass pass) {
  return pass == Pass::forward ? 1 : conv.rows.stride * conv.columns.stride;
}

Correlation correlation_of(const Conv2d& conv, Pass pass, int64_t phase) {
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
  static constexpr int8_t kZeros[64 * kPanelColumns] = {};
  const int64_t padded = table().padded(part.depth());
  std::vector<const int8_t*> rows(static_cast<size_t>(padded), kZeros);
  auto row = rows.begin();
  for (int64_t i = 0; i < part.rows.count; ++i) {
    for (int64_t j = 0; j < part.columns.count; ++j) {
      const int64_t element = part.rows.element(i) * conv.columns.kernel + part.columns.element(j);
      for (int64_t channel = 0; channel < part.source_depth; ++channel) {
        const int64_t out_channel = group * part.source_depth + channel;
        *row++ = weight + (out_channel * conv.taps() + element) * part.target_depth + first_column;
      }
    }
  }
  table().pack_right({rows.data(), part.steps(), columns, panels, part.panel_bytes(), kPanelStepBytes});
  for (int64_t panel = 0; table().add_column_sums != nullptr && panel * kPanelColumns < columns; ++panel) {
    table().add_column_sums(panels + panel * part.panel_bytes(), part.steps(), sums + panel * kPanelColumns);
  }
}

// The columns of the right operand for the output lie in memory as rows of weights.
void pack_forward_panel(
    const Correlation& part, const int8_t* weight, int64_t columns, char* panel, int32_t* sums) {
  const int64_t depth = part.depth();
  std::memset(panel, 0, static_cast<size_t>(part.panel_bytes()));
  for (int64_t column = 0; column < columns; ++column) {
    const int8_t* const values = weight + column * depth;
    char* const to = panel + column * kStepBytes;
    if (table().value_bytes == 2) {
      for (int64_t i = 0; i < depth; ++i) {
        const int16_t word = values[i];
        std::memcpy(to + i / 2 * kPanelStepBytes + i % 2 * 2, &word, sizeof(word));
      }
    } else {
      for (int64_t i = 0; i < depth; i += kStepBytes) {
        std::memcpy(to + i * kPanelColumns, values + i, static_cast<size_t>(std::min(kStepBytes, depth - i)));
      }
    }
    sums[column] = sum_of(values, depth);
  }
}

} // namespace

int64_t packed_bytes(const Conv2d& conv, Pass pass) {
  if (conv.depthwise()) {
    return depthwise_packed_bytes(conv, pass);
  }
  int64_t bytes = 0;
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    bytes += correlation_of(conv, pass, phase).group_bytes() * conv.groups;
  }
  return bytes;
}

void pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, const Threads& threads, void* packed) {
  if (conv.depthwise()) {
    depthwise_pack_weight(conv, pass, weight, packed);
    return;
  }
  constexpr int64_t kPanelsAtOnce = 4;
  char* to = static_cast<char*>(packed);
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    const int64_t chunks = (part.panels() + kPanelsAtOnce - 1) / kPanelsAtOnce;
    threads.share(conv.groups * chunks, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t group = item / chunks;
        const int64_t first_panel = item % chunks * kPanelsAtOnce;
        const int64_t last_panel = std::min(part.panels(), first_panel + kPanelsAtOnce);
        char* const base = to + group * part.group_bytes();
        auto* const sums = reinterpret_cast<int32_t*>(base + part.panels() * part.panel_bytes());
        std::fill(sums + first_panel * kPanelColumns, sums + last_panel * kPanelColumns, 0);
        if (pass == Pass::grad_input) {
          const int64_t first = first_panel * kPanelColumns;
          const int64_t columns = std::min(part.target_depth, last_panel * kPanelColumns) - first;
          char* const panels = base + first_panel * part.panel_bytes();
          pack_gradient_panels(conv, part, weight, group, first, columns, panels, sums + first);
          continue;
        }
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
          const int64_t first = panel * kPanelColumns;
          const int64_t columns = std::min(kPanelColumns, part.target_depth - first);
          const int8_t* const from = weight + (group * part.target_depth + first) * part.depth();
          pack_forward_panel(part, from, columns, base + panel * part.panel_bytes(), sums + first);
        }
      }
    });
    to += part.group_bytes() * conv.groups;
  }
}

int64_t workspace_bytes(const Conv2d& conv, Pass pass) {
  if (conv.depthwise()) {
    return depthwise_workspace_bytes(conv, pass);
  }
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    most = std::max(most, correlation_of(conv, pass, phase).left_bytes());
  }
  return most + kSumsBytes;
}

namespace {

// What a pass reads and where it writes.
struct Source {
  const int8_t* data;
  int64_t channels;
  int32_t zero_point;
  const int32_t* bias;
};

struct Target {
  int64_t rows;
  int64_t columns;
  int64_t channels;
};

// A packed block of the left operand, in the thread's workspace or where it lies already.
struct Left {
  const void* data;
  int64_t row_bytes;
};

Left gather_block(
    const Correlation& part, const Source& source, int64_t group, int64_t begin, int64_t end, int64_t pixels, char* to) {
  const Table& kernels = table();
  const Image image{
      source.data,
      source.channels,
      group * part.source_depth,
      part.source_depth,
      static_cast<int8_t>(source.zero_point)};
  const int64_t row_bytes = part.left_row_bytes();
  if (is_pointwise(part.rows, part.columns)) {
    const int8_t* const first = image.data + begin * image.channels + image.first_channel;
    const bool as_it_is = kernels.value_bytes == 1 && kernels.left_offset == 0 &&
        part.depth() % kernels.depth_multiple == 0 && end + kSlackRows <= pixels;
    if (as_it_is) {
      return {first, image.channels};
    }
    if (image.depth == image.channels && part.depth() % kernels.depth_multiple == 0) {
      kernels.pack_left_rows({first, 0, 1, (end - begin) * image.depth, to, 0});
      return {to, image.depth * kernels.value_bytes};
    }
    kernels.pack_left_rows({first, image.channels, end - begin, image.depth, to, row_bytes});
    return {to, row_bytes};
  }
  const auto copy = [&](int64_t row, int64_t rows, const int8_t* from, int64_t stride, int64_t count, int64_t at) {
    kernels.pack_left_rows({from, stride, rows, count, to + row * row_bytes + at * kernels.value_bytes, row_bytes});
  };
  const auto fill = [&](int64_t row, int64_t count, int64_t at) {
    char* const place = to + row * row_bytes;
    if (kernels.value_bytes == 2) {
      std::fill_n(reinterpret_cast<int16_t*>(place) + at, count, int16_t{image.padding});
    } else {
      std::memset(place + at, image.padding + kernels.left_offset, static_cast<size_t>(count));
    }
  };
  Gather(image, part.rows, part.columns, copy, fill)(begin, end);
  return {to, row_bytes};
}

// Where in the target each row of a block begins.
void find_places(
    const Correlation& part, const Target& target, int64_t begin, int64_t end, std::array<int64_t, kMostRows>& places) {
  Pixel pixel(begin, part.rows, part.columns);
  for (int64_t i = 0; i < end - begin; ++i, pixel.advance(part.rows, part.columns)) {
    const int64_t row = part.rows.first_output + pixel.row * part.rows.output_step;
    const int64_t column = part.columns.first_output + pixel.column * part.columns.output_step;
    places[static_cast<size_t>(i)] =
        ((pixel.sample * target.rows + row) * target.columns + column) * target.channels;
  }
}

struct Task {
  const Correlation& part;
  const Source& source;
  const Target& target;
  const Finish& how;
  const char* packed;
  int64_t pixels;
  int64_t groups;

  // Rows of the product, and panels of each group, with a workspace of the thread's own.
  float operator()(int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel, char* workspace) const {
    auto* const sums = reinterpret_cast<int32_t*>(workspace);
    char* const left_place = workspace + kSumsBytes;
    std::array<int64_t, kMostRows> places;
    find_places(part, target, begin, end, places);
    float largest = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const Left left = gather_block(part, source, group, begin, end, pixels, left_place);
      for (int64_t panel = first_panel; panel < last_panel; panel += kCachedColumns / kPanelColumns) {
        const int64_t panels = std::min(last_panel - panel, kCachedColumns / kPanelColumns);
        largest = std::max(largest, multiply(left, group, panel, panels, end - begin, places, sums));
      }
    }
    return largest;
  }

 private:
  float multiply(
      const Left& left,
      int64_t group,
      int64_t panel,
      int64_t panels,
      int64_t rows,
      const std::array<int64_t, kMostRows>& places,
      int32_t* sums) const {
    const char* const base = packed + group * part.group_bytes();
    const auto* const column_sums =
        reinterpret_cast<const int32_t*>(base + part.panels() * part.panel_bytes()) + panel * kPanelColumns;
    table().multiply(
        {left.data,
         left.row_bytes,
         kStepBytes,
         rows,
         base + panel * part.panel_bytes(),
         part.panel_bytes(),
         panels,
         part.steps(),
         sums,
         panels * kPanelColumns,
         false});
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min(panels * kPanelColumns, part.target_depth - first);
    const int64_t channel = group * part.target_depth + first;
    const uint32_t offset = static_cast<uint32_t>(source.zero_point) + static_cast<uint32_t>(table().left_offset);
    std::array<int32_t, kCachedColumns> terms;
    for (int64_t i = 0; i < columns; ++i) {
      const uint32_t bias = source.bias == nullptr ? 0 : static_cast<uint32_t>(source.bias[channel + i]);
      terms[static_cast<size_t>(i)] = static_cast<int32_t>(bias - offset * static_cast<uint32_t>(column_sums[i]));
    }
    std::array<int64_t, kMostRows> block_places;
    for (int64_t i = 0; i < rows; ++i) {
      block_places[static_cast<size_t>(i)] = places[static_cast<size_t>(i)] + channel;
    }
    return finish(
        how,
        Block<int32_t>{
            sums, panels * kPanelColumns, rows, columns, block_places.data(), first, channel, terms.data(), nullptr});
  }
};

float run_pass(
    const Conv2d& conv,
    Pass pass,
    const Source& source,
    const Target& target,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const int64_t thread_bytes = workspace_bytes(conv, pass);
  const char* weights = static_cast<const char*>(packed);
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    const int64_t pixels = conv.batch * part.rows.outputs * part.columns.outputs;
    const Task task{part, source, target, how, weights, pixels, conv.groups};
    const int64_t rows = part.block_rows();
    const int64_t blocks = (pixels + rows - 1) / rows;
    // Few rows are shared out by columns, but not within a byte of a mask.
    const bool by_columns = blocks < threads.count && (how.mask == nullptr || part.target_depth % 8 == 0);
    const int64_t cuts = by_columns ? std::min(part.panels(), threads.count) : 1;
    threads.share(blocks * cuts, [&](int64_t thread, int64_t begin, int64_t end) {
      float& most = largest[static_cast<size_t>(thread)];
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / cuts * rows;
        const int64_t cut = item % cuts;
        char* const own = static_cast<char*>(workspace) + thread * thread_bytes;
        const int64_t first_panel = part.panels() * cut / cuts;
        const int64_t last_panel = part.panels() * (cut + 1) / cuts;
        most = std::max(most, task(row, std::min(pixels, row + rows), first_panel, last_panel, own));
      }
    });
    weights += part.group_bytes() * conv.groups;
  }
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace

float forward(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const void* packed,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (conv.depthwise()) {
    return depthwise_pass(conv, Pass::forward, input, zero_point, packed, bias, how, threads, workspace);
  }
  const Source source{input, conv.in_channels, zero_point, bias};
  const Target target{conv.rows.output, conv.columns.output, conv.out_channels};
  return run_pass(conv, Pass::forward, source, target, packed, how, threads, workspace);
}

float grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (conv.depthwise()) {
    return depthwise_pass(conv, Pass::grad_input, grad_output, 0, packed, nullptr, how, threads, workspace);
  }
  const Source source{grad_output, conv.out_channels, 0, nullptr};
  const Target target{conv.rows.input, conv.columns.input, conv.in_channels};
  return run_pass(conv, Pass::grad_input, source, target, packed, how, threads, workspace);
}

} // namespace torch_odt::kernels::int8
