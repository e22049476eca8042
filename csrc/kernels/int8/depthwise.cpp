#include "depthwise.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "depthwise_joined.h"
#include "depthwise_rows.h"
#include "depthwise_share.h"
#include "depthwise_tables.h"
#include "memory.h"
#include "taps.h"

namespace torch_odt::kernels::int8 {

namespace {

// Sums at a time, with the rows that they come from.
constexpr int64_t kSumsAtOnce = 24576;
// What a thread's workspace has room for.
constexpr int64_t kMostPackedBytes = 1 << 20;
constexpr int64_t kFewOutputs = 8; // of a row at a time

// One phase of a pass, see taps.h.
struct Phase {
  Taps rows;
  Taps columns;
  int64_t channels;

  int64_t blocks() const {
    return divided(channels, kPanelColumns);
  }
  // Over all rows under the kernel.
  int64_t row_steps() const {
    return divided(rows.count, rows_of_step());
  }
  // Rows of outputs that see the same steps.
  int64_t group() const {
    const bool together = rows.spacing == 1 && rows.count > 0;
    return together ? 1 + (row_steps() * rows_of_step() - rows.count) / rows.step : 1;
  }
  // Whether the table has sums that come straight from the image.
  bool goes_by_columns() const {
    const bool one_step = row_steps() == 1 && rows.spacing == 1;
    const bool three_taps = columns.count == 3 && columns.spacing == 1 && columns.step <= 2;
    return depthwise_table().sum_columns != nullptr && one_step && three_taps;
  }
  int64_t output_weights_bytes() const {
    return row_steps() * columns.count * kPanelStepBytes;
  }
  int64_t weights_bytes() const {
    return blocks() * group() * output_weights_bytes();
  }
  // Weights, and behind them the sum of each channel's.
  int64_t packed_bytes() const {
    return weights_bytes() + aligned(blocks() * kPanelColumns * 4);
  }
  // Columns that some outputs of a row see.
  int64_t width_of(int64_t outputs) const {
    return outputs == 0 ? 0 : (outputs - 1) * columns.step + std::max<int64_t>(0, columns.count - 1) * columns.spacing + 1;
  }
  int64_t packed_rows_bytes(int64_t outputs, int64_t panels) const {
    return row_steps() * width_of(outputs) * panels * kPanelStepBytes;
  }
  RowSteps steps() const {
    return {row_steps(), rows_of_step() * rows.spacing, rows.spacing, group() * rows.step};
  }
};

Phase phase_of(const Conv2d& conv, Pass pass, int64_t index) {
  if (pass == Pass::forward) {
    return {forward_taps(conv.rows), forward_taps(conv.columns), conv.in_channels};
  }
  const int64_t stride = conv.columns.stride;
  return {
      gradient_taps(conv.rows, index / stride), gradient_taps(conv.columns, index % stride), conv.in_channels};
}

// How many panels of channels, and outputs of a row, are summed at a time.
struct Cut {
  int64_t panels;
  int64_t outputs;

  explicit Cut(const Phase& phase) {
    constexpr int64_t kWhole = 64 / kPanelColumns; // what packing does at a time
    const int64_t pieces = std::max<int64_t>(1, divided(phase.channels, kChannelsAtOnce));
    panels = std::min(phase.blocks(), divided(divided(phase.blocks(), pieces), kWhole) * kWhole);
    outputs = phase.columns.outputs;
    const int64_t at_once = phase.goes_by_columns() ? kCachedSums : kSumsAtOnce;
    for (int64_t parts = 2; outputs > kFewOutputs && sums_count(phase) > at_once; ++parts) {
      outputs = divided(phase.columns.outputs, parts);
    }
    while (panels > 1 && phase.packed_rows_bytes(outputs, panels) > kMostPackedBytes) {
      panels = divided(panels, 2);
    }
    while (outputs > kFewOutputs && phase.packed_rows_bytes(outputs, panels) > kMostPackedBytes) {
      outputs = divided(outputs, 2);
    }
  }

