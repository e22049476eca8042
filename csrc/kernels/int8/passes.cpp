#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "correlation.h"
#include "depthwise.h"
#include "left.h"
#include "pack_weight.h"
#include "patches.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kMostRows = Correlation::kMostRows;

// What a pass reads and where it writes.
struct Source {
  const int8_t* data;
  const int8_t* end;
  int64_t channels;
  int32_t zero_point;
  const int32_t* bias;
  const char* packed; // weights; or null, where they are
  const int8_t* weight; // as the convolution has them
};

struct Target {
  int64_t rows;
  int64_t columns;
  int64_t channels;
};

// Where in the target each row of a block begins.
void find_places(
    const Correlation& part, const Target& target, int64_t begin, int64_t end, std::array<int64_t, kMostRows>& places) {
  Pixel pixel(begin, part.rows, part.columns);
  const int64_t step = part.columns.output_step * target.channels;
  for (int64_t first = 0; first < end - begin;) {
    const int64_t outputs = std::min(end - begin - first, part.columns.outputs - pixel.column);
    const int64_t row = part.rows.first_output + pixel.row * part.rows.output_step;
    const int64_t column = part.columns.first_output + pixel.column * part.columns.output_step;
    const int64_t place = ((pixel.sample * target.rows + row) * target.columns + column) * target.channels;
    for (int64_t i = 0; i < outputs; ++i) {
      places[static_cast<size_t>(first + i)] = place + i * step;
    }
    first += outputs;
    pixel.column += outputs - 1;
    pixel.advance(part.rows, part.columns);
  }
}

// A thread's own memory.
struct Workspace {
  Pieces pieces;
  int32_t* sums;
  int64_t* wide_sums;
  char* left;
  char* packed; // some panels
  int32_t* packed_sums;

  Workspace(const Correlation& part, bool packs, void* at) : pieces(at) {
    sums = pieces.take<int32_t>(kSums);
    wide_sums = pieces.take<int64_t>(part.wide() ? kSums : 0);
    left = pieces.take<char>(part.left_bytes());
    const int64_t panels = std::min(part.panels(), kCachedColumns / kPanelColumns);
    packed = pieces.take<char>(packs ? panels * part.panel_bytes() : 0);
    packed_sums = pieces.take<int32_t>(packs ? kCachedColumns : 0);
  }

  static constexpr int64_t kSums = (kMostRows + kSlackRows) * kCachedColumns;
};

// Some panels of a group.
struct Panels {
  int64_t group;
  int64_t first;
  int64_t count;
  const char* packed;
  const int32_t* column_sums;

  int64_t first_column() const {
    return first * kPanelColumns;
  }
  int64_t columns() const {
    return count * kPanelColumns;
  }
};

// What a correlation says of its sizes, divided once rather than for every block.
struct Sizes {
  int64_t depth;
  int64_t chunk;
  int64_t left_row_bytes;
  int64_t panels;
  int64_t panel_bytes;
  int64_t group_bytes;
  bool wide;

  explicit Sizes(const Correlation& part)
      : depth(part.depth()),
        chunk(part.chunk()),
        left_row_bytes(part.left_row_bytes()),
        panels(part.panels()),
        panel_bytes(part.panel_bytes()),
        group_bytes(part.group_bytes()),
        wide(part.wide()) {}
};

struct Task {
  const Conv2d& conv;
  const Correlation& part;
  const Sizes sizes;
  const Source& source;
  const Target& target;
  const Finish& how;
  const char* packed; // of this phase
  int64_t pixels;

  // Rows of the product, and panels of each group.
  float operator()(int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel, const Workspace& own) const {
    std::array<int64_t, kMostRows> places;
    find_places(part, target, begin, end, places);
    if (sizes.depth == 0 && nothing_is_zeros() && first_panel == 0 && last_panel == sizes.panels) {
      clear(end - begin, places);
      return 0;
    }
    Left left{};
    float largest = 0;
    for (int64_t group = 0; group < conv.groups; ++group) {
      for (int64_t panel = first_panel; panel < last_panel; panel += kCachedColumns / kPanelColumns) {
        const int64_t count = std::min(last_panel - panel, kCachedColumns / kPanelColumns);
        const Panels panels =
            source.packed == nullptr ? pack(group, panel, count, own) : packed_panels(group, panel, count);
        const bool gathers = panel == first_panel || sizes.chunk < sizes.depth;
        largest = std::max(largest, some_panels(panels, {begin, end, pixels}, gathers, places, left, own));
      }
    }
    return largest;
  }

