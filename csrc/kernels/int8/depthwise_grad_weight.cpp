#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "depthwise.h"
#include "depthwise_tables.h"
#include "memory.h"
#include "sums.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kSlackPixels = 4;
constexpr int64_t kChannelsOfBlock = 64;
constexpr int64_t kSumsBytes = 1 << 20; // of a thread

int64_t padded_outputs(const Conv2d& conv) {
  return divided(conv.columns.output, 4) * 4;
}

// Pixels that a row of outputs sees.
int64_t width_of(const Conv2d& conv) {
  return (padded_outputs(conv) - 1) * conv.columns.stride + (conv.columns.kernel - 1) * conv.columns.dilation + 1 +
      kSlackPixels;
}

// Channels at a time, in whole vectors.
int64_t channels_at_once(const Conv2d& conv) {
  const int64_t channel_bytes = conv.taps() * static_cast<int64_t>(sizeof(int32_t) + sizeof(int64_t));
  const int64_t panels = std::max<int64_t>(1, kSumsBytes / channel_bytes / kPanelColumns);
  return std::min(divided(conv.in_channels, kPanelColumns), panels) * kPanelColumns;
}

struct Workspace {
  Pieces pieces;
  int32_t* sums; // [tap][channel]
  int64_t* wide_sums; // [channel][tap]
  int32_t* part_bias; // of the output's gradient
  int8_t* zeros;
  int8_t* padding;
  const int8_t** gradients;
  const int8_t** pixels;

  Workspace(const Conv2d& conv, void* at) : pieces(at) {
    const int64_t channels = channels_at_once(conv);
    sums = pieces.take<int32_t>(conv.taps() * channels);
    wide_sums = pieces.take<int64_t>(conv.taps() * channels);
    part_bias = pieces.take<int32_t>(channels);
    zeros = pieces.take<int8_t>(channels + kAlignment);
    padding = pieces.take<int8_t>(channels + kAlignment);
    gradients = pieces.take<const int8_t*>(padded_outputs(conv));
    pixels = pieces.take<const int8_t*>(width_of(conv));
  }
};

// Some channels' gradient.
class ChannelsGradient {
 public:
  ChannelsGradient(const Conv2d& conv, const int8_t* grad_output, const int8_t* input, int32_t zero_point, void* workspace)
      : conv_(conv),
        at_once_(channels_at_once(conv)),
        grad_output_(grad_output),
        input_(input),
        zero_point_(zero_point),
        own_(conv, workspace) {
    std::memset(own_.zeros, 0, static_cast<size_t>(at_once_ + kAlignment));
    std::memset(own_.padding, zero_point, static_cast<size_t>(at_once_ + kAlignment));
  }

  // Of the channels from `first` up to but without `last`.
  float operator()(int64_t first, int64_t last, int64_t* grad_bias, const Finish& how) {
    float largest = 0;
    for (; first < last; first += at_once_) {
      largest = std::max(largest, some(first, std::min(at_once_, last - first), grad_bias, how));
    }
    return largest;
  }

 private:
  float some(int64_t first, int64_t channels, int64_t* grad_bias, const Finish& how) {
    first_ = first;
    channels_ = channels;
    const int64_t lines = conv_.batch * conv_.rows.output;
    const int64_t part = std::max<int64_t>(1, kMostDepth / std::max<int64_t>(1, conv_.columns.output));
    std::fill_n(own_.wide_sums, conv_.taps() * at_once_, 0);
    std::fill_n(grad_bias + first, channels, 0);
    for (int64_t begin = 0; begin < lines; begin += part) {
      const int64_t end = std::min(lines, begin + part);
      std::fill_n(own_.sums, conv_.taps() * at_once_, 0);
      std::fill_n(own_.part_bias, channels, 0);
      for (int64_t line = begin; line < end; ++line) {
        add_line(line);
      }
      widen(grad_bias + first);
    }
    return finish_channels(how);
  }

