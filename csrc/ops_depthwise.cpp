// Depthwise convolutions of float32 images in channels_last and their gradients. Shapes for tracing are registered in
// torch_odt/ops.

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/depthwise.h"
#include "ops_channels.h"
#include "ops_images.h"
#include "ops_tensors.h"

namespace {

using namespace torch_odt;

constexpr char kForward[] = "depthwise_conv2d";
constexpr char kGradInput[] = "depthwise_conv2d_grad_input";
constexpr char kGradWeight[] = "depthwise_conv2d_grad_weight";
// What a graph from elsewhere may say of windows and images: beyond these, places in memory would be out of bounds.
constexpr int64_t kMostTaps = 65536;
constexpr int64_t kMostPixels = std::numeric_limits<int32_t>::max();
// Channels whose gradients a thread makes together.
constexpr int64_t kChannelBlock = 64;

void check_weight(const char* name, const Tensor& weight, int64_t channels) {
  check_images(name, weight, "weight");
  STD_TORCH_CHECK(
      weight.size(0) == channels && weight.size(1) == 1,
      name,
      ": weight must have the shape (channels, 1, rows, columns)");
}

kernels::Depthwise conv_of(
    const char* name,
    const Sizes& images,
    const Sizes& kernel_size,
    const Sizes& stride,
    const Sizes& padding) {
  for (const auto* pair : {&kernel_size, &stride, &padding}) {
    STD_TORCH_CHECK(pair->size() == 2, name, ": windows are described by two numbers, for rows and for columns");
  }
  const auto axis = [&](size_t which) {
    const int64_t input = images[2 + which];
    const int64_t kernel = kernel_size[which];
    STD_TORCH_CHECK(
        input > 0 && kernel > 0 && stride[which] > 0 && padding[which] >= 0 && padding[which] < kernel,
        name,
        ": images, kernel size and stride must be positive, and padding less than the kernel size");
    STD_TORCH_CHECK(
        input <= kMostPixels && kernel <= kMostTaps, name, ": images or windows are larger than any can be");
    const int64_t reach = input + 2 * padding[which] - kernel;
    STD_TORCH_CHECK(reach >= 0, name, ": the input is too small for a window");
    // Of a single window the stride means nothing.
    const int64_t step = std::min(stride[which], reach + 1);
    return kernels::WindowAxis{input, reach / step + 1, kernel, step, padding[which], 1};
  };
  STD_TORCH_CHECK(
      kernel_size[0] <= kMostTaps && kernel_size[1] <= kMostTaps && kernel_size[0] > 0 && kernel_size[1] > 0 &&
          kernel_size[0] * kernel_size[1] <= kMostTaps,
      name,
      ": a window must have 1 to ",
      kMostTaps,
      " elements");
  STD_TORCH_CHECK(images[1] > 0, name, ": the input must have channels");
  return {axis(0), axis(1), images[1]};
}

Sizes output_sizes(const kernels::Depthwise& conv, int64_t samples) {
  return {samples, conv.channels, conv.rows.output, conv.columns.output};
}

// The weight with its channels innermost, as kernels read it.
Tensor taps_of(const Tensor& weight, const kernels::Depthwise& conv) {
  const Tensor dense = as_contiguous(weight);
  Tensor taps = empty_contiguous({conv.taps(), conv.channels}, ScalarType::Float, weight);
  const auto* const from = data_of<float>(dense);
  auto* const to = mutable_data_of<float>(taps);
  for (int64_t tap = 0; tap < conv.taps(); ++tap) {
    for (int64_t channel = 0; channel < conv.channels; ++channel) {
      to[tap * conv.channels + channel] = from[channel * conv.taps() + tap];
    }
  }
  return taps;
}

int64_t rows_of_a_thread(int64_t columns, const kernels::Depthwise& conv) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns * conv.channels));
}

Tensor depthwise_conv2d(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    const Sizes& stride,
    const Sizes& padding) {
  check_images(kForward, input, "input");
  check_weight(kForward, weight, input.size(1));
  const kernels::Depthwise conv =
      conv_of(kForward, sizes_of(input), {weight.size(2), weight.size(3)}, stride, padding);
  check_bias(kForward, bias, conv.channels);
  const Tensor images = as_channels_last(input);
  const Tensor taps = taps_of(weight, conv);
  // Without a bias any tensor: GCC takes an empty optional for one that is read.
  const Tensor added = bias ? as_contiguous(*bias) : weight;
  Tensor output = empty_channels_last(output_sizes(conv, input.size(0)), ScalarType::Float, input);
  const auto* const from = data_of<float>(images);
  const auto* const by = data_of<float>(taps);
  const auto* const start = bias ? data_of<float>(added) : nullptr;
  auto* const to = mutable_data_of<float>(output);
  torch::stable::parallel_for(
      0,
      input.size(0) * conv.rows.output,
      rows_of_a_thread(conv.columns.output, conv),
      [&](int64_t begin, int64_t end) { kernels::depthwise_rows(from, by, start, conv, begin, end, to); });
  return output;
}

