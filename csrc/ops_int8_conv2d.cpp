// Convolutions of int8 tensors and their gradients, see kernels/int8. Shapes for tracing are registered in torch_odt/ops.

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/MemoryFormat.h>

#include "kernels/int8/conv2d.h"

namespace {

using namespace torch_odt::kernels;
using namespace torch_odt::kernels::int8;
using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using Pair = std::vector<int64_t>;

// The arguments that say which convolution is meant, checked.
struct Geometry {
  const char* name;
  const Pair& stride;
  const Pair& padding;
  const Pair& dilation;
  int64_t groups;

  void check() const {
    for (const Pair* pair : {&stride, &padding, &dilation}) {
      STD_TORCH_CHECK(pair->size() == 2, name, ": stride, padding and dilation are two numbers, for rows and for columns");
    }
    STD_TORCH_CHECK(stride[0] > 0 && stride[1] > 0, name, ": stride must be positive");
    STD_TORCH_CHECK(padding[0] >= 0 && padding[1] >= 0, name, ": padding must not be negative");
    STD_TORCH_CHECK(dilation[0] > 0 && dilation[1] > 0, name, ": dilation must be positive");
    STD_TORCH_CHECK(groups > 0, name, ": groups must be positive");
  }

  WindowAxis axis(size_t which, int64_t input, int64_t kernel) const {
    const int64_t reach = input + 2 * padding[which] - dilation[which] * (kernel - 1) - 1;
    STD_TORCH_CHECK(kernel > 0, name, ": the kernel is empty");
    STD_TORCH_CHECK(reach >= 0, name, ": the kernel is larger than the padded input");
    return {input, reach / stride[which] + 1, kernel, stride[which], padding[which], dilation[which]};
  }
};

void check_int8(const Tensor& tensor, const char* name, const char* argument) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Char && tensor.dim() == 4,
      name,
      ": ",
      argument,
      " must be an int8 CPU tensor of 4 dimensions");
}

Conv2d conv_of(
    const Geometry& geometry,
    Pass pass,
    int64_t batch,
    const Pair& input_size,
    int64_t in_channels,
    const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.size(0) % geometry.groups == 0 && weight.size(1) * geometry.groups == in_channels,
      geometry.name,
      ": weight has ",
      weight.size(0),
      " x ",
      weight.size(1),
      " channels, which do not fit ",
      in_channels,
      " input channels in ",
      geometry.groups,
      " groups");
  const Conv2d conv{
      batch,
      geometry.axis(0, input_size[0], weight.size(2)),
      geometry.axis(1, input_size[1], weight.size(3)),
      in_channels,
      weight.size(0),
      geometry.groups};
  STD_TORCH_CHECK(
      conv.taps() * (pass == Pass::forward ? conv.in_depth() : conv.out_depth()) <= kMostDepth,
      geometry.name,
      ": int32 holds no sums over more than ",
      kMostDepth,
      " terms");
  return conv;
}

void check_zero_point(int64_t zero_point, const char* name) {
  STD_TORCH_CHECK(
      zero_point >= -128 && zero_point <= 127, name, ": input_zero_point must be a value of int8, not ", zero_point);
}

Tensor channels_last(const Tensor& tensor) {
  return torch::stable::contiguous(tensor, MemoryFormat::ChannelsLast);
}

const int8_t* bytes_of(const Tensor& tensor) {
  return static_cast<const int8_t*>(tensor.const_data_ptr());
}

Tensor empty_image(const Pair& sizes, ScalarType dtype, const Tensor& like) {
  return torch::stable::empty(sizes, dtype, std::nullopt, like.device(), std::nullopt, MemoryFormat::ChannelsLast);
}

Tensor empty_flat(int64_t count, ScalarType dtype, const Tensor& like) {
  return torch::stable::empty({count}, dtype, std::nullopt, like.device());
}

void run_tasks(int64_t tasks, void (*task)(const void*, int64_t), const void* context) {
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      task(context, index);
    }
  });
}

// Work below which a thread costs more than it saves, in multiply-adds.
constexpr int64_t kGrainProducts = 1 << 20;

Threads threads_for(const Conv2d& conv) {
  const int64_t products = conv.out_pixels() * conv.out_channels * conv.taps() * conv.in_depth();
  const auto available = static_cast<int64_t>(torch::stable::get_num_threads());
  return {std::clamp<int64_t>(products / kGrainProducts, 1, available), run_tasks};
}

// How sums become another type, from the arguments that say so.
struct Rescaling {
  std::vector<float> multipliers;
  Finish finish;
};

