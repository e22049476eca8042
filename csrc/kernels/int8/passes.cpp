#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "correlation.h"
#include "depthwise.h"
#include "left.h"
#include "pack_weight.h"
#include "padded.h"
#include "panel_sums.h"
#include "pass_workspace.h"
#include "patches.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows of a product: outputs in their order, or positions of a padded sample.
struct Rows {
  int64_t sample;
  int64_t begin;
  int64_t end;

  int64_t count() const {
    return end - begin;
  }
};

// Where outputs side by side lie in the target.
void find_places(const Correlation& part, const Target& target, const Pixel& first, int64_t outputs, int64_t* places) {
  const int64_t row = part.rows.first_output + first.row * part.rows.output_step;
  const int64_t column = part.columns.first_output + first.column * part.columns.output_step;
  const int64_t place = ((first.sample * target.rows + row) * target.columns + column) * target.channels;
  for (int64_t i = 0; i < outputs; ++i) {
    places[i] = place + i * part.columns.output_step * target.channels;
  }
}

void find_places(const Correlation& part, const Target& target, const Rows& rows, Places& places) {
  Pixel pixel(rows.begin, part.rows, part.columns);
  for (int64_t first = 0; first < rows.count();) {
    const int64_t outputs = std::min(rows.count() - first, part.columns.outputs - pixel.column);
    find_places(part, target, pixel, outputs, places.data() + first);
    first += outputs;
    pixel.column += outputs - 1;
    pixel.advance(part.rows, part.columns);
  }
}

// What a correlation says of its sizes, divided once rather than for every block.
struct Sizes {
  const Table& kernels;
  int64_t depth;
  int64_t chunk;
  int64_t left_row_bytes;
  int64_t panels;
  int64_t panel_bytes;
  int64_t group_bytes;
  bool wide;
  bool in_turn;
  int64_t panels_at_once;

  Sizes(const Correlation& part, const Extent& most)
      : kernels(part.kernels()),
        depth(part.depth()),
        chunk(part.chunk()),
        left_row_bytes(part.left_row_bytes()),
        panels(part.panels()),
        panel_bytes(part.panel_bytes()),
        group_bytes(part.group_bytes()),
        wide(part.wide()),
        in_turn(most.in_turn),
        panels_at_once(most.panels) {}
};

struct Task {
  const Conv2d& conv;
  const Pass pass;
  const Correlation& part;
  const Sizes sizes;
  const Source& source;
  const Target& target;
  const char* packed; // of this phase
  int64_t pixels;
  bool padded;
  const PanelSums results;

  float operator()(const Rows& rows, int64_t first_panel, int64_t last_panel, const PassWorkspace& own) const {
    Places places;
    if (!padded) {
      find_places(part, target, rows, places);
    }
    if (sizes.depth == 0 && results.nothing_is_zeros() && first_panel == 0 && last_panel == sizes.panels) {
      results.clear(rows.count(), places);
      return 0;
    }
    Left left{};
    float largest = 0;
    for (int64_t group = 0; group < conv.groups; ++group) {
      for (int64_t panel = first_panel; panel < last_panel; panel += sizes.panels_at_once) {
        const int64_t count = std::min(last_panel - panel, sizes.panels_at_once);
        const Panels panels =
            source.packed == nullptr ? pack(group, panel, count, own) : packed_panels(group, panel, count);
        const bool gathers = panel == first_panel || sizes.chunk < sizes.depth;
        largest = std::max(largest, some_panels(panels, rows, gathers, places, left, own));
      }
    }
    return largest;
  }

 private:
  float some_panels(
      const Panels& panels,
      const Rows& rows,
      bool gathers,
      const Places& places,
      Left& left,
      const PassWorkspace& own) const {
    const bool has_narrow_terms = results.has_terms() && !sizes.wide;
    const auto terms = has_narrow_terms ? results.terms_of<int32_t>(panels) : std::array<int32_t, kCachedColumns>{};
    const bool starts = has_narrow_terms && sizes.kernels.starts_sums;
    const int32_t* const start = starts ? terms.data() : nullptr;
    const int32_t* const added = has_narrow_terms && !starts ? terms.data() : nullptr;
    if (sizes.in_turn) {
      if (gathers) {
        left = gather(panels.group, {0, sizes.depth}, rows, own.left);
      }
      return finish_in_turn(left, panels, rows.count(), start, added, places, own);
    }
    int64_t first = 0;
    do {
      const Range depth{first, std::min(sizes.chunk, sizes.depth - first)};
      if (gathers) {
        left = gather(panels.group, depth, rows, own.left);
      }
      multiply(left, panels, depth, rows.count(), start, own.sums);
      if (sizes.wide) {
        results.widen(panels, first == 0, rows.count(), own.sums, own.wide_sums);
      }
      first += sizes.chunk;
    } while (first < sizes.depth);
    if (sizes.wide) {
      return results.finish_sums(own.wide_sums, nullptr, panels, rows.count(), places.data());
    }
    return padded ? finish_positions(own.sums, added, panels, rows)
                  : results.finish_sums(own.sums, added, panels, rows.count(), places.data());
  }