Tensor depthwise_conv2d_grad_input(
    const Tensor& grad_output,
    const Tensor& weight,
    const Sizes& image_size,
    const Sizes& stride,
    const Sizes& padding) {
  check_images(kGradInput, grad_output, "grad_output");
  check_weight(kGradInput, weight, grad_output.size(1));
  STD_TORCH_CHECK(image_size.size() == 2, kGradInput, ": image_size must be the rows and columns of an image");
  const Sizes images{grad_output.size(0), grad_output.size(1), image_size[0], image_size[1]};
  const kernels::Depthwise conv = conv_of(kGradInput, images, {weight.size(2), weight.size(3)}, stride, padding);
  STD_TORCH_CHECK(
      sizes_of(grad_output) == output_sizes(conv, images[0]),
      kGradInput,
      ": grad_output must have the shape of the output");
  const Tensor gradient = as_channels_last(grad_output);
  const Tensor taps = taps_of(weight, conv);
  Tensor grad_input = empty_channels_last(images, ScalarType::Float, grad_output);
  const auto* const from = data_of<float>(gradient);
  const auto* const by = data_of<float>(taps);
  auto* const to = mutable_data_of<float>(grad_input);
  torch::stable::parallel_for(
      0,
      images[0] * conv.rows.input,
      rows_of_a_thread(conv.columns.input, conv),
      [&](int64_t begin, int64_t end) { kernels::depthwise_grad_input_rows(from, by, conv, begin, end, to); });
  return grad_input;
}

Tensor depthwise_conv2d_grad_weight(
    const Tensor& grad_output,
    const Tensor& input,
    const Sizes& kernel_size,
    const Sizes& stride,
    const Sizes& padding) {
  check_images(kGradWeight, grad_output, "grad_output");
  check_images(kGradWeight, input, "input");
  const kernels::Depthwise conv = conv_of(kGradWeight, sizes_of(input), kernel_size, stride, padding);
  STD_TORCH_CHECK(
      sizes_of(grad_output) == output_sizes(conv, input.size(0)),
      kGradWeight,
      ": grad_output must have the shape of the output");
  const Tensor gradient = as_channels_last(grad_output);
  const Tensor images = as_channels_last(input);
  Tensor grad_taps = empty_contiguous({conv.taps(), conv.channels}, ScalarType::Float, input);
  Tensor grad_weight =
      empty_contiguous({conv.channels, 1, conv.rows.kernel, conv.columns.kernel}, ScalarType::Float, input);
  const auto* const of_output = data_of<float>(gradient);
  const auto* const from = data_of<float>(images);
  auto* const sums = mutable_data_of<float>(grad_taps);
  auto* const to = mutable_data_of<float>(grad_weight);
  const int64_t taps = conv.taps();
  torch::stable::parallel_for(
      0, (conv.channels + kChannelBlock - 1) / kChannelBlock, 1, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kChannelBlock;
        const int64_t last = std::min(conv.channels, end * kChannelBlock);
        kernels::depthwise_grad_weight_channels(of_output, from, conv, input.size(0), first, last, sums);
        for (int64_t channel = first; channel < last; ++channel) {
          for (int64_t tap = 0; tap < taps; ++tap) {
            to[channel * taps + tap] = sums[tap * conv.channels + channel];
          }
        }
      });
  return grad_weight;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("depthwise_conv2d(Tensor input, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor");
  m.def(
      "depthwise_conv2d_grad_input(Tensor grad_output, Tensor weight, int[2] image_size, int[2] stride, "
      "int[2] padding) -> Tensor");
  m.def(
      "depthwise_conv2d_grad_weight(Tensor grad_output, Tensor input, int[2] kernel_size, int[2] stride, "
      "int[2] padding) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("depthwise_conv2d", TORCH_BOX(&depthwise_conv2d));
  m.impl("depthwise_conv2d_grad_input", TORCH_BOX(&depthwise_conv2d_grad_input));
  m.impl("depthwise_conv2d_grad_weight", TORCH_BOX(&depthwise_conv2d_grad_weight));
}
