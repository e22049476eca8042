// Both gradients of an int8 convolution by one call: of small layers, calls and waiting are a good part of the time.

#include <algorithm>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/pack_weight.h"
#include "ops_int8_gradients.h"

namespace {

using namespace torch_odt;
using kernels::int8::grad_input;
using kernels::int8::grad_weight;
using kernels::int8::grad_weight_parts_are_independent;
using kernels::int8::grad_weight_workspace_bytes;
using kernels::int8::kManyWeights;
using kernels::int8::pack_weight;
using kernels::int8::packed_bytes;
using kernels::int8::packs_on_the_way;
using kernels::int8::workspace_bytes;

constexpr char kName[] = "int8_conv2d_backward";

// Packed weights for the input's gradient: those that came, or some that are packed when they are needed first.
class Packing {
 public:
  Packing(const Conv2d& conv, const Tensor& weight, const std::optional<Tensor>& packed, const Threads& threads)
      : conv_(conv), dense_(channels_last(weight)), comes_packed_(packed || weight.numel() >= kManyWeights) {
    if (comes_packed_) {
      tensor_ = packed_for(conv, Pass::grad_input, weight, packed, threads);
      data_ = data_of_packed(*tensor_);
      return;
    }
    tensor_ = empty_flat(packed_bytes(conv, Pass::grad_input), ScalarType::Byte, weight);
    to_ = tensor_->mutable_data_ptr();
    from_ = bytes_of(dense_);
    data_ = to_;
  }

  // By one of the threads that ask for them, while others wait.
  const void* weights() {
    if (!comes_packed_) {
      std::call_once(once_, [&] { pack_weight(conv_, Pass::grad_input, from_, Threads{}, to_); });
    }
    return data_;
  }

 private:
  const Conv2d& conv_;
  const Tensor dense_;
  const bool comes_packed_;
  std::optional<Tensor> tensor_;
  const int8_t* from_ = nullptr;
  void* to_ = nullptr;
  const void* data_ = nullptr;
  std::once_flag once_;
};

// Each thread goes on from its part of one gradient to that of the other without waiting. Returns the largest absolute
// value of the input's.
float run_together(
    const Conv2d& conv,
    const GradInputArguments& for_input,
    const GradWeightArguments& for_weight,
    const Finish& to_input,
    const Finish& to_weight,
    int64_t* grad_bias,
    const Threads& threads) {
  const Tensor gradient = channels_last(for_input.grad_output);
  const Tensor image = channels_last(for_weight.input);
  Packing packing(conv, for_input.weight, for_input.packed, threads);
  // A thread computes one at a time, in one memory, which passes look for behind those of the threads before.
  const int64_t input_bytes = workspace_bytes(conv, Pass::grad_input);
  const int64_t weight_bytes = grad_weight_workspace_bytes(conv, threads);
  const int64_t most_bytes = std::max(input_bytes, weight_bytes);
  Tensor room = empty_flat(most_bytes * threads.count, ScalarType::Byte, gradient);
  auto* const workspace = static_cast<char*>(room.mutable_data_ptr());
  const int8_t* const gradient_bytes = bytes_of(gradient);
  const int8_t* const image_bytes = bytes_of(image);
  std::vector<float> largest(static_cast<size_t>(threads.count));
  run_members(threads, [&](const Threads& member) {
    const int64_t index = member.member;
    const auto input_part = [&] {
      char* const own = workspace + index * (most_bytes - input_bytes);
      largest[static_cast<size_t>(index)] = grad_input(conv, gradient_bytes, packing.weights(), to_input, member, own);
    };
    const auto weight_part = [&] {
      char* const own = workspace + index * (most_bytes - weight_bytes);
      const auto zero_point = static_cast<int32_t>(for_weight.input_zero_point);
      grad_weight(conv, gradient_bytes, image_bytes, zero_point, grad_bias, to_weight, member, own);
    };
    // While one packs weights, the others do what needs none.
    if (index == 0) {
      input_part();
      weight_part();
    } else {
      weight_part();
      input_part();
    }
  });
  return *std::max_element(largest.begin(), largest.end());
}

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
    const Sizes& windows) {
  const Geometry geometry{kName, windows};
  geometry.check();
  STD_TORCH_CHECK(
      input.dim() == 4 && weight.dim() == 4, "int8_conv2d_backward: input and weight must have 4 dimensions");
  STD_TORCH_CHECK(
      input.size(1) == weight.size(1) * geometry.groups(),
      "int8_conv2d_backward: input must have as many channels as weight has, times groups");
  const Pair input_size{input.size(2), input.size(3)};
  const GradInputArguments for_input{grad_output, weight, packed, input_size, geometry};
  const GradWeightArguments for_weight{grad_output, input, input_zero_point, geometry};
  const Conv2d conv = for_input.conv();
  for_weight.conv({weight.size(2), weight.size(3)}); // checks what is left
  Rescaling to_input = rescaling(kName, Result::int8, grad_input_scale, 1, false, "grad_input_scale");
  set_rounding(kName, rounding, seed, to_input);
  Rescaling to_weight =
      rescaling(kName, Result::floats, grad_weight_scale, conv.out_channels, true, "grad_weight_scale");
  Tensor of_input = empty_image(for_input.sizes(conv), ScalarType::Char, grad_output);
  Tensor of_weight = empty_image(for_weight.weight_sizes(conv), ScalarType::Float, grad_output);
  Tensor of_bias = for_weight.empty_bias(conv);
  to_input.finish.output = of_input.mutable_data_ptr();
  to_weight.finish.output = of_weight.mutable_data_ptr();
  auto* const grad_bias = static_cast<int64_t*>(of_bias.mutable_data_ptr());
  const Threads threads = threads_for(conv);
  const bool independent = grad_weight_parts_are_independent(conv, threads) && !packs_on_the_way(conv, Pass::grad_input);
  float largest = 0;
  if (threads.count > 1 && independent) {
    largest = run_together(conv, for_input, for_weight, to_input.finish, to_weight.finish, grad_bias, threads);
  } else {
    largest = for_input.run(conv, to_input.finish);
    for_weight.run(conv, to_weight.finish, grad_bias);
  }
  return {of_input, one_number(largest, grad_output), of_weight, of_bias};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? packed, Tensor grad_input_scale, "
      "Tensor grad_weight_scale, int input_zero_point, int rounding, int seed, int[] windows) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_conv2d_backward", TORCH_BOX(&conv2d_backward));
}
