// Depthwise convolutions and their gradients, against sums in double: every border, however the work is cut, and nothing
// beside what is written.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/depthwise.h"
#include "samples.h"

namespace torch_odt::tests {
namespace {

using kernels::Depthwise;
using kernels::WindowAxis;

constexpr int64_t kSamples = 2;
constexpr float kBeside = 12345.0F;

WindowAxis window_axis(int64_t input, int64_t kernel, int64_t stride, int64_t padding) {
  return {input, (input + 2 * padding - kernel) / stride + 1, kernel, stride, padding, 1};
}

std::vector<Depthwise> convolutions() {
  std::vector<Depthwise> result;
  for (const int64_t channels : {1, 3, 4, 9, 16, 40, 70}) {
    result.push_back({window_axis(9, 3, 1, 1), window_axis(11, 3, 1, 1), channels});
    result.push_back({window_axis(9, 3, 2, 1), window_axis(12, 3, 2, 1), channels});
    result.push_back({window_axis(8, 5, 1, 2), window_axis(13, 7, 1, 3), channels});
    result.push_back({window_axis(7, 5, 2, 2), window_axis(10, 7, 3, 6), channels});
    // Windows that are apart, larger than the image, or of one element.
    result.push_back({window_axis(9, 2, 3, 0), window_axis(7, 1, 4, 0), channels});
    result.push_back({window_axis(1, 3, 1, 1), window_axis(2, 5, 1, 3), channels});
  }
  return result;
}

std::string name_of(const Depthwise& conv) {
  return "windows of " + std::to_string(conv.rows.kernel) + " x " + std::to_string(conv.columns.kernel) + ", stride " +
      std::to_string(conv.columns.stride) + ", " + std::to_string(conv.channels) + " channels";
}

std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::vector<float> result(static_cast<size_t>(count));
  uint32_t state = seed;
  for (float& value : result) {
    state = state * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int32_t>(state >> 8) - (1 << 23)) / (1 << 22);
  }
  return result;
}

struct ConvolutionSums {
  std::vector<double> output;
  std::vector<double> grad_input;
  std::vector<double> grad_taps;
};

struct Convolved {
  Depthwise conv;
  std::vector<float> input, taps, bias, gradient;

  explicit Convolved(const Depthwise& of)
      : conv(of),
        input(numbers(kSamples * of.rows.input * of.columns.input * of.channels, 1)),
        taps(numbers(of.taps() * of.channels, 2)),
        bias(numbers(of.channels, 3)),
        gradient(numbers(kSamples * of.rows.output * of.columns.output * of.channels, 4)) {}

  ConvolutionSums sums() const {
    ConvolutionSums found{
        std::vector<double>(gradient.size()), std::vector<double>(input.size()), std::vector<double>(taps.size())};
    for (int64_t row = 0; row < kSamples * conv.rows.output; ++row) {
      for (int64_t column = 0; column < conv.columns.output; ++column) {
        for (int64_t channel = 0; channel < conv.channels; ++channel) {
          add_window(row / conv.rows.output, row % conv.rows.output, column, channel, found);
        }
      }
    }
    return found;
  }

 private:
  void add_window(int64_t sample, int64_t row, int64_t column, int64_t channel, ConvolutionSums& found) const {
    const auto at = static_cast<size_t>(
        ((sample * conv.rows.output + row) * conv.columns.output + column) * conv.channels + channel);
    found.output[at] = bias[static_cast<size_t>(channel)];
    for (int64_t tap = 0; tap < conv.taps(); ++tap) {
      const int64_t y = conv.rows.position(row, tap / conv.columns.kernel);
      const int64_t x = conv.columns.position(column, tap % conv.columns.kernel);
      if (y < 0 || y >= conv.rows.input || x < 0 || x >= conv.columns.input) {
        continue;
      }
      const auto from = static_cast<size_t>(
          ((sample * conv.rows.input + y) * conv.columns.input + x) * conv.channels + channel);
      const auto by = static_cast<size_t>(tap * conv.channels + channel);
      found.output[at] += static_cast<double>(input[from]) * taps[by];
      found.grad_input[from] += static_cast<double>(gradient[at]) * taps[by];
      found.grad_taps[by] += static_cast<double>(gradient[at]) * input[from];
    }
  }
};

void check_near(const std::vector<float>& ours, const std::vector<double>& exact, const std::string& what) {
  double furthest = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    furthest = std::max(furthest, std::abs(ours[i] - exact[i]));
  }
  const Context context(what);
  CHECK_NEAR(furthest, 0.0, 1e-4);
  CHECK_EQUAL(ours.back(), kBeside);
}

std::vector<float> room_for(size_t count) {
  return std::vector<float>(count + 1, kBeside);
}

TEST(depthwise_sums_of_each_window) {
  for (const Depthwise& conv : convolutions()) {
    const Convolved sample(conv);
    const ConvolutionSums exact = sample.sums();
    auto output = room_for(sample.gradient.size());
    auto grad_input = room_for(sample.input.size());
    auto grad_taps = room_for(sample.taps.size());
    const int64_t rows = kSamples * conv.rows.output;
    kernels::depthwise_rows(
        sample.input.data(), sample.taps.data(), sample.bias.data(), conv, 0, rows, output.data());
    kernels::depthwise_grad_input_rows(
        sample.gradient.data(), sample.taps.data(), conv, 0, kSamples * conv.rows.input, grad_input.data());
    kernels::depthwise_grad_weight_channels(
        sample.gradient.data(), sample.input.data(), conv, kSamples, 0, conv.channels, grad_taps.data());
    check_near(output, exact.output, "output, " + name_of(conv));
    check_near(grad_input, exact.grad_input, "input's gradient, " + name_of(conv));
    check_near(grad_taps, exact.grad_taps, "weight's gradient, " + name_of(conv));
  }
}

TEST(depthwise_parts_have_the_bits_of_the_whole) {
  for (const Depthwise& conv : convolutions()) {
    const Convolved sample(conv);
    const int64_t rows = kSamples * conv.rows.output;
    auto whole = room_for(sample.gradient.size());
    auto parts = room_for(sample.gradient.size());
    kernels::depthwise_rows(sample.input.data(), sample.taps.data(), nullptr, conv, 0, rows, whole.data());
    for (int64_t row = 0; row < rows; ++row) {
      kernels::depthwise_rows(sample.input.data(), sample.taps.data(), nullptr, conv, row, row + 1, parts.data());
    }
    const Context context(name_of(conv));
    CHECK(whole == parts);
    auto all = room_for(sample.taps.size());
    auto some = room_for(sample.taps.size());
    const int64_t half = conv.channels / 2;
    kernels::depthwise_grad_weight_channels(
        sample.gradient.data(), sample.input.data(), conv, kSamples, 0, conv.channels, all.data());
    for (const auto& [begin, end] : {std::array{int64_t{0}, half}, std::array{half, conv.channels}}) {
      if (begin < end) {
        kernels::depthwise_grad_weight_channels(
            sample.gradient.data(), sample.input.data(), conv, kSamples, begin, end, some.data());
      }
    }
    CHECK(all == some);
  }
}

} // namespace
} // namespace torch_odt::tests
