#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "depthwise.h"
#include "depthwise_columns.h"
#include "depthwise_rows.h"
#include "depthwise_tables.h"
#include "memory.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows of so many channels stay in the first cache; parts of others would leave vectors half empty.
constexpr int64_t kChannelsAtOnce = 128;
constexpr int64_t kMostChannels = 192;
constexpr int64_t kTapsAtOnce = 128;
constexpr int64_t kPackedBytes = 131072; // at a time, where some outputs of a row fit into it
constexpr int64_t kSumsBytes = 1 << 20; // of a thread
constexpr int64_t kFewOutputs = 8; // of a row at a time

// How many panels of channels, and outputs of a row, are summed at a time.
struct Cut {
  int64_t panels;
  int64_t outputs;

  explicit Cut(const Conv2d& conv) {
    const int64_t channel_bytes = conv.taps() * static_cast<int64_t>(sizeof(int32_t) + sizeof(int64_t));
    const int64_t fitting = std::max<int64_t>(1, kSumsBytes / channel_bytes / kPanelColumns);
    const int64_t at_once = conv.in_channels <= kMostChannels ? kMostChannels : kChannelsAtOnce;
    panels = std::min({divided(conv.in_channels, kPanelColumns), at_once / kPanelColumns, fitting});
    outputs = conv.columns.output;
    for (int64_t parts = 2; outputs > kFewOutputs && packed_bytes(conv) > kPackedBytes; ++parts) {
      outputs = divided(conv.columns.output, parts);
    }
  }

  int64_t channels() const {
    return panels * kPanelColumns;
  }
  // Columns that some outputs of a row see.
  static int64_t width_of(const Conv2d& conv, int64_t outputs) {
    return outputs == 0 ? 0 : conv.columns.position(outputs - 1, conv.columns.kernel - 1) - conv.columns.position(0, 0) + 1;
  }
  int64_t packed_bytes(const Conv2d& conv) const {
    return (outputs + conv.rows.kernel * width_of(conv, outputs)) * panels * kPanelStepBytes;
  }
};

// The rows that all rows of a kernel see from as many rows of outputs as a step holds.
RowSteps pixel_steps(const Conv2d& conv) {
  return {conv.rows.kernel, conv.rows.dilation, conv.rows.stride, rows_of_step() * conv.rows.stride};
}

// Whether the table has sums that come straight from the images.
bool goes_by_columns(const Conv2d& conv) {
  const auto fits = [](const WindowAxis& axis) { return axis.kernel == 3 && axis.dilation == 1; };
  const bool evenly = conv.rows.stride == conv.columns.stride && conv.rows.stride <= 2;
  return depthwise_table().sum_columns_gradient != nullptr && fits(conv.rows) && fits(conv.columns) && evenly;
}

// Those that four rows of outputs see.
int64_t rows_of_columns(const Conv2d& conv) {
  return (rows_of_step() - 1) * conv.rows.stride + conv.rows.kernel;
}

struct Workspace {
  Pieces pieces;
  Cut cut;
  int32_t* sums; // [tap][channel]
  int64_t* wide_sums; // [channel][tap], of those at a time, or of all
  int64_t* bias; // of all, or null
  int32_t* part_bias; // of the output's gradient
  int8_t* zeros;
  int8_t* padding;
  // Both images are read where they lie, or packed: room for so many outputs' of either.
  int64_t packed_outputs;
  PackedRows gradients;
  PackedRows pixels;
  int64_t read_outputs;
  PixelColumns gradient_columns;
  PixelColumns pixel_columns;

