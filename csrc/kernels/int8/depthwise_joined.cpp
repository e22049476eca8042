#include "depthwise_joined.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "depthwise_columns.h"
#include "depthwise_share.h"
#include "depthwise_tables.h"
#include "memory.h"
#include "taps.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kPhases = 4;
constexpr int64_t kWindow = 2; // pixels of the output's gradient, down and across
constexpr int64_t kPhaseBytes = kPanelStepBytes;
constexpr int64_t kBlockBytes = kPhases * kPhaseBytes;

// Both phases of an axis.
struct Axis {
  std::array<Taps, 2> phases;
  int64_t start; // of what the first two inputs see

  explicit Axis(const WindowAxis& axis)
      : phases{gradient_taps(axis, 0), gradient_taps(axis, 1)}, start(std::min(phases[0].start, phases[1].start)) {}

  int64_t pairs() const {
    return phases[0].outputs;
  }
  // The kernel's element that a phase multiplies a place of the window by, or a negative number.
  int64_t element(size_t phase, int64_t place) const {
    const int64_t tap = place - (phases[phase].start - start);
    return tap >= 0 && tap < phases[phase].count ? phases[phase].element(tap) : -1;
  }
};

int64_t blocks_of(const Conv2d& conv) {
  return divided(conv.in_channels, kPanelColumns);
}

// Channels, and pairs of inputs of a row, that are summed at a time.
struct Cut {
  int64_t channels;
  int64_t pairs;

  Cut(const Conv2d& conv, const Axis& columns)
      : channels(std::min(blocks_of(conv) * kPanelColumns, kChannelsAtOnce)),
        pairs(std::min(columns.pairs(), kCachedSums / kPhases / std::max<int64_t>(1, channels))) {}
};

struct Workspace {
  Pieces pieces;
  int32_t* sums; // [row][column][channel] of two rows of inputs
  int8_t* padding;
  int64_t* places;
  PixelColumns columns;

  Workspace(const Cut& cut, void* at)
      : pieces(at),
        sums(pieces.take<int32_t>(kPhases * cut.pairs * cut.channels)),
        padding(pieces.take<int8_t>(cut.channels + kAlignment)),
        places(pieces.take<int64_t>(kPhases * cut.pairs)),
        columns(kWindow, 1, cut.pairs + 1, pieces) {
    if (padding != nullptr) {
      std::memset(padding, 0, static_cast<size_t>(cut.channels + kAlignment));
    }
  }
};

class Rows {
 public:
  Rows(const Conv2d& conv, const Cut& cut, const int8_t* grad_output, const void* packed, const Finish& how, void* at)
      : conv_(conv),
        cut_(cut),
        grad_output_(grad_output),
        weights_(static_cast<const char*>(packed)),
        terms_(reinterpret_cast<const int32_t*>(weights_ + blocks_of(conv) * kBlockBytes)),
        how_(how),
        own_(cut, at) {}

  float operator()(const LineRange& lines) const {
    float largest = 0;
    const int64_t last = std::min(conv_.in_channels, lines.last_panel * kPanelColumns);
    for (int64_t channel = lines.first_panel * kPanelColumns; channel < last; channel += cut_.channels) {
      for (int64_t line = lines.begin; line < lines.end; ++line) {
        for (int64_t pair = 0; pair < columns_.pairs(); pair += cut_.pairs) {
          const int64_t pairs = std::min(cut_.pairs, columns_.pairs() - pair);
          const int64_t channels = std::min(cut_.channels, last - channel);
          sum(lines.sample, line, pair, pairs, channel, channels);
          largest = std::max(largest, finish_pairs(lines.sample, line, pair, pairs, channel, channels));
        }
      }
    }
    return largest;
  }

 private:
  void sum(int64_t sample, int64_t line, int64_t pair, int64_t pairs, int64_t channel, int64_t channels) const {
    const Strip strip{
        grad_output_ + sample * conv_.rows.output * conv_.columns.output * conv_.in_channels + channel,
        conv_.rows.output,
        conv_.columns.output,
        conv_.in_channels,
        columns_.start + pair,
        pairs + 1,
        channels};
    const int64_t row_sums = 2 * pairs * cut_.channels;
    const std::array<int64_t, kPhases> line_sums = {0, cut_.channels, row_sums, row_sums + cut_.channels};
    // Columns of two pixels lie side by side, so that four of them are those of two columns.
    depthwise_table().sum_columns(
        {own_.columns.find(strip, rows_.start + line, own_.padding),
         kWindow,
         1,
         1,
         kPhases,
         pairs,
         channels,
         weights_ + channel / kPanelColumns * kBlockBytes,
         kBlockBytes,
         kPhaseBytes,
         terms_ + channel,
         blocks_of(conv_) * kPanelColumns,
         own_.sums,
         2 * cut_.channels,
         line_sums.data()});
  }