  int64_t channels() const {
    return panels * kPanelColumns;
  }
  int64_t sums_count(const Phase& phase) const {
    return outputs * phase.group() * channels();
  }
};

struct Workspace {
  Pieces pieces;
  Cut cut;
  int32_t* sums;
  int32_t* terms; // added to the sums of each channel
  int8_t* padding;
  int64_t* places;
  // Pixels are read where they lie, or packed; there is room for so many outputs' of the latter.
  bool by_columns;
  int64_t packed_outputs;
  PackedRows rows;
  PixelColumns columns;

  Workspace(const Phase& phase, void* at)
      : pieces(at),
        cut(phase),
        sums(pieces.take<int32_t>(cut.sums_count(phase))),
        terms(pieces.take<int32_t>(cut.channels())),
        padding(pieces.take<int8_t>(cut.channels() + kAlignment)),
        places(pieces.take<int64_t>(cut.outputs * phase.group())),
        by_columns(phase.goes_by_columns()),
        packed_outputs(by_columns ? 0 : cut.outputs),
        rows(phase.steps(), phase.width_of(packed_outputs), cut.channels(), false, pieces),
        columns(rows_of_step(), 1, phase.width_of(cut.outputs - packed_outputs), pieces) {}
};

} // namespace

bool goes_by_channels(const Conv2d& conv, Pass pass) {
  if (!conv.depthwise() || conv.taps() > kMostDepth) {
    return false;
  }
  for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
    if (phase_of(conv, pass, i).packed_rows_bytes(kFewOutputs, 1) > kMostPackedBytes) {
      return false;
    }
  }
  return true;
}

int64_t depthwise_packed_bytes(const Conv2d& conv, Pass pass) {
  if (has_joined_phases(conv, pass)) {
    return joined_packed_bytes(conv);
  }
  int64_t bytes = 0;
  for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
    bytes += phase_of(conv, pass, i).packed_bytes();
  }
  return bytes;
}

namespace {

// One step of a channel: the elements of its kernel that are its values, and zeros.
struct PackedStep {
  int64_t place; // in a block
  std::array<int64_t, kStepBytes> elements; // of the kernel, or behind it
};

// The steps of all rows of outputs in a group.
std::vector<PackedStep> packed_steps(const Phase& phase, int64_t kernel_columns, int64_t none) {
  const int64_t rows = rows_of_step();
  std::vector<PackedStep> steps;
  for (int64_t output = 0; output < phase.group(); ++output) {
    for (int64_t step = 0; step < phase.row_steps(); ++step) {
      for (int64_t tap = 0; tap < phase.columns.count; ++tap) {
        PackedStep packed{
            output * phase.output_weights_bytes() + (step * phase.columns.count + tap) * kPanelStepBytes, {}};
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t row = step * rows + i - output * phase.rows.step;
          const bool inside = row >= 0 && row < phase.rows.count;
          packed.elements[static_cast<size_t>(i)] =
              inside ? phase.rows.element(row) * kernel_columns + phase.columns.element(tap) : none;
        }
        steps.push_back(packed);
      }
    }
  }
  return steps;
}

// As what the table multiplies; and behind all steps the sum of each channel's elements.
template <typename Value>
void pack_steps(
    const Phase& phase, const std::vector<PackedStep>& steps, const int8_t* weight, int64_t taps, char* to) {
  constexpr size_t kValues = kStepBytes / sizeof(Value);
  const size_t of_output = steps.size() / static_cast<size_t>(phase.group());
  auto* const sums = reinterpret_cast<int32_t*>(to + phase.weights_bytes());
  const int64_t block_bytes = phase.group() * phase.output_weights_bytes();
  std::vector<int8_t> kernel(static_cast<size_t>(taps) + 1);
  for (int64_t channel = 0; channel < phase.channels; ++channel) {
    std::copy_n(weight + channel * taps, taps, kernel.data());
    char* const own = to + channel / kPanelColumns * block_bytes + channel % kPanelColumns * kStepBytes;
    int32_t sum = 0;
    for (size_t step = 0; step < steps.size(); ++step) {
      std::array<Value, kValues> values;
      for (size_t i = 0; i < kValues; ++i) {
        values[i] = kernel[static_cast<size_t>(steps[step].elements[i])];
        sum += step < of_output ? values[i] : 0;
      }
      std::memcpy(own + steps[step].place, values.data(), kStepBytes);
    }
    sums[channel] = sum;
  }
}