  // See Sizes::in_turn.
  float finish_in_turn(
      const Left& left,
      const Panels& panels,
      int64_t rows,
      const int32_t* start,
      const int32_t* added,
      const Places& places,
      const PassWorkspace& own) const {
    const int64_t at_once = sizes.kernels.sums_at_once / panels.columns() / kSlackRows * kSlackRows;
    float largest = 0;
    for (int64_t row = 0; row < rows; row += at_once) {
      const int64_t some = std::min(at_once, rows - row);
      Left from = left;
      from.data = static_cast<const char*>(left.data) + row * left.row_bytes;
      multiply(from, panels, {0, sizes.depth}, some, start, own.sums);
      largest = std::max(largest, results.finish_sums(own.sums, added, panels, some, places.data() + row));
    }
    return largest;
  }

  // Line by line, without the positions that have no output.
  float finish_positions(const int32_t* sums, const int32_t* terms, const Panels& panels, const Rows& rows) const {
    const int64_t width = Padded(part.rows, part.columns).width();
    float largest = 0;
    for (int64_t position = rows.begin; position < rows.end;) {
      const int64_t line = position / width;
      const int64_t column = position % width;
      const int64_t outputs = std::min(rows.end - position, part.columns.outputs - column);
      if (outputs > 0) {
        Places places;
        const int64_t first = (rows.sample * part.rows.outputs + line) * part.columns.outputs + column;
        find_places(part, target, Pixel(first, part.rows, part.columns), outputs, places.data());
        const int32_t* const of_line = sums + (position - rows.begin) * panels.columns();
        largest = std::max(largest, results.finish_sums(of_line, terms, panels, outputs, places.data()));
      }
      position += width - column;
    }
    return largest;
  }

  Left gather(int64_t group, const Range& depth, const Rows& rows, char* to) const {
    const Image image{
        source.data,
        source.end,
        source.channels,
        group * part.source_depth,
        part.source_depth,
        static_cast<int8_t>(source.zero_point)};
    if (padded) {
      return copy_padded(part.kernels(), image, part.rows, part.columns, rows.sample, rows.begin, rows.end, to);
    }
    const Outputs outputs{rows.begin, rows.end, pixels};
    return gather_left(part.kernels(), image, part.rows, part.columns, depth, outputs, sizes.left_row_bytes, to);
  }

  Panels packed_panels(int64_t group, int64_t first, int64_t count) const {
    const char* const of_group = packed + group * sizes.group_bytes;
    const auto* const sums = reinterpret_cast<const int32_t*>(of_group + sizes.panels * sizes.panel_bytes);
    return {group, first, count, of_group + first * sizes.panel_bytes, sums + first * kPanelColumns};
  }

  Panels pack(int64_t group, int64_t first, int64_t count, const PassWorkspace& own) const {
    const Panels panels{group, first, count, own.packed, own.packed_sums};
    std::fill_n(own.packed_sums, kCachedColumns, 0);
    const int64_t columns = results.columns_of(panels);
    const auto pack_panels = pass == Pass::forward ? pack_forward_panels : pack_gradient_panels;
    pack_panels(conv, part, source.weight, group, panels.first_column(), columns, own.packed, own.packed_sums);
    return panels;
  }

  void multiply(
      const Left& left,
      const Panels& panels,
      const Range& depth,
      int64_t rows,
      const int32_t* start,
      int32_t* sums) const {
    sizes.kernels.multiply(
        {left.data,
         left.row_bytes,
         kStepBytes,
         rows,
         panels.packed + sizes.kernels.steps(depth.first) * kPanelStepBytes,
         sizes.panel_bytes,
         panels.count,
         sizes.kernels.steps(depth.count),
         sums,
         panels.columns(),
         depth.first > 0 && !sizes.wide,
         start,
         left.segment_steps,
         left.segment_bytes});
  }
};

// How the rows of a product are cut.
struct Blocks {
  bool padded;
  int64_t samples; // 1, where their outputs follow each other
  int64_t rows; // of a sample
  int64_t most_rows; // of a block
  int64_t of_sample;

