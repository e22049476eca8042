// Plain C++ for any processor.
#include "depthwise_tables.h"

#include "../isa.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kChannelsAtOnce = 16;

// With as many channels as compilers know, so that they find vectors.
TORCH_ODT_INLINE void add_products(const int8_t* pixel, const int8_t* weights, int64_t count, int32_t* sums) {
  int8_t some[kChannelsAtOnce] = {};
  if (count < kChannelsAtOnce) {
    for (int64_t i = 0; i < count; ++i) {
      some[i] = pixel[i];
    }
    pixel = some;
  }
  for (int64_t i = 0; i < kChannelsAtOnce; ++i) {
    sums[i] += int32_t{pixel[i]} * weights[4 * i];
  }
}

TORCH_ODT_INLINE void sum_channels(const DepthwiseRow& of, int64_t output, int64_t channel) {
  int32_t sums[kChannelsAtOnce] = {};
  const int64_t from = of.first_channel + channel;
  const int64_t first = output / of.group * of.group * of.step;
  const int64_t count = of.channels - channel < kChannelsAtOnce ? of.channels - channel : kChannelsAtOnce;
  for (int64_t row = 0; row < of.kernel_rows; ++row) {
    for (int64_t window = 0; window < of.windows; ++window) {
      const int8_t* const weights =
          of.weights + ((row * of.windows + window) * of.group + output % of.group) * of.weights_stride + from * 4;
      for (int64_t tap = 0; tap < 4; ++tap) {
        const int64_t place = first + (4 * window + tap) * of.spacing;
        add_products(of.pixels[row * of.pixels_stride + place] + from, weights + tap, count, sums);
      }
    }
  }
  int32_t* const to = of.sums + output * of.sums_stride + channel;
  for (int64_t i = 0; i < kChannelsAtOnce; ++i) {
    to[i] = sums[i];
  }
}

TORCH_ODT_INLINE void sum_row_body(const DepthwiseRow* of) {
  for (int64_t output = 0; output < of->outputs; ++output) {
    for (int64_t channel = 0; channel < of->channels; channel += kChannelsAtOnce) {
      sum_channels(*of, output, channel);
    }
  }
}

TORCH_ODT_INLINE void sum_gradient_body(const DepthwiseGradient* of) {
  for (int64_t tap = 0; tap < of->taps; ++tap) {
    for (int64_t channel = 0; channel < of->channels; ++channel) {
      uint32_t sum = 0;
      for (int64_t output = 0; output < of->outputs; ++output) {
        const int8_t* const pixel = of->pixels[output * of->step + tap * of->spacing];
        sum += static_cast<uint32_t>(int32_t{of->grad_output[output][channel]} * pixel[channel]);
      }
      int32_t& to = of->sums[tap * of->sums_stride + channel];
      to = static_cast<int32_t>(static_cast<uint32_t>(to) + sum);
    }
  }
}

void sum_row(const DepthwiseRow& of) {
  run<sum_row_body>(&of);
}

void sum_gradient(const DepthwiseGradient& of) {
  run<sum_gradient_body>(&of);
}

} // namespace

const DepthwiseTable& depthwise_plain() {
  static constexpr DepthwiseTable result = {0, sum_row, sum_gradient};
  return result;
}

} // namespace torch_odt::kernels::int8
