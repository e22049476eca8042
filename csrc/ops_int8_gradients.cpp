// The gradients of int8 convolutions, see kernels/int8. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/descent.h"
#include "ops_int8_gradients.h"

namespace {

using namespace torch_odt;

constexpr char kGradInputScaled[] = "int8_conv2d_grad_input_scaled";
constexpr char kGradWeightScaled[] = "int8_conv2d_grad_weight_scaled";
constexpr char kDescend[] = "int8_layer_descend_";

Tensor conv2d_grad_input(
    const Tensor& grad_output,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const Pair& input_size,
    const Sizes& windows) {
  const GradInputArguments arguments{grad_output, weight, packed, input_size, {"int8_conv2d_grad_input", windows}};
  const Conv2d conv = arguments.conv();
  Tensor result = empty_image(arguments.sizes(conv), ScalarType::Int, grad_output);
  Finish finish;
  finish.output = result.mutable_data_ptr();
  check_fits(arguments.run(conv, finish), arguments.geometry.name);
  return result;
}

Tensor conv2d_grad_input_scaled(
    const Tensor& grad_output,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const Tensor& scale,
    const Pair& input_size,
    const Sizes& windows) {
  const GradInputArguments arguments{grad_output, weight, packed, input_size, {kGradInputScaled, windows}};
  return arguments.scaled(arguments.conv(), rescaling(kGradInputScaled, Result::floats, scale, 1, false));
}

std::tuple<Tensor, Tensor> conv2d_grad_input_quantized(
    const Tensor& grad_output,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const Tensor& scale,
    int64_t rounding,
    int64_t seed,
    const Pair& input_size,
    const Sizes& windows) {
  const GradInputArguments arguments{
      grad_output, weight, packed, input_size, {"int8_conv2d_grad_input_quantized", windows}};
  const char* const name = arguments.geometry.name;
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(name, Result::int8, scale, 1, false);
  set_rounding(name, rounding, seed, made);
  Tensor result = empty_image(arguments.sizes(conv), ScalarType::Char, grad_output);
  made.finish.output = result.mutable_data_ptr();
  const float largest = arguments.run(conv, made.finish);
  return {result, one_number(largest, grad_output)};
}

std::tuple<Tensor, Tensor> conv2d_grad_weight(
    const Tensor& grad_output,
    const Tensor& input,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Sizes& windows) {
  const GradWeightArguments arguments{grad_output, input, input_zero_point, {"int8_conv2d_grad_weight", windows}};
  const Conv2d conv = arguments.conv(kernel_size);
  Tensor result = empty_image(arguments.weight_sizes(conv), ScalarType::Int, input);
  Finish finish;
  finish.output = result.mutable_data_ptr();
  finish.channels_are_rows = true;
  Tensor grad_bias = arguments.empty_bias(conv);
  check_fits(arguments.run(conv, finish, grad_bias), arguments.geometry.name);
  return {result, grad_bias};
}

std::tuple<Tensor, Tensor> conv2d_grad_weight_scaled(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& scale,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Sizes& windows) {
  const GradWeightArguments arguments{grad_output, input, input_zero_point, {kGradWeightScaled, windows}};
  const Conv2d conv = arguments.conv(kernel_size);
  Tensor grad_bias = arguments.empty_bias(conv);
  Tensor result = arguments.scaled(
      conv,
      rescaling(kGradWeightScaled, Result::floats, scale, conv.out_channels, true),
      static_cast<int64_t*>(grad_bias.mutable_data_ptr()));
  return {result, grad_bias};
}

Tensor conv2d_update_weight_(
    Tensor weight,
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& scale,
    int64_t input_zero_point,
    int64_t rounding,
    int64_t seed,
    const Sizes& windows) {
  const GradWeightArguments arguments{grad_output, input, input_zero_point, {"int8_conv2d_update_weight_", windows}};
  const char* const name = arguments.geometry.name;
  const bool in_bytes = weight.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(
      weight.is_cpu() && weight.dim() == 4 && (in_bytes || weight.scalar_type() == ScalarType::Float),
      name,
      ": weight must be an int8 or float32 CPU tensor of 4 dimensions");
  const Conv2d conv = arguments.conv({weight.size(2), weight.size(3)});
  arguments.check_weight(conv, weight);
  const Tensor dense = channels_last(weight);
  STD_TORCH_CHECK(
      dense.const_data_ptr() == weight.const_data_ptr(),
      name,
      ": weight is updated in place, and must be contiguous in memory_format=torch.channels_last");
  Rescaling made =
      rescaling(name, in_bytes ? Result::int8_update : Result::float_update, scale, conv.out_channels, true);
  if (in_bytes) {
    set_rounding(name, rounding, seed, made);
  }
  made.finish.low = -127;
  made.finish.output = weight.mutable_data_ptr();
  Tensor grad_bias = arguments.empty_bias(conv);
  arguments.run(conv, made.finish, grad_bias);
  return grad_bias;
}

} // namespace

