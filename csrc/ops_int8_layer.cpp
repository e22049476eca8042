// Layers of a network in int8: the convolutions of ops_int8_conv2d.cpp with what stands around them, in one operator for
// each pass. Shapes for tracing, gradients and the same in plain torch are in torch_odt/quant/layer.py.

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "ops_int8_pooled.h"

namespace {

using namespace torch_odt;

constexpr char kName[] = "int8_layer";
constexpr char kDescendName[] = "int8_layer_descend_";
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

// Sizes may be an argument, which is nobody's before it is compared.
bool have_elements(const Pair& sizes, int64_t wanted) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || (size > 0 && count > wanted / size)) {
      return false;
    }
    count *= size;
  }
  return count == wanted;
}

Tensor shaped(const Tensor& tensor, const Pair& sizes) {
  if (sizes.size() == 4) {
    return tensor;
  }
  STD_TORCH_CHECK(
      have_elements(sizes, tensor.numel()), kName, ": input_shape has another number of elements than the input had");
  return seen_contiguous(tensor, sizes);
}

int64_t channels_of(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 || weight.dim() == 4, kName, ": weight must have two dimensions or four");
  return weight.size(0);
}

// A weight's gradient in the order of memory, which is that of its slot.
Tensor by_rows(const Tensor& gradient, const Tensor& weight) {
  STD_TORCH_CHECK(
      gradient.size(0) == weight.size(0) && gradient.numel() == weight.numel(),
      kName,
      ": the weight is not of the layer that gradient and input are of");
  return weight.dim() == 4
      ? seen_contiguous(gradient, {weight.size(0), weight.size(2), weight.size(3), weight.size(1)})
      : seen_contiguous(gradient, {weight.size(0), weight.size(1)});
}