  void add_line(int64_t line) {
    const int64_t channels = conv_.in_channels;
    const int8_t* const gradients = grad_output_ + line * conv_.columns.output * channels + first_;
    for (int64_t i = 0; i < padded_outputs(conv_); ++i) {
      own_.gradients[i] = i < conv_.columns.output ? gradients + i * channels : own_.zeros;
    }
    add_rows(own_.gradients, conv_.columns.output, channels_, own_.part_bias);
    for (int64_t tap = 0; tap < conv_.rows.kernel; ++tap) {
      const int64_t row = conv_.rows.position(line % conv_.rows.output, tap);
      const bool inside = row >= 0 && row < conv_.rows.input;
      const int64_t place = (line / conv_.rows.output * conv_.rows.input + row) * conv_.columns.input;
      for (int64_t i = 0; i < width_of(conv_); ++i) {
        const int64_t position = i - conv_.columns.padding;
        const bool shown = inside && position >= 0 && position < conv_.columns.input;
        own_.pixels[i] = shown ? input_ + (place + position) * channels + first_ : own_.padding;
      }
      depthwise_table().sum_gradient(
          {own_.gradients,
           own_.pixels,
           padded_outputs(conv_),
           conv_.columns.kernel,
           conv_.columns.stride,
           conv_.columns.dilation,
           channels_,
           own_.sums + tap * conv_.columns.kernel * at_once_,
           at_once_});
    }
  }

  // Takes what int32 holds to where there is room, without what was added to each pixel.
  void widen(int64_t* grad_bias) {
    const int64_t offset = zero_point_ + depthwise_table().pixel_offset;
    for (int64_t channel = 0; channel < channels_; ++channel) {
      grad_bias[channel] += own_.part_bias[channel];
      const auto bias = static_cast<uint32_t>(offset * own_.part_bias[channel]);
      for (int64_t tap = 0; tap < conv_.taps(); ++tap) {
        const auto sum = static_cast<uint32_t>(own_.sums[tap * at_once_ + channel]);
        own_.wide_sums[channel * conv_.taps() + tap] += static_cast<int32_t>(sum - bias);
      }
    }
  }

  float finish_channels(const Finish& how) const {
    return conv_.out_pixels() > kMostDepth ? finish_as<int64_t>(how) : finish_as<int32_t>(how);
  }

  template <typename Sum>
  float finish_as(const Finish& how) const {
    float largest = 0;
    for (int64_t channel = 0; channel < channels_; channel += kChannelsOfBlock) {
      for (int64_t tap = 0; tap < conv_.taps(); tap += kCachedColumns) {
        largest = std::max(largest, finish_block<Sum>(channel, tap, how));
      }
    }
    return largest;
  }

  template <typename Sum>
  float finish_block(int64_t channel, int64_t tap, const Finish& how) const {
    const int64_t rows = std::min(kChannelsOfBlock, channels_ - channel);
    const int64_t columns = std::min(kCachedColumns, conv_.taps() - tap);
    std::array<int64_t, kChannelsOfBlock> places;
    std::array<Sum, kChannelsOfBlock * kCachedColumns> sums;
    for (int64_t row = 0; row < rows; ++row) {
      places[static_cast<size_t>(row)] = (first_ + channel + row) * conv_.taps() + tap;
      const int64_t* const from = own_.wide_sums + (channel + row) * conv_.taps() + tap;
      for (int64_t i = 0; i < columns; ++i) {
        sums[static_cast<size_t>(row * kCachedColumns + i)] = static_cast<Sum>(from[i]);
      }
    }
    return finish(
        how,
        Block<Sum>{sums.data(), kCachedColumns, rows, columns, places.data(), tap, first_ + channel, nullptr, nullptr});
  }

  const Conv2d& conv_;
  const int64_t at_once_;
  const int8_t* const grad_output_;
  const int8_t* const input_;
  const int32_t zero_point_;
  const Workspace own_;
  int64_t first_ = 0;
  int64_t channels_ = 0;
};

} // namespace

int64_t depthwise_grad_weight_workspace_bytes(const Conv2d& conv) {
  return Workspace(conv, nullptr).pieces.bytes();
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
  const int64_t thread_bytes = depthwise_grad_weight_workspace_bytes(conv);
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  threads.share(divided(conv.in_channels, kPanelColumns), [&](int64_t thread, int64_t begin, int64_t end) {
    ChannelsGradient gradient(
        conv, grad_output, input, zero_point, static_cast<char*>(workspace) + thread * thread_bytes);
    const int64_t first = begin * kPanelColumns;
    const int64_t last = std::min(conv.in_channels, end * kPanelColumns);
    largest[static_cast<size_t>(thread)] = gradient(first, last, grad_bias, how);
  });
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