namespace torch_odt {

Tensor int8_conv2d_grad_input_in_bfloat16(
    const Tensor& grad_output,
    const Tensor& weight,
    Numbers scale,
    const Pair& input_size,
    const Sizes& windows) {
  const std::optional<Tensor> packed;
  const GradInputArguments arguments{grad_output, weight, packed, input_size, {kGradInputScaled, windows}};
  return arguments.scaled(arguments.conv(), rescaling(kGradInputScaled, Result::bfloat16s, std::move(scale), false));
}

Tensor int8_conv2d_grad_weight_scaled(
    const Tensor& grad_output,
    const Tensor& input,
    Numbers scale,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Sizes& windows) {
  const GradWeightArguments arguments{grad_output, input, input_zero_point, {kGradWeightScaled, windows}};
  const Conv2d conv = arguments.conv(kernel_size);
  std::vector<int64_t> sums(static_cast<size_t>(conv.out_channels));
  return arguments.scaled(
      conv, rescaling(kGradWeightScaled, Result::floats, std::move(scale), true), sums.data());
}

int64_t int8_conv2d_descend_weight_(
    Tensor weight,
    const Tensor& grad_output,
    const Tensor& input,
    Numbers scale,
    int64_t input_zero_point,
    const Descending& how,
    const Sizes& windows) {
  constexpr float kMostTerm = 255 * 128;
  const GradWeightArguments arguments{grad_output, input, input_zero_point, {kDescend, windows}};
  const Conv2d conv = arguments.conv({weight.size(2), weight.size(3)});
  arguments.check_weight(conv, weight);
  Rescaling made = rescaling(kDescend, Result::descent, std::move(scale), true);
  const float most_sum = static_cast<float>(conv.out_pixels()) * kMostTerm;
  for (size_t i = 0; i < made.multipliers.size(); ++i) {
    const float largest = std::abs(made.multipliers[i]) * most_sum;
    STD_TORCH_CHECK(kernels::int8::descent_stays_finite(largest * std::abs(how.rates[i]), how.shrink), kNotFinite);
  }
  made.finish.output = weight.mutable_data_ptr();
  made.finish.seed = how.seed;
  made.finish.rates = how.rates.data();
  made.finish.shrink = how.shrink;
  kernels::int8::Noted noted;
  made.finish.noted = &noted;
  std::vector<int64_t> sums(static_cast<size_t>(conv.out_channels));
  arguments.run(conv, made.finish, sums.data());
  return noted.clamped;
}

} // namespace torch_odt

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_conv2d_grad_input(Tensor grad_output, Tensor weight, Tensor? packed, int[2] input_size, "
      "int[] windows) -> Tensor");
  m.def(
      "int8_conv2d_grad_input_scaled(Tensor grad_output, Tensor weight, Tensor? packed, Tensor scale, "
      "int[2] input_size, int[] windows) -> Tensor");
  m.def(
      "int8_conv2d_grad_input_quantized(Tensor grad_output, Tensor weight, Tensor? packed, Tensor scale, "
      "int rounding, int seed, int[2] input_size, int[] windows) -> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_grad_weight(Tensor grad_output, Tensor input, int input_zero_point, int[2] kernel_size, "
      "int[] windows) -> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_grad_weight_scaled(Tensor grad_output, Tensor input, Tensor scale, int input_zero_point, "
      "int[2] kernel_size, int[] windows) -> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_update_weight_(Tensor(a!) weight, Tensor grad_output, Tensor input, Tensor scale, "
      "int input_zero_point, int rounding, int seed, int[] windows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("int8_conv2d_grad_input_scaled", TORCH_BOX(&conv2d_grad_input_scaled));
  m.impl("int8_conv2d_grad_input_quantized", TORCH_BOX(&conv2d_grad_input_quantized));
  m.impl("int8_conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("int8_conv2d_grad_weight_scaled", TORCH_BOX(&conv2d_grad_weight_scaled));
  m.impl("int8_conv2d_update_weight_", TORCH_BOX(&conv2d_update_weight_));
}