  Blocks(const Conv2d& conv, const Correlation& part, const Finish& how, bool packs, int64_t threads) {
    const Padded positions(part.rows, part.columns);
    const bool whole_bytes = how.mask == nullptr || part.target_depth % 8 == 0;
    padded = !packs && conv.groups == 1 && goes_padded(part.kernels(), part.rows, part.columns, part.source_depth) &&
        part.rows.outputs > 0 && part.chunk() >= part.depth() && whole_bytes &&
        positions.copy_bytes(kMostRows, part.source_depth) <= part.most_copy_bytes();
    const int64_t outputs = part.rows.outputs * part.columns.outputs;
    samples = padded ? conv.batch : 1;
    rows = padded ? positions.positions() : conv.batch * outputs;
    most_rows = padded ? kMostRows : part.block_rows();
    of_sample = divided(rows, most_rows);
    // As many for each thread, and of about as many rows.
    constexpr int64_t kFewBlocks = 8; // for each thread
    if (!padded && of_sample >= threads && of_sample < kFewBlocks * threads) {
      of_sample = divided(of_sample, threads) * threads;
      most_rows = divided(divided(rows, of_sample), 8) * 8;
      of_sample = divided(rows, most_rows);
    }
  }

  int64_t count() const {
    return samples * of_sample;
  }
  Rows operator[](int64_t block) const {
    const int64_t begin = block % of_sample * most_rows;
    return {block / of_sample, begin, std::min(rows, begin + most_rows)};
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
  const int64_t thread_bytes = packs ? packing_workspace_bytes(conv, pass) : workspace_bytes(conv, pass);
  const char* weights = source.packed;
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    const Blocks blocks(conv, part, how, packs, threads.count);
    const PanelSums results(conv, part, source, target, how);
    const int64_t pixels = conv.batch * part.rows.outputs * part.columns.outputs;
    const Sizes sizes(part, Extent(conv, part, blocks.padded, packs));
    const Task task{conv, pass, part, sizes, source, target, weights, pixels, blocks.padded, results};
    // Few rows are shared out by columns, but not within a byte of a mask.
    const bool by_columns = blocks.count() < threads.count && (how.mask == nullptr || part.target_depth % 8 == 0);
    const int64_t cuts = by_columns ? std::min(part.panels(), threads.count) : 1;
    threads.share(blocks.count() * cuts, [&](int64_t thread, int64_t begin, int64_t end) {
      const Multiplying multiplying(part.kernels());
      const PassWorkspace own(conv, part, packs, static_cast<char*>(workspace) + thread * thread_bytes);
      float& most = largest[static_cast<size_t>(thread)];
      for (int64_t item = begin; item < end; ++item) {
        const int64_t cut = item % cuts;
        const int64_t first_panel = part.panels() * cut / cuts;
        const int64_t last_panel = part.panels() * (cut + 1) / cuts;
        most = std::max(most, task(blocks[item / cuts], first_panel, last_panel, own));
      }
    });
    weights += packs ? 0 : part.group_bytes() * conv.groups;
  }
  return *std::max_element(largest.begin(), largest.end());
}

// Both passes from weights that are packed, or from those that the convolution has.
float forward_of(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const void* packed,
    const int8_t* weight,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const int8_t* const end = input + conv.in_pixels() * conv.in_channels;
  const Source source{input, end, conv.in_channels, zero_point, bias, static_cast<const char*>(packed), weight};
  const Target target{conv.rows.output, conv.columns.output, conv.out_channels};
  return run_pass(conv, Pass::forward, source, target, how, threads, workspace);
}

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
    most = std::max(most, PassWorkspace(conv, correlation_of(conv, pass, phase), false, nullptr).pieces.bytes());
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
  return forward_of(conv, input, zero_point, packed, nullptr, bias, how, threads, workspace);
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

bool packs_on_the_way(const Conv2d& conv, Pass pass) {
  if (goes_by_channels(conv, pass) || goes_by_patches(conv, pass)) {
    return false;
  }
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    const Correlation part = correlation_of(conv, pass, phase);
    if (conv.batch * part.rows.outputs * part.columns.outputs > part.block_rows()) {
      return false;
    }
  }
  return packing_workspace_bytes(conv, pass) <= kMostWorkspaceBytes;
}

int64_t packing_workspace_bytes(const Conv2d& conv, Pass pass) {
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases_of(conv, pass); ++phase) {
    most = std::max(most, PassWorkspace(conv, correlation_of(conv, pass, phase), true, nullptr).pieces.bytes());
  }
  return most;
}

float forward_packing(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const int8_t* weight,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  return forward_of(conv, input, zero_point, nullptr, weight, bias, how, threads, workspace);
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
