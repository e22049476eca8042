// Convolutions of float32 images in channels_last with windows of one element, and their gradients: products of matrices,
// whose rows are pixels. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>
#include <optional>

#include <torch/csrc/stable/library.h>

#include "kernels/matrix_product.h"
#include "ops_channels.h"
#include "ops_images.h"
#include "ops_tensors.h"

namespace {

using namespace torch_odt;

constexpr char kForward[] = "pointwise_conv2d";
constexpr char kGradInput[] = "pointwise_conv2d_grad_input";
constexpr char kGradWeight[] = "pointwise_conv2d_grad_weight";
// What a thread computes at once: tiles of the kernel are 8 by 32 at most.
constexpr int64_t kRowBlock = 32;
constexpr int64_t kColumnBlock = 32;
// Products below which a thread costs more than it saves.
constexpr int64_t kGrainProducts = 1 << 18;

void check_weight(const char* name, const Tensor& weight) {
  check_images(name, weight, "weight");
  STD_TORCH_CHECK(
      weight.size(2) == 1 && weight.size(3) == 1, name, ": weight must have the shape (outputs, inputs, 1, 1)");
}

int64_t pixels_of(const Tensor& images) {
  return images.size(0) * images.size(2) * images.size(3);
}

Sizes with_channels(const Tensor& images, int64_t channels) {
  return {images.size(0), channels, images.size(2), images.size(3)};
}

// The longer side of the result is shared out among threads.
void multiply_in_parallel(const kernels::MatrixProduct& product, int64_t rows, int64_t columns) {
  const bool by_rows = rows * kColumnBlock >= columns * kRowBlock;
  const int64_t block = by_rows ? kRowBlock : kColumnBlock;
  const int64_t length = by_rows ? rows : columns;
  const int64_t products = block * product.steps * (by_rows ? columns : rows);
  const int64_t grain = std::max<int64_t>(1, kGrainProducts / std::max<int64_t>(1, products));
  torch::stable::parallel_for(0, (length + block - 1) / block, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * block;
    const int64_t last = std::min(length, end * block);
    kernels::multiply(
        product,
        by_rows ? kernels::MatrixBlock{first, last, 0, columns} : kernels::MatrixBlock{0, rows, first, last});
  });
}

Tensor pointwise_conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_images(kForward, input, "input");
  check_weight(kForward, weight);
  const int64_t outputs = weight.size(0);
  const int64_t inputs = weight.size(1);
  STD_TORCH_CHECK(input.size(1) == inputs, kForward, ": weight must have as many inputs as the images have channels");
  check_bias(kForward, bias, outputs);
  const Tensor images = as_channels_last(input);
  const Tensor lines = as_contiguous(weight);
  // Without a bias any tensor: GCC takes an empty optional for one that is read.
  const Tensor added = bias ? as_contiguous(*bias) : weight;
  Tensor output = empty_channels_last(with_channels(input, outputs), ScalarType::Float, input);
  const kernels::MatrixProduct product{
      .left = data_of<float>(images),
      .left_row = inputs,
      .left_step = 1,
      .right = data_of<float>(lines),
      .right_line = inputs,
      .right_is_transposed = true,
      .steps = inputs,
      .start = bias ? data_of<float>(added) : nullptr,
      .result = mutable_data_of<float>(output),
      .result_row = outputs};
  multiply_in_parallel(product, pixels_of(input), outputs);
  return output;
}

Tensor pointwise_conv2d_grad_input(const Tensor& grad_output, const Tensor& weight) {
  check_images(kGradInput, grad_output, "grad_output");
  check_weight(kGradInput, weight);
  const int64_t outputs = weight.size(0);
  const int64_t inputs = weight.size(1);
  STD_TORCH_CHECK(
      grad_output.size(1) == outputs, kGradInput, ": weight must have as many outputs as grad_output has channels");
  const Tensor gradient = as_channels_last(grad_output);
  const Tensor lines = as_contiguous(weight);
  Tensor grad_input = empty_channels_last(with_channels(grad_output, inputs), ScalarType::Float, grad_output);
  const kernels::MatrixProduct product{
      .left = data_of<float>(gradient),
      .left_row = outputs,
      .left_step = 1,
      .right = data_of<float>(lines),
      .right_line = inputs,
      .right_is_transposed = false,
      .steps = outputs,
      .start = nullptr,
      .result = mutable_data_of<float>(grad_input),
      .result_row = inputs};
  multiply_in_parallel(product, pixels_of(grad_output), inputs);
  return grad_input;
}

Tensor pointwise_conv2d_grad_weight(const Tensor& grad_output, const Tensor& input) {
  check_images(kGradWeight, grad_output, "grad_output");
  check_images(kGradWeight, input, "input");
  const int64_t outputs = grad_output.size(1);
  const int64_t inputs = input.size(1);
  STD_TORCH_CHECK(
      sizes_of(grad_output) == with_channels(input, outputs),
      kGradWeight,
      ": grad_output and input must have the same samples, rows and columns");
  const Tensor gradient = as_channels_last(grad_output);
  const Tensor images = as_channels_last(input);
  Tensor grad_weight = empty_contiguous({outputs, inputs, 1, 1}, ScalarType::Float, input);
  const kernels::MatrixProduct product{
      .left = data_of<float>(gradient),
      .left_row = 1,
      .left_step = outputs,
      .right = data_of<float>(images),
      .right_line = inputs,
      .right_is_transposed = false,
      .steps = pixels_of(input),
      .start = nullptr,
      .result = mutable_data_of<float>(grad_weight),
      .result_row = inputs};
  multiply_in_parallel(product, outputs, inputs);
  return grad_weight;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("pointwise_conv2d(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def("pointwise_conv2d_grad_input(Tensor grad_output, Tensor weight) -> Tensor");
  m.def("pointwise_conv2d_grad_weight(Tensor grad_output, Tensor input) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("pointwise_conv2d", TORCH_BOX(&pointwise_conv2d));
  m.impl("pointwise_conv2d_grad_input", TORCH_BOX(&pointwise_conv2d_grad_input));
  m.impl("pointwise_conv2d_grad_weight", TORCH_BOX(&pointwise_conv2d_grad_weight));
}
