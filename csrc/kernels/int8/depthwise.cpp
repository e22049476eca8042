#include "depthwise.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "depthwise_tables.h"
#include "memory.h"
#include "taps.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kMostOutputs = 64; // of a row at a time, so that their sums stay in the first cache
constexpr int64_t kSlackPixels = 8; // beyond the last tap of a row, for whole windows and groups
// What a thread's workspace has room for.
constexpr int64_t kMostPointers = 65536;
constexpr int64_t kMostChannels = 131072;

// One phase of a pass, see taps.h.
struct Phase {
  Taps rows;
  Taps columns;
  int64_t channels;

  int64_t padded_channels() const {
    return divided(channels, kPanelColumns) * kPanelColumns;
  }
  int64_t group() const {
    return columns.spacing == 1 ? 2 : 1;
  }
  // Of four pixels each, over all taps of a group of outputs.
  int64_t windows() const {
    return divided(columns.count + (group() - 1) * columns.step, 4);
  }
  int64_t weights_stride() const {
    return padded_channels() * 4;
  }
  int64_t weights_bytes() const {
    return aligned(rows.count * windows() * group() * weights_stride());
  }
  // Weights, and behind them the sum of each channel's.
  int64_t packed_bytes() const {
    return weights_bytes() + aligned(padded_channels() * 4);
  }
  // Pixels that some outputs of a row see.
  int64_t width_of(int64_t outputs) const {
    const int64_t whole = divided(outputs, group()) * group();
    return (whole - 1) * columns.step + 4 * std::max<int64_t>(1, windows()) * columns.spacing + kSlackPixels;
  }
  bool fits(int64_t outputs) const {
    return rows.count * width_of(outputs) <= kMostPointers;
  }
  // Outputs of a row whose pixels are found at a time.
  int64_t outputs_at_once() const {
    int64_t outputs = columns.outputs;
    while (outputs > kMostOutputs && !fits(outputs)) {
      outputs = divided(outputs / 2, kMostOutputs) * kMostOutputs;
    }
    return outputs;
  }
  // Pixels that those see.
  int64_t width() const {
    return width_of(outputs_at_once());
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

struct Workspace {
  Pieces pieces;
  int32_t* sums;
  int32_t* terms; // added to the sums of each channel
  int8_t* padding;
  const int8_t** pixels;

  Workspace(const Conv2d& conv, Pass pass, void* at) : pieces(at) {
    int64_t pointers = 0;
    for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
      const Phase phase = phase_of(conv, pass, i);
      pointers = std::max(pointers, phase.rows.count * phase.width());
    }
    sums = pieces.take<int32_t>((kMostOutputs + 2) * kCachedColumns);
    terms = pieces.take<int32_t>(conv.in_channels);
    padding = pieces.take<int8_t>(conv.in_channels + kAlignment);
    pixels = pieces.take<const int8_t*>(pointers);
  }
};

// A row of an image, from `start` on in the given number of pixels; what is not in the image is padding.
void find_pixels(
    const int8_t* row, int64_t size, int64_t start, int64_t channels, const int8_t* padding, int64_t count, const int8_t** to) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = start + i;
    to[i] = row == nullptr || position < 0 || position >= size ? padding : row + position * channels;
  }
}

} // namespace

bool goes_by_windows(const Conv2d& conv, Pass pass) {
  if (!conv.depthwise() || conv.taps() > kMostDepth || conv.in_channels > kMostChannels) {
    return false;
  }
  for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
    if (!phase_of(conv, pass, i).fits(kMostOutputs)) {
      return false;
    }
  }
  return true;
}

int64_t depthwise_packed_bytes(const Conv2d& conv, Pass pass) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < phases_of(conv, pass); ++i) {
    bytes += phase_of(conv, pass, i).packed_bytes();
  }
  return bytes;
}

void depthwise_pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, void* packed) {
  std::memset(packed, 0, static_cast<size_t>(depthwise_packed_bytes(conv, pass)));
  auto* to = static_cast<int8_t*>(packed);
  for (int64_t index = 0; index < phases_of(conv, pass); ++index) {
    const Phase phase = phase_of(conv, pass, index);
    auto* const sums = reinterpret_cast<int32_t*>(to + phase.weights_bytes());
    for (int64_t row = 0; row < phase.rows.count; ++row) {
      for (int64_t tap = 0; tap < phase.columns.count; ++tap) {
        const int8_t* const from =
            weight + phase.rows.element(row) * conv.columns.kernel + phase.columns.element(tap);
        for (int64_t output = 0; output < phase.group(); ++output) {
          const int64_t place = tap + output * phase.columns.step;
          const int64_t window = row * phase.windows() + place / 4;
          int8_t* const group = to + (window * phase.group() + output) * phase.weights_stride() + place % 4;
          for (int64_t channel = 0; channel < phase.channels; ++channel) {
            group[channel * 4] = from[channel * conv.taps()];
          }
        }
        for (int64_t channel = 0; channel < phase.channels; ++channel) {
          sums[channel] += from[channel * conv.taps()];
        }
      }
    }
    to += phase.packed_bytes();
  }
}