Rescaling rescaling(const char* name, Result result, const Tensor& scale, int64_t channels, bool channels_are_rows) {
  STD_TORCH_CHECK(
      scale.is_cpu() && scale.scalar_type() == ScalarType::Float && (scale.numel() == 1 || (channels > 0 && scale.numel() == channels)),
      name,
      ": scale must be a float32 CPU tensor of one number or of one for each of the ",
      channels,
      " output channels");
  const Tensor dense = torch::stable::contiguous(scale);
  const auto* const values = static_cast<const float*>(dense.const_data_ptr());
  Rescaling made;
  made.multipliers.assign(values, values + scale.numel());
  for (const float value : made.multipliers) {
    STD_TORCH_CHECK(std::isfinite(value), name, ": scale must be finite");
  }
  made.finish.result = result;
  made.finish.multipliers = made.multipliers.data();
  made.finish.per_channel = scale.numel() > 1;
  made.finish.channels_are_rows = channels_are_rows;
  return made;
}

void set_rounding(const char* name, int64_t rounding, int64_t seed, Rescaling& made) {
  STD_TORCH_CHECK(rounding >= 0 && rounding <= 2, name, ": rounding must be 0 (nearest), 1 (stochastic) or 2 (pseudo-stochastic)");
  Finish& finish = made.finish;
  finish.rounding = static_cast<Rounding>(rounding);
  finish.seed = static_cast<uint64_t>(seed);
  if (finish.rounding == Rounding::pseudo_stochastic) {
    int exponent = 0;
    const float fraction = std::frexp(made.multipliers.front(), &exponent);
    finish.shift = 1 - exponent;
    STD_TORCH_CHECK(
        made.multipliers.size() == 1 && fraction == 0.5F && finish.shift >= 0 && finish.shift <= 30,
        name,
        ": pseudo-stochastic rounding needs one scale, a power of two from 2^-30 to 1");
  }
}

void set_range(const char* name, int64_t zero_point, int64_t low, int64_t high, Finish& finish) {
  STD_TORCH_CHECK(
      -128 <= low && low <= high && high <= 127 && zero_point >= -128 && zero_point <= 127,
      name,
      ": low, high and output_zero_point must be values of int8, and low at most high");
  finish.zero_point = static_cast<int32_t>(zero_point);
  finish.low = static_cast<int32_t>(low);
  finish.high = static_cast<int32_t>(high);
}

// In front of packed weights: what they were packed for, so that others are told from them.
constexpr int64_t kTagBytes = 64;

uint64_t tag_of(const Conv2d& conv, Pass pass) {
  // FNV-1a: G. Fowler, L. C. Noll and K.-P. Vo.
  uint64_t tag = 0xcbf29ce484222325;
  const auto add = [&tag](int64_t value) { tag = (tag ^ static_cast<uint64_t>(value)) * 0x100000001b3; };
  for (const WindowAxis& axis : {conv.rows, conv.columns}) {
    for (const int64_t value : {axis.kernel, axis.stride, axis.padding, axis.dilation}) {
      add(value);
    }
  }
  for (const int64_t value : {conv.in_channels, conv.out_channels, conv.groups}) {
    add(value);
  }
  add(static_cast<int64_t>(pass));
  add(static_cast<int64_t>(isa()));
  return tag;
}

Tensor packed_for(
    const Conv2d& conv, Pass pass, const Tensor& weight, const std::optional<Tensor>& packed, const Threads& threads) {
  const int64_t bytes = kTagBytes + packed_bytes(conv, pass);
  const uint64_t tag = tag_of(conv, pass);
  if (packed) {
    STD_TORCH_CHECK(
        packed->is_cpu() && packed->scalar_type() == ScalarType::Byte && packed->dim() == 1 &&
            packed->numel() == bytes && packed->stride(0) == 1 &&
            std::memcmp(packed->const_data_ptr(), &tag, sizeof(tag)) == 0,
        "int8_conv2d: packed is not what int8_pack_weight made of this weight for this pass");
    return *packed;
  }
  Tensor result = empty_flat(bytes, ScalarType::Byte, weight);
  auto* const to = static_cast<char*>(result.mutable_data_ptr());
  std::memset(to, 0, kTagBytes);
  std::memcpy(to, &tag, sizeof(tag));
  const Tensor dense = channels_last(weight);
  pack_weight(conv, pass, bytes_of(dense), threads, to + kTagBytes);
  return result;
}

const void* data_of_packed(const Tensor& packed) {
  return static_cast<const char*>(packed.const_data_ptr()) + kTagBytes;
}