void pack_phase(const Phase& phase, const int8_t* weight, int64_t kernel_columns, int64_t taps, char* to) {
  const std::vector<PackedStep> steps = packed_steps(phase, kernel_columns, taps);
  const auto pack = depthwise_table().packing().value_bytes == 1 ? pack_steps<int8_t> : pack_steps<int16_t>;
  pack(phase, steps, weight, taps, to);
}

} // namespace

void depthwise_pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, void* packed) {
  if (has_joined_phases(conv, pass)) {
    joined_pack_weight(conv, weight, packed);
    return;
  }
  std::memset(packed, 0, static_cast<size_t>(depthwise_packed_bytes(conv, pass)));
  auto* to = static_cast<char*>(packed);
  for (int64_t index = 0; index < phases_of(conv, pass); ++index) {
    const Phase phase = phase_of(conv, pass, index);
    pack_phase(phase, weight, conv.columns.kernel, conv.taps(), to);
    to += phase.packed_bytes();
  }
}

int64_t depthwise_workspace_bytes(const Conv2d& conv, Pass pass) {
  if (has_joined_phases(conv, pass)) {
    return joined_workspace_bytes(conv);
  }
  int64_t most = 0;
  for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
    most = std::max(most, Workspace(phase_of(conv, pass, i), nullptr).pieces.bytes());
  }
  return most;
}

namespace {

// What all rows of a phase share.
struct Rows {
  const Phase& phase;
  const int8_t* source;
  int32_t zero_point;
  const char* weights;
  const int32_t* bias;
  const Finish& how;
  int64_t target_rows;
  int64_t target_columns;

  // Rows of outputs of one sample from `begin` up to but without `end`, for panels of channels.
  float operator()(int64_t sample, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel, Workspace& own)
      const {
    float largest = 0;
    for (int64_t panel = first_panel; panel < last_panel; panel += own.cut.panels) {
      const int64_t channel = panel * kPanelColumns;
      const int64_t last = std::min(phase.channels, std::min(last_panel, panel + own.cut.panels) * kPanelColumns);
      largest = std::max(largest, some_channels(sample, begin, end, channel, last - channel, own));
    }
    return largest;
  }

 private:
  float some_channels(int64_t sample, int64_t begin, int64_t end, int64_t channel, int64_t channels, Workspace& own)
      const {
    std::memset(own.padding, zero_point, static_cast<size_t>(channels));
    find_terms(channel, channels, own.terms);
    float largest = 0;
    for (int64_t first = 0; first < phase.columns.outputs; first += own.cut.outputs) {
      const int64_t outputs = std::min(own.cut.outputs, phase.columns.outputs - first);
      const Strip strip{
          source + sample * phase.rows.source * phase.columns.source * phase.channels + channel,
          phase.rows.source,
          phase.columns.source,
          phase.channels,
          phase.columns.start + first * phase.columns.step,
          phase.width_of(outputs),
          channels};
      for (int64_t line = begin; line < end; line += phase.group()) {
        const int64_t start = phase.rows.start + line * phase.rows.step;
        const int64_t lines = std::min(phase.group(), end - line);
        if (own.by_columns) {
          sum_columns(strip, start, lines, outputs, channel, own);
        } else {
          own.rows.move_to<true>(strip, start, line > begin, own.padding);
          sum(lines, outputs, channel, channels, own);
        }
        largest = std::max(largest, finish_lines(sample, line, lines, first, outputs, channel, channels, own));
      }
    }
    return largest;
  }

  // What is added to the sums: the bias, without what the zero point and packing add to each pixel.
  void find_terms(int64_t channel, int64_t channels, int32_t* terms) const {
    const auto* const weight_sums = reinterpret_cast<const int32_t*>(weights + phase.weights_bytes()) + channel;
    const auto offset =
        static_cast<uint32_t>(zero_point) + static_cast<uint32_t>(depthwise_table().packing().left_offset);
    for (int64_t i = 0; i < channels; ++i) {
      const uint32_t of_bias = bias == nullptr ? 0 : static_cast<uint32_t>(bias[channel + i]);
      terms[i] = static_cast<int32_t>(of_bias - offset * static_cast<uint32_t>(weight_sums[i]));
    }
  }

