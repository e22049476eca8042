// What operators of int8 gradients have in common: their arguments, checked, and what they compute.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "ops_int8.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

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
        conv_of(geometry, Pass::grad_input, grad_output.size(0), input_size, weight.size(1) * geometry.groups(), weight);
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
    Workspace workspace;
    return run(conv, finish, workspace);
  }

  float run(const Conv2d& conv, const Finish& finish, Workspace& workspace) const {
    const Threads threads = threads_for(conv);
    const Tensor gradient = channels_last(grad_output);
    if (!packed.has_value() && kernels::int8::packs_on_the_way(conv, Pass::grad_input)) {
      const Tensor dense = channels_last(weight);
      const int64_t bytes = kernels::int8::packing_workspace_bytes(conv, Pass::grad_input) * threads.count;
      return kernels::int8::grad_input_packing(
          conv, bytes_of(gradient), bytes_of(dense), finish, threads, workspace.of(bytes, grad_output));
    }
    const Tensor weights = packed_for(conv, Pass::grad_input, weight, packed, threads);
    const int64_t bytes = kernels::int8::workspace_bytes(conv, Pass::grad_input) * threads.count;
    return kernels::int8::grad_input(
        conv, bytes_of(gradient), data_of_packed(weights), finish, threads, workspace.of(bytes, grad_output));
  }

  // float32 or bfloat16, as the rescaling says.
  Tensor scaled(const Conv2d& conv, Rescaling made) const {
    const bool in_bfloat16 = made.finish.result == Result::bfloat16s;
    Tensor result = empty_image(sizes(conv), in_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float, grad_output);
    made.finish.output = result.mutable_data_ptr();
    run(conv, made.finish);
    return result;
  }
};

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
        input.size(1) % geometry.groups() == 0 && grad_output.size(1) % geometry.groups() == 0,
        name,
        ": the channels of input and grad_output must be multiples of groups");
    const Conv2d conv{
        input.size(0),
        geometry.axis(0, input.size(2), kernel_size[0]),
        geometry.axis(1, input.size(3), kernel_size[1]),
        input.size(1),
        grad_output.size(1),
        geometry.groups()};
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

  void check_weight(const Conv2d& conv, const Tensor& weight) const {
    STD_TORCH_CHECK(
        weight.size(0) == conv.out_channels && weight.size(1) == conv.in_depth(),
        geometry.name,
        ": weight must have the shape ",
        conv.out_channels,
        " x ",
        conv.in_depth(),
        " x rows x columns");
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
    Workspace workspace;
    return run(conv, finish, sums, workspace);
  }

  float run(const Conv2d& conv, const Finish& finish, int64_t* sums, Workspace& workspace) const {
    const Threads threads = threads_for(conv);
    const Tensor gradient = channels_last(grad_output);
    const Tensor image = channels_last(input);
    const int64_t bytes = kernels::int8::grad_weight_workspace_bytes(conv, threads) * threads.count;
    return kernels::int8::grad_weight(
        conv,
        bytes_of(gradient),
        bytes_of(image),
        static_cast<int32_t>(input_zero_point),
        sums,
        finish,
        threads,
        workspace.of(bytes, input));
  }

  Tensor scaled(const Conv2d& conv, Rescaling made, int64_t* sums) const {
    Tensor result = empty_image(weight_sizes(conv), ScalarType::Float, input);
    made.finish.output = result.mutable_data_ptr();
    run(conv, made.finish, sums);
    return result;
  }
};

} // namespace torch_odt