Tensor pack(
    const Tensor& weight,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups,
    bool for_grad_input) {
  const Geometry geometry{"int8_pack_weight", stride, padding, dilation, groups};
  geometry.check();
  check_int8(weight, geometry.name, "weight");
  // The image's size does not matter.
  const Pair size{dilation[0] * (weight.size(2) - 1) + 1, dilation[1] * (weight.size(3) - 1) + 1};
  const Pass pass = for_grad_input ? Pass::grad_input : Pass::forward;
  const Conv2d conv = conv_of(geometry, pass, 1, size, weight.size(1) * groups, weight);
  return packed_for(conv, pass, weight, std::nullopt, {static_cast<int64_t>(torch::stable::get_num_threads()), run_tasks});
}

// The arguments of all operators that compute an output.
struct ForwardArguments {
  const Tensor& input;
  const Tensor& weight;
  const std::optional<Tensor>& packed;
  int64_t input_zero_point;
  Geometry geometry;

  Conv2d conv() const {
    geometry.check();
    check_int8(input, geometry.name, "input");
    check_int8(weight, geometry.name, "weight");
    check_zero_point(input_zero_point, geometry.name);
    return conv_of(geometry, Pass::forward, input.size(0), {input.size(2), input.size(3)}, input.size(1), weight);
  }

  Pair output_sizes(const Conv2d& conv) const {
    return {conv.batch, conv.out_channels, conv.rows.output, conv.columns.output};
  }

  float run(const Conv2d& conv, const std::optional<Tensor>& bias, const Finish& finish) const {
    STD_TORCH_CHECK(
        !bias ||
            (bias->is_cpu() && bias->scalar_type() == ScalarType::Int && bias->dim() == 1 &&
             bias->size(0) == conv.out_channels),
        geometry.name,
        ": bias must be an int32 CPU tensor with one number for each output channel");
    const Threads threads = threads_for(conv);
    const Tensor weights = packed_for(conv, Pass::forward, weight, packed, threads);
    const Tensor image = channels_last(input);
    const Tensor dense_bias = bias ? torch::stable::contiguous(*bias) : input;
    Tensor workspace =
        empty_flat(workspace_bytes(conv, Pass::forward) * threads.count, ScalarType::Byte, input);
    return forward(
        conv,
        bytes_of(image),
        static_cast<int32_t>(input_zero_point),
        data_of_packed(weights),
        bias ? static_cast<const int32_t*>(dense_bias.const_data_ptr()) : nullptr,
        finish,
        threads,
        workspace.mutable_data_ptr());
  }
};

Tensor conv2d(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    int64_t input_zero_point,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const ForwardArguments arguments{
      input, weight, packed, input_zero_point, {"int8_conv2d", stride, padding, dilation, groups}};
  const Conv2d conv = arguments.conv();
  Tensor output = empty_image(arguments.output_sizes(conv), ScalarType::Int, input);
  Finish finish;
  finish.output = output.mutable_data_ptr();
  arguments.run(conv, std::nullopt, finish);
  return output;
}

Tensor conv2d_scaled(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& packed,
    const std::optional<Tensor>& bias,
    const Tensor& scale,
    int64_t input_zero_point,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const ForwardArguments arguments{
      input, weight, packed, input_zero_point, {"int8_conv2d_scaled", stride, padding, dilation, groups}};
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(arguments.geometry.name, Result::floats, scale, conv.out_channels, false);
  Tensor output = empty_image(arguments.output_sizes(conv), ScalarType::Float, input);
  made.finish.output = output.mutable_data_ptr();
  arguments.run(conv, bias, made.finish);
  return output;
}

