// Convolutions of int8 tensors, see kernels/int8. Shapes for tracing are registered in torch_odt/ops.

#include <cstdlib>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "ops_int8_outputs.h"

namespace {

using namespace torch_odt;

constexpr char kScaled[] = "int8_conv2d_scaled";
constexpr char kQuantized[] = "int8_conv2d_quantized";
constexpr int64_t kMostProduct = 255 * 128; // of a difference from a zero point and a weight

Tensor pack(
    const Tensor& weight,
    const Sizes& windows,
    bool for_grad_input) {
  const Geometry geometry{"int8_pack_weight", windows};
  geometry.check();
  check_int8(weight, geometry.name, "weight");
  // The image's size does not matter.
  const Pair size{geometry.dilation(0) * (weight.size(2) - 1) + 1, geometry.dilation(1) * (weight.size(3) - 1) + 1};
  const Pass pass = for_grad_input ? Pass::grad_input : Pass::forward;
  const Conv2d conv = conv_of(geometry, pass, 1, size, weight.size(1) * geometry.groups(), weight);
  return packed_for(conv, pass, weight, std::nullopt, all_threads());
}

// A bias that is given as a tensor, checked.
struct Bias {
  std::optional<Tensor> dense;

  Bias(const char* name, const std::optional<Tensor>& bias, const Conv2d& conv) {
    STD_TORCH_CHECK(
        !bias ||
            (bias->is_cpu() && bias->scalar_type() == ScalarType::Int && bias->dim() == 1 &&
             bias->size(0) == conv.out_channels),
        name,
        ": bias must be an int32 CPU tensor with one number for each output channel");
    if (bias) {
      dense = as_contiguous(*bias);
      check_room(name, conv);
    }
  }

  const int32_t* numbers() const {
    return dense ? static_cast<const int32_t*>(dense->const_data_ptr()) : nullptr;
  }

 private:
  // int32 has to hold sums with it, whatever they are; longer sums are added up in 64 bits.
  void check_room(const char* name, const Conv2d& conv) const {
    const int64_t terms = conv.taps() * conv.in_depth();
    if (terms > kernels::int8::kMostDepth) {
      return;
    }
    const int64_t most = std::numeric_limits<int32_t>::max() - terms * kMostProduct;
    for (int64_t i = 0; i < conv.out_channels; ++i) {
      STD_TORCH_CHECK(
          std::abs(int64_t{numbers()[i]}) <= most,
          name,
          ": bias must be from -",
          most,
          " to ",
          most,
          ", so that int32 holds every sum with it");
    }
  }
};

const int32_t* numbers_of(const std::optional<std::vector<int32_t>>& bias) {
  return bias ? bias->data() : nullptr;
}

Tensor conv2d(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    int64_t input_zero_point,
    const Sizes& windows) {
  const ForwardArguments arguments{input, weight, packed, input_zero_point, {"int8_conv2d", windows}};
  const Conv2d conv = arguments.conv();
  Tensor output = empty_image(arguments.output_sizes(conv), ScalarType::Int, input);
  Finish finish;
  finish.output = output.mutable_data_ptr();
  check_fits(arguments.run(conv, nullptr, finish), arguments.geometry.name);
  return output;
}

Tensor conv2d_scaled(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const std::optional<Tensor>& bias,
    const Tensor& scale,
    int64_t input_zero_point,
    const Sizes& windows) {
  const ForwardArguments arguments{input, weight, packed, input_zero_point, {kScaled, windows}};
  const Conv2d conv = arguments.conv();
  const Bias added(kScaled, bias, conv);
  return arguments.scaled(
      conv, added.numbers(), rescaling(kScaled, Result::floats, scale, conv.out_channels, false));
}

std::tuple<Tensor, Tensor, Tensor> conv2d_quantized(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const std::optional<Tensor>& bias,
    const Tensor& scale,
    int64_t input_zero_point,
    int64_t output_zero_point,
    int64_t low,
    int64_t high,
    int64_t rounding,
    int64_t seed,
    const Sizes& windows) {
  const ForwardArguments arguments{input, weight, packed, input_zero_point, {kQuantized, windows}};
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(kQuantized, Result::int8, scale, conv.out_channels, false);
  set_rounding(kQuantized, rounding, seed, made);
  set_range(kQuantized, output_zero_point, low, high, made.finish);
  const Bias added(kQuantized, bias, conv);
  const auto [output, mask, largest] = arguments.quantized(conv, added.numbers(), std::move(made));
  return {output, mask, one_number(largest, input)};
}

} // namespace

namespace torch_odt {

Tensor int8_conv2d_scaled(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<std::vector<int32_t>>& bias,
    Numbers scale,
    int64_t input_zero_point,
    const Sizes& windows) {
  const std::optional<Tensor> packed;
  const ForwardArguments arguments{input, weight, packed, input_zero_point, {kScaled, windows}};
  return arguments.scaled(
      arguments.conv(), numbers_of(bias), rescaling(kScaled, Result::floats, std::move(scale), false));
}

std::tuple<Tensor, Tensor> int8_conv2d_quantized(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<std::vector<int32_t>>& bias,
    Numbers scale,
    int64_t input_zero_point,
    int64_t output_zero_point,
    int64_t low,
    int64_t high,
    const Sizes& windows) {
  const std::optional<Tensor> packed;
  const ForwardArguments arguments{input, weight, packed, input_zero_point, {kQuantized, windows}};
  Rescaling made = rescaling(kQuantized, Result::int8, std::move(scale), false);
  set_range(kQuantized, output_zero_point, low, high, made.finish);
  const auto [output, mask, largest] = arguments.quantized(arguments.conv(), numbers_of(bias), std::move(made));
  return {output, mask};
}

} // namespace torch_odt

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_pack_weight(Tensor weight, int[] windows, bool for_grad_input) -> Tensor");
  m.def(
      "int8_conv2d(Tensor input, Tensor weight, Tensor? packed, int input_zero_point, int[] windows) -> Tensor");
  m.def(
      "int8_conv2d_scaled(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor scale, "
      "int input_zero_point, int[] windows) -> Tensor");
  m.def(
      "int8_conv2d_quantized(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor scale, "
      "int input_zero_point, int output_zero_point, int low, int high, int rounding, int seed, int[] windows) -> "
      "(Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_pack_weight", TORCH_BOX(&pack));
  m.impl("int8_conv2d", TORCH_BOX(&conv2d));
  m.impl("int8_conv2d_scaled", TORCH_BOX(&conv2d_scaled));
  m.impl("int8_conv2d_quantized", TORCH_BOX(&conv2d_quantized));
}
