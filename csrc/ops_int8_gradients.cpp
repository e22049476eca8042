// The gradients of int8 convolutions, see kernels/int8. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "ops_int8.h"

namespace {

using namespace torch_odt;
using kernels::int8::grad_input;
using kernels::int8::grad_input_packing;
using kernels::int8::grad_input_packing_workspace_bytes;
using kernels::int8::grad_input_packs_on_the_way;
using kernels::int8::grad_weight;
using kernels::int8::grad_weight_parts_are_independent;
using kernels::int8::grad_weight_workspace_bytes;
using kernels::int8::pack_weight;
using kernels::int8::packed_bytes;
using kernels::int8::workspace_bytes;

constexpr char kGradInputScaled[] = "int8_conv2d_grad_input_scaled";
constexpr char kGradWeightScaled[] = "int8_conv2d_grad_weight_scaled";

// The arguments of all operators that compute the input's gradient.
struct GradInputArguments {
  const Tensor& grad_output;
  const Tensor& weight;
  const std::optional<Tensor>& packed;
  const Pair& input_size;
  Geometry geometry;

  Conv2d conv() const {
    geometry.check();
    check_int8(grad_output, geometry.name, "grad_output");
    check_int8(weight, geometry.name, "weight");
    STD_TORCH_CHECK(input_size.size() == 2, geometry.name, ": input_size are two numbers, of rows and of columns");
    const Conv2d conv =
        conv_of(geometry, Pass::grad_input, grad_output.size(0), input_size, weight.size(1) * geometry.groups, weight);
    STD_TORCH_CHECK(
        grad_output.size(1) == conv.out_channels && grad_output.size(2) == conv.rows.output &&
            grad_output.size(3) == conv.columns.output,
        geometry.name,
        ": grad_output must have the output's shape, ",
        conv.out_channels,
        " x ",
        conv.rows.output,
        " x ",
        conv.columns.output,
        " for each sample");
    return conv;
  }

  Pair sizes(const Conv2d& conv) const {
    return {conv.batch, conv.in_channels, conv.rows.input, conv.columns.input};
  }

  float run(const Conv2d& conv, const Finish& finish) const {
    const Threads threads = threads_for(conv);
    const Tensor gradient = channels_last(grad_output);
    if (!packed.has_value() && grad_input_packs_on_the_way(conv)) {
      const Tensor dense = channels_last(weight);
      Tensor room = empty_flat(
          grad_input_packing_workspace_bytes(conv) * threads.count, ScalarType::Byte, grad_output);
      return grad_input_packing(
          conv, bytes_of(gradient), bytes_of(dense), finish, threads, room.mutable_data_ptr());
    }
    const Tensor weights = packed_for(conv, Pass::grad_input, weight, packed, threads);
    Tensor workspace =
        empty_flat(workspace_bytes(conv, Pass::grad_input) * threads.count, ScalarType::Byte, grad_output);
    return grad_input(
        conv, bytes_of(gradient), data_of_packed(weights), finish, threads, workspace.mutable_data_ptr());
  }

  Tensor scaled(const Conv2d& conv, Rescaling made) const {
    Tensor result = empty_image(sizes(conv), ScalarType::Float, grad_output);
    made.finish.output = result.mutable_data_ptr();
    run(conv, made.finish);
    return result;
  }
};

Tensor conv2d_grad_input(
    const Tensor& grad_output,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const Pair& input_size,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradInputArguments arguments{
      grad_output, weight, packed, input_size, {"int8_conv2d_grad_input", stride, padding, dilation, groups}};
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
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradInputArguments arguments{
      grad_output, weight, packed, input_size, {kGradInputScaled, stride, padding, dilation, groups}};
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
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradInputArguments arguments{
      grad_output, weight, packed, input_size, {"int8_conv2d_grad_input_quantized", stride, padding, dilation, groups}};
  const char* const name = arguments.geometry.name;
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(name, Result::int8, scale, 1, false);
  set_rounding(name, rounding, seed, made);
  Tensor result = empty_image(arguments.sizes(conv), ScalarType::Char, grad_output);
  made.finish.output = result.mutable_data_ptr();
  const float largest = arguments.run(conv, made.finish);
  return {result, one_number(largest, grad_output)};
}

// The arguments of all operators that compute the weight's gradient. `weight` is one of its shape.
struct GradWeightArguments {
  const Tensor& grad_output;
  const Tensor& input;
  int64_t input_zero_point;
  Geometry geometry;