Tensor one_number(float value, const Tensor& like) {
  Tensor result = empty_flat(1, ScalarType::Float, like);
  *static_cast<float*>(result.mutable_data_ptr()) = value;
  return result;
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
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  const ForwardArguments arguments{
      input, weight, packed, input_zero_point, {"int8_conv2d_quantized", stride, padding, dilation, groups}};
  const char* const name = arguments.geometry.name;
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(name, Result::int8, scale, conv.out_channels, false);
  set_rounding(name, rounding, seed, made);
  set_range(name, output_zero_point, low, high, made.finish);
  Tensor output = empty_image(arguments.output_sizes(conv), ScalarType::Char, input);
  const int64_t mask_bytes = (output.numel() + 7) / 8;
  Tensor mask = empty_flat(mask_bytes, ScalarType::Byte, input);
  std::memset(mask.mutable_data_ptr(), 0, static_cast<size_t>(mask_bytes));
  made.finish.output = output.mutable_data_ptr();
  made.finish.mask = static_cast<uint8_t*>(mask.mutable_data_ptr());
  const float largest = arguments.run(conv, bias, made.finish);
  return {output, mask, one_number(largest, input)};
}

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
    const Tensor weights = packed_for(conv, Pass::grad_input, weight, packed, threads);
    const Tensor gradient = channels_last(grad_output);
    Tensor workspace =
        empty_flat(workspace_bytes(conv, Pass::grad_input) * threads.count, ScalarType::Byte, grad_output);
    return grad_input(
        conv, bytes_of(gradient), data_of_packed(weights), finish, threads, workspace.mutable_data_ptr());
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
  arguments.run(conv, finish);
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
      grad_output, weight, packed, input_size, {"int8_conv2d_grad_input_scaled", stride, padding, dilation, groups}};
  const Conv2d conv = arguments.conv();
  Rescaling made = rescaling(arguments.geometry.name, Result::floats, scale, 1, false);
  Tensor result = empty_image(arguments.sizes(conv), ScalarType::Float, grad_output);
  made.finish.output = result.mutable_data_ptr();
  arguments.run(conv, made.finish);
  return result;
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

  // Returns the sums of the output's gradient over all pixels.
  Tensor run(const Conv2d& conv, const Finish& finish) const {
    const Threads threads = threads_for(conv);
    const Tensor gradient = channels_last(grad_output);
    const Tensor image = channels_last(input);
    Tensor grad_bias = empty_flat(conv.out_channels, ScalarType::Long, input);
    auto* const sums = static_cast<int64_t*>(grad_bias.mutable_data_ptr());
    Tensor workspace =
        empty_flat(grad_weight_workspace_bytes(conv, threads) * threads.count, ScalarType::Byte, input);
    grad_weight(
        conv,
        bytes_of(gradient),
        bytes_of(image),
        static_cast<int32_t>(input_zero_point),
        sums,
        finish,
        threads,
        workspace.mutable_data_ptr());
    return grad_bias;
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
  STD_TORCH_CHECK(
      conv.out_pixels() <= kMostDepth,
      arguments.geometry.name,
      ": int32 holds no sums over more than ",
      kMostDepth,
      " pixels; int8_conv2d_grad_weight_scaled takes any number");
  Tensor result = empty_image(arguments.weight_sizes(conv), ScalarType::Int, input);
  Finish finish;
  finish.output = result.mutable_data_ptr();
  finish.channels_are_rows = true;
  const Tensor grad_bias = arguments.run(conv, finish);
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
      grad_output, input, input_zero_point, {"int8_conv2d_grad_weight_scaled", stride, padding, dilation, groups}};
  const Conv2d conv = arguments.conv(kernel_size);
  Rescaling made = rescaling(arguments.geometry.name, Result::floats, scale, conv.out_channels, true);
  Tensor result = empty_image(arguments.weight_sizes(conv), ScalarType::Float, input);
  made.finish.output = result.mutable_data_ptr();
  const Tensor grad_bias = arguments.run(conv, made.finish);
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
  return arguments.run(conv, made.finish);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_pack_weight(Tensor weight, int[2] stride, int[2] padding, int[2] dilation, int groups, "
      "bool for_grad_input) -> Tensor");
  m.def(
      "int8_conv2d(Tensor input, Tensor weight, Tensor? packed, int input_zero_point, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups) -> Tensor");
  m.def(
      "int8_conv2d_scaled(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor scale, "
      "int input_zero_point, int[2] stride, int[2] padding, int[2] dilation, int groups) -> Tensor");
  m.def(
      "int8_conv2d_quantized(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor scale, "
      "int input_zero_point, int output_zero_point, int low, int high, int rounding, int seed, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups) -> (Tensor, Tensor, Tensor)");
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
  m.impl("int8_pack_weight", TORCH_BOX(&pack));
  m.impl("int8_conv2d", TORCH_BOX(&conv2d));
  m.impl("int8_conv2d_scaled", TORCH_BOX(&conv2d_scaled));
  m.impl("int8_conv2d_quantized", TORCH_BOX(&conv2d_quantized));
  m.impl("int8_conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("int8_conv2d_grad_input_scaled", TORCH_BOX(&conv2d_grad_input_scaled));
  m.impl("int8_conv2d_grad_input_quantized", TORCH_BOX(&conv2d_grad_input_quantized));
  m.impl("int8_conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("int8_conv2d_grad_weight_scaled", TORCH_BOX(&conv2d_grad_weight_scaled));
  m.impl("int8_conv2d_update_weight_", TORCH_BOX(&conv2d_update_weight_));
}