 private:
  float some_panels(
      const Panels& panels,
      const Outputs& outputs,
      bool gathers,
      const std::array<int64_t, kMostRows>& places,
      Left& left,
      const Workspace& own) const {
    const int64_t rows = outputs.end - outputs.begin;
    const bool has_narrow_terms = has_terms() && !sizes.wide;
    const auto terms = has_narrow_terms ? terms_of<int32_t>(panels) : std::array<int32_t, kCachedColumns>{};
    const bool starts = has_narrow_terms && part.kernels().starts_sums;
    int64_t first = 0;
    do {
      const Range depth{first, std::min(sizes.chunk, sizes.depth - first)};
      if (gathers) {
        left = gather(panels.group, depth, outputs, own.left);
      }
      multiply(left, panels, depth, rows, starts ? terms.data() : nullptr, own.sums);
      if (sizes.wide) {
        widen(panels, depth, rows, own);
      }
      first += sizes.chunk;
    } while (first < sizes.depth);
    if (sizes.wide) {
      return finish_sums(own.wide_sums, nullptr, panels, rows, places);
    }
    return finish_sums(own.sums, has_narrow_terms && !starts ? terms.data() : nullptr, panels, rows, places);
  }

  Left gather(int64_t group, const Range& depth, const Outputs& outputs, char* to) const {
    const Image image{
        source.data,
        source.end,
        source.channels,
        group * part.source_depth,
        part.source_depth,
        static_cast<int8_t>(source.zero_point)};
    return gather_left(part.kernels(), image, part.rows, part.columns, depth, outputs, sizes.left_row_bytes, to);
  }

  // Whether sums of no terms, as phases without a tap have them, become zeros.
  bool nothing_is_zeros() const {
    const bool limits = how.zero_point != 0 || how.low > 0 || how.high < 0 || how.mask != nullptr;
    const bool stays = how.result == Result::sums || how.result == Result::floats;
    return source.bias == nullptr && (stays || (how.result == Result::int8 && !limits));
  }

  void clear(int64_t rows, const std::array<int64_t, kMostRows>& places) const {
    const int64_t bytes = how.result == Result::int8 ? 1 : 4;
    for (int64_t i = 0; i < rows; ++i) {
      char* const to = static_cast<char*>(how.output) + places[static_cast<size_t>(i)] * bytes;
      std::memset(to, 0, static_cast<size_t>(target.channels * bytes));
    }
  }

  Panels packed_panels(int64_t group, int64_t first, int64_t count) const {
    const char* const of_group = packed + group * sizes.group_bytes;
    const auto* const sums = reinterpret_cast<const int32_t*>(of_group + sizes.panels * sizes.panel_bytes);
    return {group, first, count, of_group + first * sizes.panel_bytes, sums + first * kPanelColumns};
  }

  Panels pack(int64_t group, int64_t first, int64_t count, const Workspace& own) const {
    const Panels panels{group, first, count, own.packed, own.packed_sums};
    std::fill_n(own.packed_sums, kCachedColumns, 0);
    pack_gradient_panels(
        conv, part, source.weight, group, panels.first_column(), columns_of(panels), own.packed, own.packed_sums);
    return panels;
  }

  int64_t columns_of(const Panels& panels) const {
    return std::min(panels.columns(), part.target_depth - panels.first_column());
  }

  bool has_terms() const {
    return source.bias != nullptr || source.zero_point + part.kernels().left_offset != 0;
  }

  void multiply(
      const Left& left,
      const Panels& panels,
      const Range& depth,
      int64_t rows,
      const int32_t* start,
      int32_t* sums) const {
    part.kernels().multiply(
        {left.data,
         left.row_bytes,
         kStepBytes,
         rows,
         panels.packed + part.kernels().steps(depth.first) * kPanelStepBytes,
         sizes.panel_bytes,
         panels.count,
         part.kernels().steps(depth.count),
         sums,
         panels.columns(),
         depth.first > 0 && !sizes.wide,
         start});
  }

