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
constexpr char kStored[] = "stored_pointwise_conv2d";
constexpr char kStoredGradInput[] = "stored_pointwise_conv2d_grad_input";
// What threads share out: tiles of the kernel are 8 by 32 at most.
constexpr int64_t kRowBlock = 8;
constexpr int64_t kColumnBlock = 32;
// Of more pixels the weight's gradient is the sum of several, whatever the number of threads: each thread takes some
// pixels, and reads hardly any other.
constexpr int64_t kMostOfPart = 2048;
// Products below which a thread costs more than it saves.
constexpr int64_t kGrainProducts = 1 << 18;

void check_shape(const char* name, const Tensor& weight, const char* what) {
  STD_TORCH_CHECK(
      weight.is_cpu() && weight.dim() == 4 && weight.size(2) == 1 && weight.size(3) == 1,
      name,
      ": ",
      what,
      " must be a CPU tensor of the shape (outputs, inputs, 1, 1)");
}

// A weight: numbers, or codes of 8 bits with a scale for each output.
class Weight {
 public:
  Weight(const char* name, const Tensor& numbers)
      : lines_(as_contiguous(numbers)), scales_(lines_), outputs_(0), inputs_(0), has_codes_(false) {
    check_shape(name, numbers, "weight");
    STD_TORCH_CHECK(numbers.scalar_type() == ScalarType::Float, name, ": weight must be float32");
    outputs_ = numbers.size(0);
    inputs_ = numbers.size(1);
  }
  Weight(const char* name, const Tensor& codes, const Tensor& scale)
      : lines_(as_contiguous(codes)), scales_(as_contiguous(scale)), outputs_(0), inputs_(0), has_codes_(true) {
    check_shape(name, codes, "codes");
    STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Char, name, ": codes must be int8");
    outputs_ = codes.size(0);
    inputs_ = codes.size(1);
    STD_TORCH_CHECK(
        scale.is_cpu() && scale.scalar_type() == ScalarType::Float && scale.numel() == outputs_,
        name,
        ": scale must be a float32 CPU tensor with one number for each output");
  }

  int64_t outputs() const {
    return outputs_;
  }
  int64_t inputs() const {
    return inputs_;
  }
  kernels::MatrixProduct product(const Tensor& pixels, bool is_transposed, const float* start, Tensor& result) const {
    return {
        .left = data_of<float>(pixels),
        .left_row = pixels.size(1),
        .left_step = 1,
        .right = has_codes_ ? nullptr : data_of<float>(lines_),
        .codes = has_codes_ ? data_of<int8_t>(lines_) : nullptr,
        .scales = has_codes_ ? data_of<float>(scales_) : nullptr,
        .right_line = inputs_,
        .right_is_transposed = is_transposed,
        .steps = pixels.size(1),
        .start = start,
        .result = mutable_data_of<float>(result),
        .result_row = result.size(1)};
  }

 private:
  Tensor lines_;
  Tensor scales_;
  int64_t outputs_;
  int64_t inputs_;
  bool has_codes_;
};

int64_t pixels_of(const Tensor& images) {
  return images.size(0) * images.size(2) * images.size(3);
}

Sizes with_channels(const Tensor& images, int64_t channels) {
  return {images.size(0), channels, images.size(2), images.size(3)};
}

// Blocks of all products are shared out among threads, those of a product along the longer side of its result.
// `product_of(index)` gives one of the products, whose results are of one size.
template <typename Function>
void multiply_in_parallel(int64_t products, int64_t rows, int64_t columns, const Function& product_of) {
  if (rows == 0 || columns == 0) {
    return;
  }
  const bool by_rows = rows * kColumnBlock >= columns * kRowBlock;
  const int64_t block = by_rows ? kRowBlock : kColumnBlock;
  const int64_t length = by_rows ? rows : columns;
  const int64_t blocks = (length + block - 1) / block;
  const int64_t of_block = block * product_of(0).steps * (by_rows ? columns : rows);
  const int64_t grain = std::max<int64_t>(1, kGrainProducts / std::max<int64_t>(1, of_block));
  torch::stable::parallel_for(0, products * blocks, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t first = begin % blocks * block;
      const int64_t count = std::min(blocks - begin % blocks, end - begin);
      const int64_t last = std::min(length, first + count * block);
      kernels::multiply(
          product_of(begin / blocks),
          by_rows ? kernels::MatrixBlock{first, last, 0, columns} : kernels::MatrixBlock{0, rows, first, last});
      begin += count;
    }
  });
}

