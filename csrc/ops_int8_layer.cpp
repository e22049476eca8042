// Layers of a network in int8: the convolutions of ops_int8_conv2d.cpp with what stands around them, in one operator for
// each pass. Shapes for tracing, gradients and the same in plain torch are in torch_odt/quant/layer.py.

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "ops_int8.h"

namespace {

using namespace torch_odt;

constexpr char kName[] = "int8_layer";
// int32 has to hold the sums with it.
constexpr float kMostBias = 1073741824.0F;

// Rows of features as images of one pixel.
Tensor image(const Tensor& tensor) {
  if (tensor.dim() == 4) {
    return tensor;
  }
  STD_TORCH_CHECK(tensor.dim() > 0, kName, ": a tensor has no dimensions");
  const int64_t features = tensor.size(tensor.dim() - 1);
  const Pair sizes{features > 0 ? tensor.numel() / features : 0, features, 1, 1};
  return seen_contiguous(as_contiguous(tensor), sizes);
}

Pair output_sizes(const Tensor& values, const Tensor& output) {
  Pair sizes;
  for (int64_t i = 0; values.dim() != 4 && i + 1 < values.dim(); ++i) {
    sizes.push_back(values.size(i));
  }
  for (int64_t i = 0; values.dim() == 4 && i < 4; ++i) {
    sizes.push_back(output.size(i));
  }
  if (values.dim() != 4) {
    sizes.push_back(output.size(1));
  }
  return sizes;
}

Tensor shaped(const Tensor& tensor, const Pair& sizes) {
  return sizes.size() == 4 ? tensor : seen_contiguous(tensor, sizes);
}

// A weight's gradient in the order of memory, which is that of its slot.
Tensor by_rows(const Tensor& gradient, const Tensor& weight) {
  return weight.dim() == 4
      ? seen_contiguous(gradient, {weight.size(0), weight.size(2), weight.size(3), weight.size(1)})
      : seen_contiguous(gradient, {weight.size(0), weight.size(1)});
}

// The bias in units of the sums.
std::optional<std::vector<int32_t>> whole_bias(
    const std::optional<Tensor>& bias, const Tensor& input_step, const Grid& grid, int64_t channels) {
  if (!bias) {
    return std::nullopt;
  }
  const float ratio = *floats_of(kName, input_step, 1, "input_step") / grid.step;
  const float* const values = floats_of(kName, *bias, channels, "bias");
  std::vector<int32_t> whole(static_cast<size_t>(channels));
  for (int64_t i = 0; i < channels; ++i) {
    whole[static_cast<size_t>(i)] = static_cast<int32_t>(std::clamp(std::nearbyint(values[i] * ratio), -kMostBias, kMostBias));
  }
  return whole;
}

template <typename Function>
Numbers for_channels(int64_t channels, const Function& function) {
  Numbers result(static_cast<size_t>(channels));
  for (int64_t i = 0; i < channels; ++i) {
    result[static_cast<size_t>(i)] = function(i);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> layer(
    const Tensor& values,
    const Tensor& slot,
    const Tensor& grid,
    const Tensor& weight,
    const Tensor& weight_slot,
    const Tensor& weight_scale,
    const std::optional<Tensor>& bias,
    const Tensor& input_step,
    const Tensor& output_grid,
    std::optional<double> low,
    std::optional<double> high,
    bool scales_gradients,
    const Sizes& windows) {
  static_cast<void>(slot);
  static_cast<void>(weight_slot);
  static_cast<void>(scales_gradients);
  const Grid from(kName, grid, "grid");
  const Grid to(kName, output_grid, "output_grid");
  const int64_t channels = weight.size(0);
  const float* const scales = floats_of(kName, weight_scale, channels, "weight_scale");
  const auto [least, most] = to.bounds(low, high);
  const auto [output, mask] = int8_conv2d_quantized(
      image(values), image(weight), whole_bias(bias, input_step, from, channels),
      for_channels(channels, [&](int64_t i) { return from.step * scales[i] / to.step; }), from.zero, to.zero, least, most,
      windows);
  const Pair sizes = output_sizes(values, output);
  return {shaped(output, sizes), slot_of(sizes, weight), mask};
}

Tensor layer_to_float(
    const Tensor& values,
    const Tensor& slot,
    const Tensor& grid,
    const Tensor& weight,
    const Tensor& weight_slot,
    const Tensor& weight_scale,
    const std::optional<Tensor>& bias,
    const Tensor& input_step,
    bool scales_gradients,
    const Sizes& windows) {
  static_cast<void>(slot);
  static_cast<void>(weight_slot);
  static_cast<void>(scales_gradients);
  const Grid from(kName, grid, "grid");
  const int64_t channels = weight.size(0);
  const float* const scales = floats_of(kName, weight_scale, channels, "weight_scale");
  const Tensor output = int8_conv2d_scaled(
      image(values), image(weight), whole_bias(bias, input_step, from, channels),
      for_channels(channels, [&](int64_t i) { return from.step * scales[i]; }), from.zero, windows);
  return shaped(output, output_sizes(values, output));
}

std::tuple<Tensor, Tensor, Tensor> layer_backward(
    const Tensor& gradient,
    const std::optional<Tensor>& mask,
    const std::optional<Tensor>& values,
    const Tensor& grid,
    const Tensor& weight,
    const Tensor& weight_scale,
    const Tensor& input_step,
    const Pair& input_shape,
    bool for_input,
    bool for_weight,
    bool for_bias,
    bool scales_gradients,
    const Sizes& windows) {
  const int64_t channels = weight.size(0);
  const float* const scales = floats_of(kName, weight_scale, channels, "weight_scale");
  const RoundedGradient rounded = int8_quantize_gradient(
      image(gradient), mask, for_input ? std::optional<Tensor>(weight_scale) : std::nullopt, for_weight);
  const auto made = [&](bool wanted, const auto& function) {
    return wanted ? function() : empty_flat(0, ScalarType::Float, gradient);
  };
  const Tensor weights = image(weight);
  // The gradient of what is counted in units of a real number is that of the real number times the unit; QAS divides by
  // the unit's square.
  const auto counted = [&](float unit) { return scales_gradients ? 1 / unit : unit; };
  const Tensor of_input = made(for_input, [&] {
    const bool has_pixels = input_shape.size() == 4;
    const Pair size = has_pixels ? Pair{input_shape[2], input_shape[3]} : Pair{1, 1};
    return shaped(
        int8_conv2d_grad_input_scaled(
            rounded.for_input, weights, rounded.input_step, size, windows),
        input_shape);
  });
  const Tensor of_weight = made(for_weight, [&] {
    STD_TORCH_CHECK(values.has_value(), kName, ": the weight's gradient needs the input");
    const Grid from(kName, grid, "grid");
    const Numbers& steps = rounded.weight_steps;
    const auto scale = [&](int64_t i) { return steps[static_cast<size_t>(i)] * from.step * counted(scales[i]); };
    const Tensor found = int8_conv2d_grad_weight_scaled(
        rounded.for_weight, image(*values), for_channels(channels, scale), from.zero, {weights.size(2), weights.size(3)},
        windows);
    return by_rows(found, weight);
  });
  const Tensor of_bias = made(for_bias, [&] {
    const float unit = *floats_of(kName, input_step, 1, "input_step");
    Tensor result = empty_flat(channels, ScalarType::Float, gradient);
    auto* const to = static_cast<float*>(result.mutable_data_ptr());
    for (int64_t i = 0; i < channels; ++i) {
      to[i] = rounded.sums[static_cast<size_t>(i)] * counted(unit * scales[i]);
    }
    return result;
  });
  return {of_input, of_weight, of_bias};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_layer(Tensor values, Tensor slot, Tensor grid, Tensor weight, Tensor weight_slot, Tensor weight_scale, "
      "Tensor? bias, Tensor input_step, Tensor output_grid, float? low, float? high, bool scales_gradients, "
      "int[] windows) -> (Tensor, Tensor, Tensor)");
  m.def(
      "int8_layer_to_float(Tensor values, Tensor slot, Tensor grid, Tensor weight, Tensor weight_slot, "
      "Tensor weight_scale, Tensor? bias, Tensor input_step, bool scales_gradients, int[] windows) -> Tensor");
  m.def(
      "int8_layer_backward(Tensor gradient, Tensor? mask, Tensor? values, Tensor grid, Tensor weight, "
      "Tensor weight_scale, Tensor input_step, int[] input_shape, bool for_input, bool for_weight, bool for_bias, "
      "bool scales_gradients, int[] windows) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_layer", TORCH_BOX(&layer));
  m.impl("int8_layer_to_float", TORCH_BOX(&layer_to_float));
  m.impl("int8_layer_backward", TORCH_BOX(&layer_backward));
}