  Conv2d conv(const Pair& kernel_size) const {
    const char* const name = geometry.name;
    geometry.check();
    check_int8(grad_output, name, "grad_output");
    check_int8(input, name, "input");
    check_zero_point(input_zero_point, name);
    STD_TORCH_CHECK(kernel_size.size() == 2, name, ": kernel_size are two numbers, of rows and of columns");
    STD_TORCH_CHECK(
        input.size(1) % geometry.groups == 0 && grad_output.size(1) % geometry.groups == 0,
        name,
        ": the channels of input and grad_output must be multiples of groups");
    const Conv2d conv{
        input.size(0),
        geometry.axis(0, input.size(2), kernel_size[0]),
        geometry.axis(1, input.size(3), kernel_size[1]),
        input.size(1),
        grad_output.size(1),
        geometry.groups};
    STD_TORCH_CHECK(
        grad_output.size(0) == conv.batch && grad_output.size(2) == conv.rows.output &&
            grad_output.size(3) == conv.columns.output,
        name,
        ": grad_output must have the output's shape, ",
        conv.batch,
        " samples of ",
        conv.rows.output,
        " x ",
        conv.columns.output);
    return conv;
  }

  Pair weight_sizes(const Conv2d& conv) const {
    return {conv.out_channels, conv.in_depth(), conv.rows.kernel, conv.columns.kernel};
  }

  Tensor empty_bias(const Conv2d& conv) const {
    return empty_flat(conv.out_channels, ScalarType::Long, input);
  }

  float run(const Conv2d& conv, const Finish& finish, Tensor& grad_bias) const {
    return run(conv, finish, static_cast<int64_t*>(grad_bias.mutable_data_ptr()));
  }

  // Writes the sums of the output's gradient over all pixels to `sums`.
  float run(const Conv2d& conv, const Finish& finish, int64_t* sums) const {
    const Threads threads = threads_for(conv);
    const Tensor gradient = channels_last(grad_output);
    const Tensor image = channels_last(input);
    Tensor workspace =
        empty_flat(grad_weight_workspace_bytes(conv, threads) * threads.count, ScalarType::Byte, input);
    return grad_weight(
        conv,
        bytes_of(gradient),
        bytes_of(image),
        static_cast<int32_t>(input_zero_point),
        sums,
        finish,
        threads,
        workspace.mutable_data_ptr());
  }