int64_t depthwise_workspace_bytes(const Conv2d& conv, Pass pass) {
  return Workspace(conv, pass, nullptr).pieces.bytes();
}

namespace {

// What all rows of a phase share.
struct Rows {
  const Phase& phase;
  const int8_t* source;
  int32_t zero_point;
  const int8_t* weights;
  const int32_t* bias;
  const Finish& how;
  int64_t target_rows;
  int64_t target_columns;

  // What a thread needs before its first row.
  void prepare(const Workspace& own) const {
    std::memset(own.padding, zero_point, static_cast<size_t>(phase.channels + kAlignment));
    const auto* const weight_sums = reinterpret_cast<const int32_t*>(weights + phase.weights_bytes());
    const auto offset = static_cast<uint32_t>(zero_point) + static_cast<uint32_t>(depthwise_table().pixel_offset);
    for (int64_t channel = 0; channel < phase.channels; ++channel) {
      const uint32_t of_bias = bias == nullptr ? 0 : static_cast<uint32_t>(bias[channel]);
      own.terms[channel] = static_cast<int32_t>(of_bias - offset * static_cast<uint32_t>(weight_sums[channel]));
    }
  }

  // One row of outputs, numbered through all samples.
  float operator()(int64_t line, const Workspace& own) const {
    float largest = 0;
    const int64_t at_once = phase.outputs_at_once();
    for (int64_t begin = 0; begin < phase.columns.outputs; begin += at_once) {
      const int64_t end = std::min(phase.columns.outputs, begin + at_once);
      find_all_pixels(line, begin, own);
      for (int64_t first = begin; first < end; first += kMostOutputs) {
        const int64_t outputs = std::min(kMostOutputs, end - first);
        const int8_t* const* const pixels = own.pixels + (first - begin) * phase.columns.step;
        for (int64_t channel = 0; channel < phase.channels; channel += kCachedColumns) {
          largest = std::max(largest, block(line, first, outputs, channel, pixels, own));
        }
      }
    }
    return largest;
  }

 private:
  // From an output of the row on.
  void find_all_pixels(int64_t line, int64_t first, const Workspace& own) const {
    const Taps& rows = phase.rows;
    const int64_t row_bytes = phase.columns.source * phase.channels;
    for (int64_t tap = 0; tap < rows.count; ++tap) {
      const int64_t row = rows.start + line % rows.outputs * rows.step + tap * rows.spacing;
      const bool inside = row >= 0 && row < rows.source;
      const int8_t* const from = inside ? source + (line / rows.outputs * rows.source + row) * row_bytes : nullptr;
      const int8_t** const to = own.pixels + tap * phase.width();
      const int64_t start = phase.columns.start + first * phase.columns.step;
      find_pixels(from, phase.columns.source, start, phase.channels, own.padding, phase.width(), to);
    }
  }

  float block(
      int64_t line,
      int64_t first,
      int64_t outputs,
      int64_t channel,
      const int8_t* const* pixels,
      const Workspace& own) const {
    const Taps& columns = phase.columns;
    const int64_t width = std::min(kCachedColumns, phase.channels - channel);
    depthwise_table().sum_row(
        {pixels,
         phase.width(),
         phase.rows.count,
         phase.windows(),
         outputs,
         phase.group(),
         columns.step,
         columns.spacing,
         channel,
         width,
         weights,
         phase.weights_stride(),
         own.sums,
         kCachedColumns});
    const Taps& rows = phase.rows;
    const int64_t row =
        line / rows.outputs * target_rows + rows.first_output + line % rows.outputs * rows.output_step;
    std::array<int64_t, kMostOutputs> places;
    for (int64_t i = 0; i < outputs; ++i) {
      const int64_t column = columns.first_output + (first + i) * columns.output_step;
      places[static_cast<size_t>(i)] = (row * target_columns + column) * phase.channels + channel;
    }
    return finish(
        how,
        Block<int32_t>{own.sums, kCachedColumns, outputs, width, places.data(), channel, channel, own.terms + channel, nullptr});
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
  const bool forward = pass == Pass::forward;
  const int64_t thread_bytes = depthwise_workspace_bytes(conv, pass);
  const auto* weights = static_cast<const int8_t*>(packed);
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  for (int64_t index = 0; index < phases_of(conv, pass); ++index) {
    const Phase phase = phase_of(conv, pass, index);
    const Rows rows{
        phase,
        source,
        zero_point,
        weights,
        bias,
        how,
        forward ? conv.rows.output : conv.rows.input,
        forward ? conv.columns.output : conv.columns.input};
    // Threads share no byte of a mask.
    const int64_t together = how.mask == nullptr ? 1 : 8;
    const int64_t lines = conv.batch * phase.rows.outputs;
    threads.share(divided(lines, together), [&](int64_t thread, int64_t begin, int64_t end) {
      const Workspace own(conv, pass, static_cast<char*>(workspace) + thread * thread_bytes);
      rows.prepare(own);
      float& most = largest[static_cast<size_t>(thread)];
      for (int64_t line = begin * together; line < std::min(lines, end * together); ++line) {
        most = std::max(most, rows(line, own));
      }
    });
    weights += phase.packed_bytes();
  }
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