  Workspace(const Conv2d& conv, bool of_samples, void* at)
      : pieces(at),
        cut(conv),
        sums(pieces.take<int32_t>(conv.taps() * cut.channels())),
        wide_sums(pieces.take<int64_t>(conv.taps() * (of_samples ? conv.in_channels : cut.channels()))),
        bias(pieces.take<int64_t>(of_samples ? conv.in_channels : 0)),
        part_bias(pieces.take<int32_t>(cut.channels())),
        zeros(pieces.take<int8_t>(cut.channels() + kAlignment)),
        padding(pieces.take<int8_t>(cut.channels() + kAlignment)),
        packed_outputs(goes_by_columns(conv) ? 0 : cut.outputs),
        gradients({1, 1, 1, rows_of_step()}, packed_outputs, cut.channels(), true, pieces),
        pixels(pixel_steps(conv), Cut::width_of(conv, packed_outputs), cut.channels(), true, pieces),
        read_outputs(cut.outputs - packed_outputs),
        gradient_columns(rows_of_step(), 1, read_outputs, pieces),
        pixel_columns(rows_of_columns(conv), 1, Cut::width_of(conv, read_outputs), pieces) {}
};

// The gradient of some channels, or of some samples.
class ChannelsGradient {
 public:
  ChannelsGradient(
      const Conv2d& conv,
      const int8_t* grad_output,
      const int8_t* input,
      int32_t zero_point,
      bool of_samples,
      void* workspace)
      : conv_(conv), grad_output_(grad_output), input_(input), zero_point_(zero_point), own_(conv, of_samples, workspace) {
    std::memset(own_.zeros, 0, static_cast<size_t>(own_.cut.channels() + kAlignment));
    std::memset(own_.padding, zero_point, static_cast<size_t>(own_.cut.channels() + kAlignment));
  }

  // Of the channels from `first` up to but without `last`.
  float operator()(int64_t first, int64_t last, int64_t* grad_bias, const Finish& how) {
    float largest = 0;
    for (const int64_t at_once = own_.cut.channels(); first < last; first += at_once) {
      const int64_t channels = std::min(at_once, last - first);
      sum(first, channels, 0, conv_.batch, own_.wide_sums, grad_bias);
      largest = std::max(largest, finish_channels(first, channels, own_.wide_sums, how));
    }
    return largest;
  }

  // Sums over samples, to be added up with those of others before channels are finished.
  void sum_samples(int64_t begin, int64_t end) {
    const int64_t at_once = own_.cut.channels();
    for (int64_t first = 0; first < conv_.in_channels; first += at_once) {
      const int64_t channels = std::min(at_once, conv_.in_channels - first);
      sum(first, channels, begin, end, own_.wide_sums + first * conv_.taps(), own_.bias);
    }
  }

  void add(const ChannelsGradient& other) {
    for (int64_t i = 0; i < conv_.in_channels * conv_.taps(); ++i) {
      own_.wide_sums[i] += other.own_.wide_sums[i];
    }
    for (int64_t channel = 0; channel < conv_.in_channels; ++channel) {
      own_.bias[channel] += other.own_.bias[channel];
    }
  }

  float finish_samples(int64_t* grad_bias, const Finish& how) const {
    std::copy_n(own_.bias, conv_.in_channels, grad_bias);
    return finish_channels(0, conv_.in_channels, own_.wide_sums, how);
  }

 private:
  void sum(int64_t first, int64_t channels, int64_t begin, int64_t end, int64_t* wide_sums, int64_t* grad_bias) {
    first_ = first;
    channels_ = channels;
    wide_sums_ = wide_sums;
    std::fill_n(wide_sums, conv_.taps() * channels, 0);
    std::fill_n(grad_bias + first, channels, 0);
    clear();
    const int64_t at_once = std::max<int64_t>(1, own_.cut.outputs);
    for (int64_t output = 0; output < conv_.columns.output; output += at_once) {
      for (int64_t sample = begin; sample < end; ++sample) {
        add_sample(sample, output, std::min(at_once, conv_.columns.output - output), grad_bias + first);
      }
    }
    widen(grad_bias + first);
  }

