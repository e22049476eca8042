// What operators of int8 convolutions have in common: their arguments, checked, and the output that they compute.
#pragma once

#include <cstring>
#include <optional>
#include <tuple>

#include "ops_int8.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

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

  float run(const Conv2d& conv, const int32_t* bias, const Finish& finish) const {
    Workspace workspace;
    return run(conv, bias, finish, workspace);
  }

  float run(const Conv2d& conv, const int32_t* bias, const Finish& finish, Workspace& workspace) const {
    const Threads threads = threads_for(conv);
    const Tensor image = channels_last(input);
    // Threads do not share a byte of a mask, but whole weights' packing.
    const bool shares = threads.count == 1 || finish.mask == nullptr || conv.out_depth() % 8 == 0;
    if (!packed && shares && kernels::int8::packs_on_the_way(conv, Pass::forward)) {
      const Tensor dense = channels_last(weight);
      const int64_t bytes = kernels::int8::packing_workspace_bytes(conv, Pass::forward) * threads.count;
      return kernels::int8::forward_packing(
          conv,
          bytes_of(image),
          static_cast<int32_t>(input_zero_point),
          bytes_of(dense),
          bias,
          finish,
          threads,
          workspace.of(bytes, input));
    }
    const Tensor weights = packed_for(conv, Pass::forward, weight, packed, threads);
    const int64_t bytes = kernels::int8::workspace_bytes(conv, Pass::forward) * threads.count;
    return kernels::int8::forward(
        conv,
        bytes_of(image),
        static_cast<int32_t>(input_zero_point),
        data_of_packed(weights),
        bias,
        finish,
        threads,
        workspace.of(bytes, input));
  }

  Tensor scaled(const Conv2d& conv, const int32_t* bias, Rescaling made) const {
    Tensor output = empty_image(output_sizes(conv), ScalarType::Float, input);
    made.finish.output = output.mutable_data_ptr();
    run(conv, bias, made.finish);
    return output;
  }

  // The output, its mask, and the largest absolute value before rounding.
  std::tuple<Tensor, Tensor, float> quantized(const Conv2d& conv, const int32_t* bias, Rescaling made) const {
    Tensor output = empty_image(output_sizes(conv), ScalarType::Char, input);
    const int64_t mask_bytes = (output.numel() + 7) / 8;
    Tensor mask = empty_flat(mask_bytes, ScalarType::Byte, input);
    std::memset(mask.mutable_data_ptr(), 0, static_cast<size_t>(mask_bytes));
    made.finish.output = output.mutable_data_ptr();
    made.finish.mask = static_cast<uint8_t*>(mask.mutable_data_ptr());
    const float largest = run(conv, bias, made.finish);
    return {output, mask, largest};
  }
};

} // namespace torch_odt