  void sum(int64_t lines, int64_t outputs, int64_t channel, int64_t channels, const Workspace& own) const {
    const int64_t block_bytes = phase.group() * phase.output_weights_bytes();
    depthwise_table().sum_rows(
        {own.rows.steps(),
         phase.row_steps(),
         phase.columns.count,
         lines,
         outputs,
         phase.columns.step,
         phase.columns.spacing,
         divided(channels, kPanelColumns),
         own.rows.block_bytes(),
         weights + channel / kPanelColumns * block_bytes,
         block_bytes,
         phase.output_weights_bytes(),
         own.sums,
         own.cut.channels()});
  }

  void sum_columns(
      const Strip& strip, int64_t start, int64_t lines, int64_t outputs, int64_t channel, const Workspace& own) const {
    const int64_t block_bytes = phase.group() * phase.output_weights_bytes();
    std::array<int64_t, 4> line_sums;
    for (size_t i = 0; i < line_sums.size(); ++i) {
      line_sums[i] = static_cast<int64_t>(i) * outputs * own.cut.channels();
    }
    depthwise_table().sum_columns(
        {own.columns.find(strip, start, own.padding),
         rows_of_step(),
         phase.columns.count,
         phase.columns.step,
         lines,
         outputs,
         strip.channels,
         weights + channel / kPanelColumns * block_bytes,
         block_bytes,
         phase.output_weights_bytes(),
         own.terms,
         0,
         own.sums,
         own.cut.channels(),
         line_sums.data()});
  }

  float finish_lines(
      int64_t sample,
      int64_t line,
      int64_t lines,
      int64_t first,
      int64_t outputs,
      int64_t channel,
      int64_t channels,
      const Workspace& own) const {
    const Taps& rows = phase.rows;
    const Taps& columns = phase.columns;
    int64_t* place = own.places;
    for (int64_t i = 0; i < lines; ++i) {
      const int64_t row = sample * target_rows + rows.first_output + (line + i) * rows.output_step;
      for (int64_t j = 0; j < outputs; ++j) {
        const int64_t column = columns.first_output + (first + j) * columns.output_step;
        *place++ = (row * target_columns + column) * phase.channels + channel;
      }
    }
    const int32_t* const terms = own.by_columns ? nullptr : own.terms;
    return finish(
        how,
        Block<int32_t>{
            own.sums, own.cut.channels(), lines * outputs, channels, own.places, channel, channel, terms, nullptr});
  }
};

} // namespace

float depthwise_pass(
    const Conv2d& conv,
    Pass pass,
    const int8_t* source,
    int32_t zero_point,
    const void* packed,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (has_joined_phases(conv, pass)) {
    return joined_grad_input(conv, source, packed, how, threads, workspace);
  }
  const bool forward = pass == Pass::forward;
  const int64_t target_rows = forward ? conv.rows.output : conv.rows.input;
  const int64_t target_columns = forward ? conv.columns.output : conv.columns.input;
  const int64_t thread_bytes = depthwise_workspace_bytes(conv, pass);
  std::vector<Phase> phases;
  std::vector<const char*> weights;
  const auto* at = static_cast<const char*>(packed);
  int64_t lines = 0;
  for (int64_t index = 0; index < phases_of(conv, pass); ++index) {
    phases.push_back(phase_of(conv, pass, index));
    weights.push_back(at);
    at += phases.back().packed_bytes();
    lines = std::max(lines, phases.back().rows.outputs);
  }
  return share_lines(conv, target_rows * target_columns, lines, how, threads, [&](int64_t thread, const LineRange& some) {
    float largest = 0;
    for (size_t index = 0; index < phases.size(); ++index) {
      const Phase& phase = phases[index];
      Workspace own(phase, static_cast<char*>(workspace) + thread * thread_bytes);
      const Rows rows{phase, source, zero_point, weights[index], bias, how, target_rows, target_columns};
      const int64_t end = std::min(phase.rows.outputs, some.end);
      largest = std::max(largest, rows(some.sample, some.begin, end, some.first_panel, some.last_panel, own));
    }
    return largest;
  });
}

} // namespace torch_odt::kernels::int8