  // An odd last row or column is left out.
  float finish_pairs(
      int64_t sample, int64_t line, int64_t pair, int64_t pairs, int64_t channel, int64_t channels) const {
    const int64_t rows = std::min<int64_t>(2, conv_.rows.input - 2 * line);
    const int64_t columns = std::min(2 * pairs, conv_.columns.input - 2 * pair);
    int64_t* place = own_.places;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = sample * conv_.rows.input + 2 * line + i;
      for (int64_t j = 0; j < columns; ++j) {
        *place++ = (row * conv_.columns.input + 2 * pair + j) * conv_.in_channels + channel;
      }
    }
    const auto finished = [&](int64_t first, int64_t count) {
      const int32_t* const sums = own_.sums + first * 2 * pairs * cut_.channels;
      const int64_t* const places = own_.places + first * columns;
      return finish(
          how_,
          Block<int32_t>{sums, cut_.channels, count * columns, channels, places, channel, channel, nullptr, nullptr});
    };
    if (columns == 2 * pairs) {
      return finished(0, rows);
    }
    const float first = finished(0, 1);
    return rows > 1 ? std::max(first, finished(1, 1)) : first;
  }

  const Conv2d& conv_;
  const Axis rows_{conv_.rows};
  const Axis columns_{conv_.columns};
  const Cut cut_;
  const int8_t* const grad_output_;
  const char* const weights_;
  const int32_t* const terms_;
  const Finish& how_;
  const Workspace own_;
};

} // namespace

bool has_joined_phases(const Conv2d& conv, Pass pass) {
  const auto fits = [](const WindowAxis& axis) { return axis.kernel == 3 && axis.stride == 2 && axis.dilation == 1; };
  return pass == Pass::grad_input && depthwise_table().sum_columns != nullptr && fits(conv.rows) && fits(conv.columns);
}

// Weights, and behind them what is added to each phase's sums.
int64_t joined_packed_bytes(const Conv2d& conv) {
  return blocks_of(conv) * (kBlockBytes + kPhases * kPanelColumns * static_cast<int64_t>(sizeof(int32_t)));
}

void joined_pack_weight(const Conv2d& conv, const int8_t* weight, void* packed) {
  std::memset(packed, 0, static_cast<size_t>(joined_packed_bytes(conv)));
  auto* const weights = static_cast<int8_t*>(packed);
  const int64_t blocks = blocks_of(conv);
  auto* const terms = reinterpret_cast<int32_t*>(weights + blocks * kBlockBytes);
  const int32_t offset = depthwise_table().packing().left_offset;
  const Axis rows(conv.rows);
  const Axis columns(conv.columns);
  for (int64_t phase = 0; phase < kPhases; ++phase) {
    for (int64_t place = 0; place < kStepBytes; ++place) {
      const int64_t row = rows.element(static_cast<size_t>(phase / 2), place % kWindow);
      const int64_t column = columns.element(static_cast<size_t>(phase % 2), place / kWindow);
      if (row < 0 || column < 0) {
        continue;
      }
      const int8_t* const from = weight + row * conv.columns.kernel + column;
      for (int64_t channel = 0; channel < conv.in_channels; ++channel) {
        const int8_t value = from[channel * conv.taps()];
        const int64_t block = channel / kPanelColumns;
        const int64_t step = (block * kPhases + phase) * kPanelColumns + channel % kPanelColumns;
        weights[step * kStepBytes + place] = value;
        terms[phase * blocks * kPanelColumns + channel] -= offset * value;
      }
    }
  }
}

int64_t joined_workspace_bytes(const Conv2d& conv) {
  return Workspace(Cut(conv, Axis(conv.columns)), nullptr).pieces.bytes();
}

float joined_grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const Cut cut(conv, Axis(conv.columns));
  const int64_t thread_bytes = joined_workspace_bytes(conv);
  const int64_t pairs = Axis(conv.rows).pairs();
  const int64_t pixels = conv.rows.input * conv.columns.input;
  return share_lines(conv, pixels, pairs, how, threads, [&](int64_t thread, const LineRange& lines) {
    return Rows(conv, cut, grad_output, packed, how, static_cast<char*>(workspace) + thread * thread_bytes)(lines);
  });
}

} // namespace torch_odt::kernels::int8