  void clear() {
    terms_ = 0;
    std::fill_n(own_.sums, conv_.taps() * own_.cut.channels(), 0);
    std::fill_n(own_.part_bias, own_.cut.channels(), 0);
  }

  // Some outputs of all rows.
  void add_sample(int64_t sample, int64_t first, int64_t outputs, int64_t* grad_bias) {
    const int64_t pixel_stride = conv_.in_channels;
    const Strip gradients{
        grad_output_ + sample * conv_.rows.output * conv_.columns.output * pixel_stride + first_,
        conv_.rows.output,
        conv_.columns.output,
        pixel_stride,
        first,
        outputs,
        channels_};
    const Strip pixels{
        input_ + sample * conv_.rows.input * conv_.columns.input * pixel_stride + first_,
        conv_.rows.input,
        conv_.columns.input,
        pixel_stride,
        conv_.columns.position(first, 0),
        Cut::width_of(conv_, outputs),
        channels_};
    for (int64_t line = 0; line < conv_.rows.output; line += rows_of_step()) {
      const int64_t terms = outputs * rows_of_step();
      if (terms_ + terms > kMostDepth) {
        widen(grad_bias);
        clear();
      }
      terms_ += terms;
      if (by_columns_) {
        add_columns(gradients, pixels, line);
        continue;
      }
      own_.gradients.move_to<false>(gradients, line, false, own_.zeros, adds_columns() ? own_.part_bias : nullptr);
      own_.pixels.move_to<true>(pixels, conv_.rows.position(line, 0), line > 0, own_.padding);
      add_lines(outputs);
    }
  }

  void add_columns(const Strip& gradients, const Strip& pixels, int64_t line) {
    depthwise_table().sum_columns_gradient(
        {own_.gradient_columns.find(gradients, line, own_.zeros),
         own_.pixel_columns.find(pixels, conv_.rows.position(line, 0), own_.padding),
         conv_.columns.stride,
         gradients.width,
         channels_,
         own_.sums,
         own_.cut.channels(),
         own_.part_bias});
  }

  void add_lines(int64_t outputs) {
    depthwise_table().sum_gradient(
        {own_.gradients.steps()[0],
         own_.gradients.block_bytes(),
         own_.pixels.steps(),
         own_.pixels.block_bytes(),
         conv_.rows.kernel,
         conv_.columns.kernel,
         outputs,
         conv_.columns.stride,
         conv_.columns.dilation,
         divided(channels_, kPanelColumns),
         own_.sums,
         own_.cut.channels(),
         adds_columns() ? nullptr : own_.part_bias});
  }

  static bool adds_columns() {
    return depthwise_table().packing().adds_columns;
  }

  // Takes what int32 holds to where there is room, without what was added to each pixel.
  void widen(int64_t* grad_bias) {
    const int64_t offset = zero_point_ + depthwise_table().packing().left_offset;
    const bool by_lanes = depthwise_table().packing().packs_by_lanes;
    for (int64_t channel = 0; channel < channels_; ++channel) {
      const bool moved = by_lanes && channel < channels_ / 64 * 64;
      const int32_t* const sums = own_.sums + (moved ? lane_of(channel) : channel);
      const int32_t part_bias = own_.part_bias[moved ? lane_of(channel) : channel];
      grad_bias[channel] += part_bias;
      const auto bias = static_cast<uint32_t>(offset * part_bias);
      for (int64_t tap = 0; tap < conv_.taps(); ++tap) {
        const auto sum = static_cast<uint32_t>(sums[tap * own_.cut.channels()]);
        wide_sums_[channel * conv_.taps() + tap] += static_cast<int32_t>(sum - bias);
      }
    }
  }

  float finish_channels(int64_t first, int64_t channels, const int64_t* wide_sums, const Finish& how) const {
    return conv_.out_pixels() > kMostDepth ? finish_as<int64_t>(first, channels, wide_sums, how)
                                           : finish_as<int32_t>(first, channels, wide_sums, how);
  }