Tensor forward(const char* name, const Tensor& input, const Weight& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      input.size(1) == weight.inputs(), name, ": input must have as many channels as the weight has inputs");
  check_bias(name, bias, weight.outputs());
  const Tensor images = as_channels_last(input);
  // Without a bias any tensor: GCC takes an empty optional for one that is read.
  const Tensor added = bias ? as_contiguous(*bias) : images;
  Tensor output = empty_channels_last(with_channels(input, weight.outputs()), ScalarType::Float, input);
  const auto product = weight.product(images, true, bias ? data_of<float>(added) : nullptr, output);
  multiply_in_parallel(1, pixels_of(input), weight.outputs(), [&](int64_t) { return product; });
  return output;
}

Tensor gradient_of_input(const char* name, const Tensor& grad_output, const Weight& weight) {
  STD_TORCH_CHECK(
      grad_output.size(1) == weight.outputs(), name, ": grad_output must have as many channels as the weight has outputs");
  const Tensor gradient = as_channels_last(grad_output);
  Tensor grad_input = empty_channels_last(with_channels(grad_output, weight.inputs()), ScalarType::Float, grad_output);
  const auto product = weight.product(gradient, false, nullptr, grad_input);
  multiply_in_parallel(1, pixels_of(grad_output), weight.inputs(), [&](int64_t) { return product; });
  return grad_input;
}

Tensor pointwise_conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_images(kForward, input, "input");
  return forward(kForward, input, Weight(kForward, weight), bias);
}

Tensor pointwise_conv2d_grad_input(const Tensor& grad_output, const Tensor& weight) {
  check_images(kGradInput, grad_output, "grad_output");
  return gradient_of_input(kGradInput, grad_output, Weight(kGradInput, weight));
}

Tensor stored_pointwise_conv2d(
    const Tensor& input, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& bias) {
  check_images(kStored, input, "input");
  return forward(kStored, input, Weight(kStored, codes, scale), bias);
}

Tensor stored_pointwise_conv2d_grad_input(const Tensor& grad_output, const Tensor& codes, const Tensor& scale) {
  check_images(kStoredGradInput, grad_output, "grad_output");
  return gradient_of_input(kStoredGradInput, grad_output, Weight(kStoredGradInput, codes, scale));
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
  const int64_t pixels = pixels_of(input);
  const int64_t parts = std::max<int64_t>(1, (pixels + kMostOfPart - 1) / kMostOfPart);
  Tensor grad_weight = empty_contiguous({outputs, inputs, 1, 1}, ScalarType::Float, input);
  Tensor sums = parts == 1 ? grad_weight : empty_contiguous({parts, outputs, inputs}, ScalarType::Float, input);
  multiply_in_parallel(parts, outputs, inputs, [&](int64_t part) {
    const int64_t first = pixels * part / parts;
    return kernels::MatrixProduct{
        .left = data_of<float>(gradient) + first * outputs,
        .left_row = 1,
        .left_step = outputs,
        .right = data_of<float>(images) + first * inputs,
        .codes = nullptr,
        .scales = nullptr,
        .right_line = inputs,
        .right_is_transposed = false,
        .steps = pixels * (part + 1) / parts - first,
        .start = nullptr,
        .result = mutable_data_of<float>(sums) + part * outputs * inputs,
        .result_row = inputs};
  });
  if (parts == 1) {
    return grad_weight;
  }
  const auto* const from = data_of<float>(sums);
  auto* const to = mutable_data_of<float>(grad_weight);
  const int64_t elements = outputs * inputs;
  std::copy(from, from + elements, to);
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t i = 0; i < elements; ++i) {
      to[i] += from[part * elements + i];
    }
  }
  return grad_weight;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("pointwise_conv2d(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def("pointwise_conv2d_grad_input(Tensor grad_output, Tensor weight) -> Tensor");
  m.def("pointwise_conv2d_grad_weight(Tensor grad_output, Tensor input) -> Tensor");
  m.def("stored_pointwise_conv2d(Tensor input, Tensor codes, Tensor scale, Tensor? bias) -> Tensor");
  m.def("stored_pointwise_conv2d_grad_input(Tensor grad_output, Tensor codes, Tensor scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("pointwise_conv2d", TORCH_BOX(&pointwise_conv2d));
  m.impl("pointwise_conv2d_grad_input", TORCH_BOX(&pointwise_conv2d_grad_input));
  m.impl("pointwise_conv2d_grad_weight", TORCH_BOX(&pointwise_conv2d_grad_weight));
  m.impl("stored_pointwise_conv2d", TORCH_BOX(&stored_pointwise_conv2d));
  m.impl("stored_pointwise_conv2d_grad_input", TORCH_BOX(&stored_pointwise_conv2d_grad_input));
}