  // What is added to each column: its bias, and what takes the offsets of the left operand off.
  template <typename Sum>
  std::array<Sum, kCachedColumns> terms_of(const Panels& panels) const {
    const int64_t channel = panels.group * part.target_depth + panels.first_column();
    const int64_t offset = source.zero_point + part.kernels().left_offset;
    std::array<Sum, kCachedColumns> terms{};
    for (int64_t i = 0; i < columns_of(panels); ++i) {
      const int64_t bias = source.bias == nullptr ? 0 : source.bias[channel + i];
      terms[static_cast<size_t>(i)] = static_cast<Sum>(bias - offset * panels.column_sums[i]);
    }
    return terms;
  }

  // The sums of one chunk, each of which int32 holds.
  void widen(const Panels& panels, const Range& depth, int64_t rows, const Workspace& own) const {
    const auto terms = terms_of<int64_t>(panels);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns_of(panels); ++column) {
        const int64_t at = row * panels.columns() + column;
        const int64_t before = depth.first == 0 ? terms[static_cast<size_t>(column)] : own.wide_sums[at];
        own.wide_sums[at] = before + own.sums[at];
      }
    }
  }

  template <typename Sum>
  float finish_sums(
      const Sum* sums,
      const int32_t* terms,
      const Panels& panels,
      int64_t rows,
      const std::array<int64_t, kMostRows>& places) const {
    if (const int64_t joined = rows_joined(panels); joined > 1 && rows >= joined) {
      const int64_t whole = rows / joined * joined;
      const Sum* const rest = sums + whole * panels.columns();
      return std::max(
          finish_joined(sums, terms, panels, whole, joined, places),
          finish_rows(rest, terms, panels, rows - whole, places.data() + whole));
    }
    return finish_rows(sums, terms, panels, rows, places.data());
  }

  // How many rows are finished as one, as whole vectors, where their sums and elements lie side by side. Draws depend on
  // where a row begins.
  int64_t rows_joined(const Panels& panels) const {
    const int64_t width = panels.columns();
    const int64_t joined = std::lcm(width, int64_t{64}) / width;
    const bool draws = how.rounding == Rounding::stochastic && how.result == Result::int8;
    const bool adjoin = part.rows.output_step == 1 && part.columns.output_step == 1 &&
        columns_of(panels) == target.channels && columns_of(panels) == width;
    return draws || !adjoin || joined * width > kBlockColumns ? 1 : joined;
  }

  template <typename Sum>
  float finish_joined(
      const Sum* sums,
      const int32_t* terms,
      const Panels& panels,
      int64_t rows,
      int64_t joined,
      const std::array<int64_t, kMostRows>& places) const {
    const int64_t width = panels.columns();
    std::array<int64_t, kMostRows> joined_places;
    std::array<int32_t, kBlockColumns> joined_terms;
    std::array<float, kBlockColumns> multipliers;
    for (int64_t i = 0; i < rows / joined; ++i) {
      joined_places[static_cast<size_t>(i)] = places[static_cast<size_t>(i * joined)];
    }
    Finish joined_how = how;
    for (int64_t i = 0; i < joined; ++i) {
      if (terms != nullptr) {
        std::copy_n(terms, width, joined_terms.data() + i * width);
      }
      if (how.per_channel) {
        std::copy_n(how.multipliers, width, multipliers.data() + i * width);
        joined_how.multipliers = multipliers.data();
      }
    }
    const int32_t* const column_terms = terms == nullptr ? nullptr : joined_terms.data();
    return finish(
        joined_how,
        Block<Sum>{
            sums,
            joined * width,
            rows / joined,
            joined * width,
            joined_places.data(),
            0,
            0,
            column_terms,
            nullptr});
  }

  template <typename Sum>
  float finish_rows(
      const Sum* sums, const int32_t* terms, const Panels& panels, int64_t rows, const int64_t* places) const {
    if (rows == 0) {
      return 0;
    }
    const int64_t channel = panels.group * part.target_depth + panels.first_column();
    // The channels of a depthwise convolution are one row, although each is a group.
    const int64_t column = conv.depthwise() ? channel : panels.first_column();
    std::array<int64_t, kMostRows> block_places;
    for (int64_t i = 0; i < rows; ++i) {
      block_places[static_cast<size_t>(i)] = places[i] + channel;
    }
    return finish(
        how,
        Block<Sum>{
            sums, panels.columns(), rows, columns_of(panels), block_places.data(), column, channel, terms, nullptr});
  }
};