  template <typename Sum>
  float finish_as(int64_t first, int64_t channels, const int64_t* wide_sums, const Finish& how) const {
    float largest = 0;
    for (int64_t channel = 0; channel < channels; channel += kMostChannels) {
      const int64_t rows = std::min(kMostChannels, channels - channel);
      for (int64_t tap = 0; tap < conv_.taps(); tap += kTapsAtOnce) {
        const int64_t* const from = wide_sums + channel * conv_.taps() + tap;
        largest = std::max(largest, finish_block<Sum>(first + channel, rows, tap, from, how));
      }
    }
    return largest;
  }

  template <typename Sum>
  float finish_block(int64_t channel, int64_t rows, int64_t tap, const int64_t* wide_sums, const Finish& how) const {
    const int64_t columns = std::min(kTapsAtOnce, conv_.taps() - tap);
    std::array<int64_t, kMostChannels> places;
    std::array<Sum, kMostChannels * kTapsAtOnce> sums;
    for (int64_t row = 0; row < rows; ++row) {
      places[static_cast<size_t>(row)] = (channel + row) * conv_.taps() + tap;
      for (int64_t i = 0; i < columns; ++i) {
        sums[static_cast<size_t>(row * kTapsAtOnce + i)] = static_cast<Sum>(wide_sums[row * conv_.taps() + i]);
      }
    }
    return finish(
        how, Block<Sum>{sums.data(), kTapsAtOnce, rows, columns, places.data(), tap, channel, nullptr, nullptr});
  }

  const Conv2d& conv_;
  const bool by_columns_ = goes_by_columns(conv_);
  const int8_t* const grad_output_;
  const int8_t* const input_;
  const int32_t zero_point_;
  Workspace own_;
  int64_t* wide_sums_ = nullptr; // of the channels at a time
  int64_t first_ = 0;
  int64_t channels_ = 0;
  int64_t terms_ = 0; // of the sums in int32
};

} // namespace

bool shares_samples(const Conv2d& conv, const Threads& threads) {
  const bool evenly = divided(conv.batch, threads.count) * threads.count * 10 <= conv.batch * 11;
  return threads.count > 1 && threads.count <= conv.batch && evenly && conv.in_channels < kMostChannels * threads.count &&
      Workspace(conv, true, nullptr).pieces.bytes() <= kMostWorkspaceBytes;
}

int64_t depthwise_grad_weight_workspace_bytes(const Conv2d& conv, const Threads& threads) {
  return Workspace(conv, shares_samples(conv, threads), nullptr).pieces.bytes();
}

float depthwise_grad_weight(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* input,
    int32_t zero_point,
    int64_t* grad_bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const bool of_samples = shares_samples(conv, threads);
  const int64_t thread_bytes = depthwise_grad_weight_workspace_bytes(conv, threads);
  const auto part = [&](int64_t thread) {
    char* const own = static_cast<char*>(workspace) + thread * thread_bytes;
    return ChannelsGradient(conv, grad_output, input, zero_point, of_samples, own);
  };
  if (of_samples) {
    std::vector<ChannelsGradient> parts;
    for (int64_t thread = 0; thread < threads.count; ++thread) {
      parts.push_back(part(thread));
    }
    threads.share(conv.batch, [&](int64_t thread, int64_t begin, int64_t end) {
      parts[static_cast<size_t>(thread)].sum_samples(begin, end);
    });
    for (size_t thread = 1; thread < parts.size(); ++thread) {
      parts.front().add(parts[thread]);
    }
    return parts.front().finish_samples(grad_bias, how);
  }
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  threads.share(divided(conv.in_channels, kPanelColumns), [&](int64_t thread, int64_t begin, int64_t end) {
    const int64_t last = std::min(conv.in_channels, end * kPanelColumns);
    largest[static_cast<size_t>(thread)] = part(thread)(begin * kPanelColumns, last, grad_bias, how);
  });
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