// The bias in units of the sums.
std::optional<std::vector<int32_t>> whole_bias(
    const std::optional<Tensor>& bias, const float* scales, const Grid& grid, int64_t channels) {
  if (!bias) {
    return std::nullopt;
  }
  const float* const values = floats_of(kName, *bias, channels, "bias");
  std::vector<int32_t> whole(static_cast<size_t>(channels));
  for (int64_t i = 0; i < channels; ++i) {
    const float counted = std::nearbyint(values[i] / (grid.step * scales[i]));
    STD_TORCH_CHECK(!std::isnan(counted), kBiasNotFinite);
    whole[static_cast<size_t>(i)] = static_cast<int32_t>(std::clamp(counted, -kMostBias, kMostBias));
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
  const int64_t channels = channels_of(weight);
  const float* const scales = floats_of(kName, weight_scale, channels, "weight_scale");
  const auto [least, most] = to.bounds(low, high);
  const LayerWindows layer_windows(kName, windows);
  auto [output, mask] = int8_conv2d_quantized(
      image(values), image(weight), whole_bias(bias, scales, from, channels),
      for_channels(channels, [&](int64_t i) { return from.step * scales[i] / to.step; }), from.zero, to.zero, least, most,
      layer_windows.convolution());
  if (layer_windows.has_pool()) {
    STD_TORCH_CHECK(values.dim() == 4, kName, ": only images are pooled");
    std::tie(output, mask) = layer_windows.pooled(output, mask);
  }
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
    bool scales_gradients,
    const Sizes& windows) {
  static_cast<void>(slot);
  static_cast<void>(weight_slot);
  static_cast<void>(scales_gradients);
  const Grid from(kName, grid, "grid");
  const int64_t channels = channels_of(weight);
  const float* const scales = floats_of(kName, weight_scale, channels, "weight_scale");
  const Tensor output = int8_conv2d_scaled(
      image(values), image(weight), whole_bias(bias, scales, from, channels),
      for_channels(channels, [&](int64_t i) { return from.step * scales[i]; }), from.zero, windows);
  return shaped(output, output_sizes(values, output));
}

// What the gradients of a layer are computed from.
struct LayerGradients {
  const Tensor& weight;
  const float* const scales;
  const bool scales_gradients;
  const Pair& input_shape;
  const LayerWindows windows;
  const std::optional<Tensor>& noted;
  // Each channel is a group of its own, and its step factors out of the input's gradient, too.
  const bool is_depthwise;
  const RoundedGradient rounded;

  LayerGradients(
      const Tensor& gradient,
      const std::optional<Tensor>& mask,
      const Tensor& of_weight,
      const Tensor& weight_scale,
      bool for_input,
      bool for_weight,
      bool scales,
      const Pair& of_shape,
      const Sizes& of_windows)
      : weight(of_weight),
        scales(floats_of(kName, weight_scale, channels_of(of_weight), "weight_scale")),
        scales_gradients(scales),
        input_shape(of_shape),
        windows(kName, of_windows),
        noted(mask),
        is_depthwise(of_weight.size(1) == 1 && windows.convolution()[6] == of_weight.size(0)),
        rounded(int8_quantize_gradient(
            of_layer(image(gradient), of_weight),
            windows.has_pool() ? std::optional<Tensor>(mask_of_pooled(gradient, mask)) : mask,
            for_input && !is_depthwise ? std::optional<Tensor>(weight_scale) : std::nullopt,
            for_weight || (for_input && is_depthwise))) {}

  static Tensor of_layer(Tensor gradient, const Tensor& weight) {
    STD_TORCH_CHECK(
        gradient.size(1) == weight.size(0),
        kName,
        ": gradient has ",
        gradient.size(1),
        " channels, and the weight makes ",
        weight.size(0));
    return gradient;
  }

  Tensor mask_of_pooled(const Tensor& gradient, const std::optional<Tensor>& mask) const {
    STD_TORCH_CHECK(mask.has_value(), kName, ": a layer that is pooled needs its mask");
    STD_TORCH_CHECK(
        gradient.dim() == 4 && input_shape.size() == 4 && input_shape[0] == gradient.size(0),
        kName,
        ": only images are pooled, and gradient and input_shape must be of as many");
    STD_TORCH_CHECK(
        std::min(input_shape[2], input_shape[3]) > 0 && std::max(input_shape[2], input_shape[3]) <= kMostGeometry,
        kName,
        ": input_shape is smaller or larger than images can be");
    const Pair size = convolved_size();
    return windows.mask_of(*mask, gradient, size[0], size[1]);
  }

  // What the gradient of a real number is multiplied by: without QAS its descent is that of a number of such units.
  float counted(float unit) const {
    return scales_gradients ? 1 : unit * unit;
  }

  Pair input_size() const {
    return input_shape.size() == 4 ? Pair{input_shape[2], input_shape[3]} : Pair{1, 1};
  }

  // Rows and columns before the pool.
  Pair convolved_size() const {
    const Geometry geometry{kName, windows.convolution()};
    geometry.check();
    const Tensor weights = image(weight);
    const Pair size = input_size();
    return {
        geometry.axis(0, size[0], weights.size(2)).output, geometry.axis(1, size[1], weights.size(3)).output};
  }

  // A gradient of the layer's output as one of the convolution's.
  Tensor before_pool(const Tensor& gradient) const {
    if (!windows.has_pool()) {
      return gradient;
    }
    const Pair size = convolved_size();
    return windows.unpooled(gradient, *noted, size[0], size[1]);
  }

  // Empty where it is not wanted, as all are.
  Tensor of_input(bool wanted) const {
    if (!wanted) {
      return empty_flat(0, ScalarType::BFloat16, weight);
    }
    const Tensor gradient = before_pool(is_depthwise ? rounded.for_weight : rounded.for_input);
    return shaped(
        int8_conv2d_grad_input_in_bfloat16(
            gradient, image(weight), input_units(), input_size(), windows.convolution()),
        input_shape);
  }

  // What the sums of the input's gradient are multiplied by.
  Numbers input_units() const {
    if (!is_depthwise) {
      return {rounded.input_step};
    }
    Numbers units = for_channels(
        weight.size(0), [&](int64_t i) { return rounded.weight_steps[static_cast<size_t>(i)] * scales[i]; });
    STD_TORCH_CHECK(
        std::all_of(units.begin(), units.end(), [](float unit) { return std::isfinite(unit); }), kGradientNotFinite);
    return units;
  }

  // What the sums of the weight's gradient are multiplied by.
  Numbers weight_units(const Grid& from) const {
    return for_channels(weight.size(0), [&](int64_t i) {
      return rounded.weight_steps[static_cast<size_t>(i)] * from.step * counted(scales[i]);
    });
  }

  Tensor of_bias(bool wanted, const Grid& from) const {
    const int64_t channels = wanted ? weight.size(0) : 0;
    Tensor result = empty_flat(channels, ScalarType::Float, weight);
    auto* const to = static_cast<float*>(result.mutable_data_ptr());
    for (int64_t i = 0; i < channels; ++i) {
      to[i] = rounded.sums[static_cast<size_t>(i)] * counted(from.step * scales[i]);
    }
    return result;
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_backward(
    const Tensor& gradient,
    const std::optional<Tensor>& mask,
    const std::optional<Tensor>& values,
    const Tensor& grid,
    const Tensor& weight,
    const Tensor& weight_scale,
    const Pair& input_shape,
    bool for_input,
    bool for_weight,
    bool for_bias,
    bool scales_gradients,
    const Sizes& windows) {
  const LayerGradients found(
      gradient, mask, weight, weight_scale, for_input, for_weight, scales_gradients, input_shape, windows);
  const Grid from(kName, grid, "grid");
  const Tensor of_input = found.of_input(for_input);
  const auto of_weight = [&] {
    STD_TORCH_CHECK(values.has_value(), kName, ": the weight's gradient needs the input");
    const Tensor weights = image(weight);
    const Tensor result = int8_conv2d_grad_weight_scaled(
        found.before_pool(found.rounded.for_weight), image(*values), found.weight_units(from), from.zero,
        {weights.size(2), weights.size(3)}, found.windows.convolution());
    return by_rows(result, weight);
  };
  return {
      of_input,
      for_weight ? of_weight() : empty_flat(0, ScalarType::Float, weight),
      found.of_bias(for_bias, from)};
}

std::tuple<Tensor, Tensor> layer_descend_(
    const Tensor& gradient,
    const std::optional<Tensor>& mask,
    const Tensor& values,
    const Tensor& grid,
    Tensor weight,
    const Tensor& weight_scale,
    Tensor rounding,
    Tensor saturated,
    const Pair& input_shape,
    bool for_input,
    bool for_bias,
    bool scales_gradients,
    double rate,
    double weight_decay,
    const Sizes& windows) {
  check_update(kDescendName, weight);
  int64_t* const seed_and_updates = counters_of(kDescendName, rounding, 2, "rounding");
  int64_t* const clamped = counters_of(kDescendName, saturated, 1, "saturated");
  const LayerGradients found(
      gradient, mask, weight, weight_scale, for_input, true, scales_gradients, input_shape, windows);
  const Grid from(kName, grid, "grid");
  const Descending how(rate, weight_decay, found.scales, weight.size(0), seed_and_updates);
  // By the weight as it was.
  const Tensor of_input = found.of_input(for_input);
  *clamped += int8_conv2d_descend_weight_(
      image(weight), found.before_pool(found.rounded.for_weight), image(values), found.weight_units(from), from.zero, how,
      found.windows.convolution());
  ++seed_and_updates[1];
  return {of_input, found.of_bias(for_bias, from)};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_layer(Tensor values, Tensor slot, Tensor grid, Tensor weight, Tensor weight_slot, Tensor weight_scale, "
      "Tensor? bias, Tensor output_grid, float? low, float? high, bool scales_gradients, "
      "int[] windows) -> (Tensor, Tensor, Tensor)");
  m.def(
      "int8_layer_to_float(Tensor values, Tensor slot, Tensor grid, Tensor weight, Tensor weight_slot, "
      "Tensor weight_scale, Tensor? bias, bool scales_gradients, int[] windows) -> Tensor");
  m.def(
      "int8_layer_backward(Tensor gradient, Tensor? mask, Tensor? values, Tensor grid, Tensor weight, "
      "Tensor weight_scale, int[] input_shape, bool for_input, bool for_weight, bool for_bias, "
      "bool scales_gradients, int[] windows) -> (Tensor, Tensor, Tensor)");
  m.def(
      "int8_layer_descend_(Tensor gradient, Tensor? mask, Tensor values, Tensor grid, Tensor(a!) weight, "
      "Tensor weight_scale, Tensor(b!) rounding, Tensor(c!) saturated, int[] input_shape, "
      "bool for_input, bool for_bias, bool scales_gradients, float rate, float weight_decay, int[] windows) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_layer", TORCH_BOX(&layer));
  m.impl("int8_layer_to_float", TORCH_BOX(&layer_to_float));
  m.impl("int8_layer_backward", TORCH_BOX(&layer_backward));
  m.impl("int8_layer_descend_", TORCH_BOX(&layer_descend_));
}