  Tensor scaled(const Conv2d& conv, Rescaling made, int64_t* sums) const {
    Tensor result = empty_image(weight_sizes(conv), ScalarType::Float, input);
    made.finish.output = result.mutable_data_ptr();
    run(conv, made.finish, sums);
    return result;
  }
};

std::tuple<Tensor, Tensor> conv2d_grad_weight(
    const Tensor& grad_output,
    const Tensor& input,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradWeightArguments arguments{
      grad_output, input, input_zero_point, {"int8_conv2d_grad_weight", stride, padding, dilation, groups}};
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
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradWeightArguments arguments{
      grad_output, input, input_zero_point, {kGradWeightScaled, stride, padding, dilation, groups}};
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
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradWeightArguments arguments{
      grad_output, input, input_zero_point, {"int8_conv2d_update_weight_", stride, padding, dilation, groups}};
  const char* const name = arguments.geometry.name;
  const bool in_bytes = weight.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(
      weight.is_cpu() && weight.dim() == 4 && (in_bytes || weight.scalar_type() == ScalarType::Float),
      name,
      ": weight must be an int8 or float32 CPU tensor of 4 dimensions");
  const Conv2d conv = arguments.conv({weight.size(2), weight.size(3)});
  STD_TORCH_CHECK(
      weight.size(0) == conv.out_channels && weight.size(1) == conv.in_depth(),
      name,
      ": weight must have the shape ",
      conv.out_channels,
      " x ",
      conv.in_depth(),
      " x rows x columns");
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

namespace {

// Packed weights: those that came, or some that are packed when they are needed first.
class Packing {
 public:
  Packing(
      const Conv2d& conv, Pass pass, const Tensor& weight, const std::optional<Tensor>& packed, const Threads& threads)
      : conv_(conv), pass_(pass), dense_(channels_last(weight)) {
    constexpr int64_t kManyBytes = 1 << 18; // for one thread alone
    if (packed || weight.numel() >= kManyBytes) {
      packed_ = packed_for(conv, pass, weight, packed, threads);
    } else {
      own_ = empty_flat(packed_bytes(conv, pass), ScalarType::Byte, weight);
    }
  }

  // By one of the threads that ask for them, while others wait.
  const void* weights() const {
    if (packed_) {
      return data_of_packed(*packed_);
    }
    void* const to = own_->mutable_data_ptr();
    std::call_once(once_, [&] { pack_weight(conv_, pass_, bytes_of(dense_), Threads{}, to); });
    return to;
  }

 private:
  const Conv2d& conv_;
  const Pass pass_;
  const Tensor dense_;
  std::optional<Tensor> packed_;
  mutable std::optional<Tensor> own_;
  mutable std::once_flag once_;
};

// Both gradients, each thread going on from its part of one to that of the other without waiting.
std::tuple<Tensor, Tensor, Tensor, Tensor> at_once(
    const Conv2d& conv,
    const GradInputArguments& for_input,
    const GradWeightArguments& for_weight,
    const Tensor& grad_input_scale,
    const Tensor& grad_weight_scale,
    int64_t rounding,
    int64_t seed,
    const Threads& threads) {
  const char* const name = for_input.geometry.name;
  Rescaling to_input = rescaling(name, Result::int8, grad_input_scale, 1, false);
  set_rounding(name, rounding, seed, to_input);
  Rescaling to_weight = rescaling(name, Result::floats, grad_weight_scale, conv.out_channels, true);
  const Tensor gradient = channels_last(for_input.grad_output);
  const Tensor image = channels_last(for_weight.input);
  const Packing packing(conv, Pass::grad_input, for_input.weight, for_input.packed, threads);
  Tensor of_input = empty_image(for_input.sizes(conv), ScalarType::Char, gradient);
  Tensor of_weight = empty_image(for_weight.weight_sizes(conv), ScalarType::Float, gradient);
  Tensor of_bias = for_weight.empty_bias(conv);
  to_input.finish.output = of_input.mutable_data_ptr();
  to_weight.finish.output = of_weight.mutable_data_ptr();
  auto* const sums = static_cast<int64_t*>(of_bias.mutable_data_ptr());
  const int64_t input_bytes = workspace_bytes(conv, Pass::grad_input) * threads.count;
  const int64_t weight_bytes = grad_weight_workspace_bytes(conv, threads) * threads.count;
  Tensor room = empty_flat(input_bytes + weight_bytes, ScalarType::Byte, gradient);
  char* const workspace = static_cast<char*>(room.mutable_data_ptr());
  std::vector<float> largest(static_cast<size_t>(threads.count));
  run_members(threads, [&](const Threads& member) {
    const auto weight_part = [&] {
      grad_weight(
          conv,
          bytes_of(gradient),
          bytes_of(image),
          static_cast<int32_t>(for_weight.input_zero_point),
          sums,
          to_weight.finish,
          member,
          workspace + input_bytes);
    };
    // While one packs weights, the others do what needs none.
    if (member.member > 0) {
      weight_part();
    }
    largest[static_cast<size_t>(member.member)] =
        grad_input(conv, bytes_of(gradient), packing.weights(), to_input.finish, member, workspace);
    if (member.member == 0) {
      weight_part();
    }
  });
  return {of_input, one_number(*std::max_element(largest.begin(), largest.end()), gradient), of_weight, of_bias};
}

// Both gradients by one call: of small layers, calls are a good part of the time.
std::tuple<Tensor, Tensor, Tensor, Tensor> conv2d_backward(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const Tensor& grad_input_scale,
    const Tensor& grad_weight_scale,
    int64_t input_zero_point,
    int64_t rounding,
    int64_t seed,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  STD_TORCH_CHECK(
      input.dim() == 4 && weight.dim() == 4, "int8_conv2d_backward: input and weight must have 4 dimensions");
  STD_TORCH_CHECK(
      input.size(1) == weight.size(1) * groups,
      "int8_conv2d_backward: input must have as many channels as weight has, times groups");
  const Pair input_size{input.size(2), input.size(3)};
  const Pair kernel_size{weight.size(2), weight.size(3)};
  const GradInputArguments for_input{
      grad_output, weight, packed, input_size, {"int8_conv2d_backward", stride, padding, dilation, groups}};
  const GradWeightArguments for_weight{
      grad_output, input, input_zero_point, {"int8_conv2d_backward", stride, padding, dilation, groups}};
  const Conv2d conv = for_input.conv();
  for_weight.conv(kernel_size);
  const Threads threads = threads_for(conv);
  if (threads.count > 1 && grad_weight_parts_are_independent(conv, threads) && !grad_input_packs_on_the_way(conv)) {
    return at_once(conv, for_input, for_weight, grad_input_scale, grad_weight_scale, rounding, seed, threads);
  }
  const auto [of_input, largest] = conv2d_grad_input_quantized(
      grad_output, weight, packed, grad_input_scale, rounding, seed, input_size, stride, padding, dilation, groups);
  const auto [of_weight, of_bias] = conv2d_grad_weight_scaled(
      grad_output, input, grad_weight_scale, input_zero_point, kernel_size, stride, padding, dilation, groups);
  return {of_input, largest, of_weight, of_bias};
}

} // namespace

namespace torch_odt {

Tensor int8_conv2d_grad_input_scaled(
    const Tensor& grad_output,
    const Tensor& weight,
    float scale,
    const Pair& input_size,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const std::optional<Tensor> packed;
  const GradInputArguments arguments{
      grad_output, weight, packed, input_size, {kGradInputScaled, stride, padding, dilation, groups}};
  return arguments.scaled(arguments.conv(), rescaling(kGradInputScaled, Result::floats, Numbers{scale}, false));
}

Tensor int8_conv2d_grad_weight_scaled(
    const Tensor& grad_output,
    const Tensor& input,
    Numbers scale,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const GradWeightArguments arguments{
      grad_output, input, input_zero_point, {kGradWeightScaled, stride, padding, dilation, groups}};
  const Conv2d conv = arguments.conv(kernel_size);
  std::vector<int64_t> sums(static_cast<size_t>(conv.out_channels));
  return arguments.scaled(
      conv, rescaling(kGradWeightScaled, Result::floats, std::move(scale), true), sums.data());
}

} // namespace torch_odt

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? packed, Tensor grad_input_scale, "
      "Tensor grad_weight_scale, int input_zero_point, int rounding, int seed, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "int8_conv2d_grad_input(Tensor grad_output, Tensor weight, Tensor? packed, int[2] input_size, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups) -> Tensor");
  m.def(
      "int8_conv2d_grad_input_scaled(Tensor grad_output, Tensor weight, Tensor? packed, Tensor scale, "
      "int[2] input_size, int[2] stride, int[2] padding, int[2] dilation, int groups) -> Tensor");
  m.def(
      "int8_conv2d_grad_input_quantized(Tensor grad_output, Tensor weight, Tensor? packed, Tensor scale, "
      "int rounding, int seed, int[2] input_size, int[2] stride, int[2] padding, int[2] dilation, int groups) "
      "-> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_grad_weight(Tensor grad_output, Tensor input, int input_zero_point, int[2] kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, int groups) -> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_grad_weight_scaled(Tensor grad_output, Tensor input, Tensor scale, int input_zero_point, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, int groups) -> (Tensor, Tensor)");
  m.def(
      "int8_conv2d_update_weight_(Tensor(a!) weight, Tensor grad_output, Tensor input, Tensor scale, "
      "int input_zero_point, int rounding, int seed, int[2] stride, int[2] padding, int[2] dilation, int groups) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_conv2d_backward", TORCH_BOX(&conv2d_backward));
  m.impl("int8_conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("int8_conv2d_grad_input_scaled", TORCH_BOX(&conv2d_grad_input_scaled));
  m.impl("int8_conv2d_grad_input_quantized", TORCH_BOX(&conv2d_grad_input_quantized));
  m.impl("int8_conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("int8_conv2d_grad_weight_scaled", TORCH_BOX(&conv2d_grad_weight_scaled));
  m.impl("int8_conv2d_update_weight_", TORCH_BOX(&conv2d_update_weight_));
}