float run_pass(
    const Conv2d& conv,
    Pass pass,
    const Source& source,
    const Target& target,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const bool packs = source.packed == nullptr;
  const int64_t thread_bytes = packs ? grad_input_packing_workspace_bytes(conv) : workspace_bytes(conv, pass);
  const char* weights = source.packed;
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    const int64_t pixels = conv.batch * part.rows.outputs * part.columns.outputs;
    const Task task{conv, part, Sizes(part), source, target, how, weights, pixels};
    const int64_t rows = part.block_rows();
    const int64_t blocks = (pixels + rows - 1) / rows;
    // Few rows are shared out by columns, but not within a byte of a mask.
    const bool by_columns = blocks < threads.count && (how.mask == nullptr || part.target_depth % 8 == 0);
    const int64_t cuts = by_columns ? std::min(part.panels(), threads.count) : 1;
    threads.share(blocks * cuts, [&](int64_t thread, int64_t begin, int64_t end) {
      const Multiplying multiplying(part.kernels());
      const Workspace own(part, packs, static_cast<char*>(workspace) + thread * thread_bytes);
      float& most = largest[static_cast<size_t>(thread)];
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / cuts * rows;
        const int64_t cut = item % cuts;
        const int64_t first_panel = part.panels() * cut / cuts;
        const int64_t last_panel = part.panels() * (cut + 1) / cuts;
        most = std::max(most, task(row, std::min(pixels, row + rows), first_panel, last_panel, own));
      }
    });
    weights += packs ? 0 : part.group_bytes() * conv.groups;
  }
  return *std::max_element(largest.begin(), largest.end());
}

// From weights that are packed, or from those that the convolution has.
float grad_input_of(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const int8_t* weight,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const int8_t* const end = grad_output + conv.out_pixels() * conv.out_channels;
  const Source source{grad_output, end, conv.out_channels, 0, nullptr, static_cast<const char*>(packed), weight};
  const Target target{conv.rows.input, conv.columns.input, conv.in_channels};
  return run_pass(conv, Pass::grad_input, source, target, how, threads, workspace);
}

} // namespace

int64_t workspace_bytes(const Conv2d& conv, Pass pass) {
  if (goes_by_channels(conv, pass)) {
    return depthwise_workspace_bytes(conv, pass);
  }
  if (goes_by_patches(conv, pass)) {
    return patches_workspace_bytes(conv);
  }
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    most = std::max(most, Workspace(correlation_of(conv, pass, phase), false, nullptr).pieces.bytes());
  }
  return most;
}

float forward(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const void* packed,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (goes_by_channels(conv, Pass::forward)) {
    return depthwise_pass(conv, Pass::forward, input, zero_point, packed, bias, how, threads, workspace);
  }
  const int8_t* const end = input + conv.in_pixels() * conv.in_channels;
  const Source source{input, end, conv.in_channels, zero_point, bias, static_cast<const char*>(packed), nullptr};
  const Target target{conv.rows.output, conv.columns.output, conv.out_channels};
  return run_pass(conv, Pass::forward, source, target, how, threads, workspace);
}

float grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (goes_by_channels(conv, Pass::grad_input)) {
    return depthwise_pass(conv, Pass::grad_input, grad_output, 0, packed, nullptr, how, threads, workspace);
  }
  if (goes_by_patches(conv, Pass::grad_input)) {
    return patches_grad_input(conv, grad_output, packed, how, threads, workspace);
  }
  return grad_input_of(conv, grad_output, packed, nullptr, how, threads, workspace);
}

bool grad_input_packs_on_the_way(const Conv2d& conv) {
  if (goes_by_channels(conv, Pass::grad_input) || goes_by_patches(conv, Pass::grad_input)) {
    return false;
  }
  for (int64_t phase = 0; phase < phases_of(conv, Pass::grad_input); ++phase) {
    const Correlation part = correlation_of(conv, Pass::grad_input, phase);
    if (conv.batch * part.rows.outputs * part.columns.outputs > part.block_rows()) {
      return false;
    }
  }
  return grad_input_packing_workspace_bytes(conv) <= kMostWorkspaceBytes;
}

int64_t grad_input_packing_workspace_bytes(const Conv2d& conv) {
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases_of(conv, Pass::grad_input); ++phase) {
    most = std::max(most, Workspace(correlation_of(conv, Pass::grad_input, phase), true, nullptr).pieces.bytes());
  }
  return most;
}

float grad_input_packing(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* weight,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  return grad_input_of(conv, grad_output, nullptr, weight, how, threads, workspace);
}

} // namespace torch_odt::kernels::int8
