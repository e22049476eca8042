// What the int8 operators share: checked arguments, how sums become another type, packed weights, threads.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/int8/conv2d.h"
#include "ops_tensors.h"

// Hidden, as the types of the stable ABI are.
namespace torch_odt [[gnu::visibility("hidden")]] {

inline constexpr char kGradientNotFinite[] =
    "int8_layer: a gradient times the weight's steps is not finite: the loss has diverged";
inline constexpr char kBiasNotFinite[] = "int8_layer: a bias over its steps is not a number: the training has diverged";
inline constexpr char kNotFinite[] =
    "an update of int8 weights is not finite: the loss has diverged; lower the learning rate. Layers that were updated "
    "before this one stay so";

using kernels::WindowAxis;
using kernels::int8::Conv2d;
using kernels::int8::Finish;
using kernels::int8::Pass;
using kernels::int8::Result;
using kernels::int8::Threads;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using Pair = Sizes;

// The argument `windows` that says which convolution is meant: stride, padding and dilation, each of rows and of
// columns, and groups. One list, because operators' arguments are boxed, which takes microseconds for each list.
inline constexpr int64_t kMostGeometry = int64_t{1} << 30; // whose products 64 bits hold

struct Geometry {
  static constexpr size_t kNumbers = 7;

  const char* name;
  const Sizes& windows;

  int64_t stride(size_t which) const {
    return windows[which];
  }
  int64_t padding(size_t which) const {
    return windows[2 + which];
  }
  int64_t dilation(size_t which) const {
    return windows[4 + which];
  }
  int64_t groups() const {
    return windows[6];
  }

  void check() const {
    STD_TORCH_CHECK(
        windows.size() == kNumbers,
        name,
        ": windows are seven numbers: stride, padding and dilation, for rows and for columns, and groups");
    for (const size_t which : {0, 1}) {
      STD_TORCH_CHECK(stride(which) > 0, name, ": stride must be positive");
      STD_TORCH_CHECK(padding(which) >= 0, name, ": padding must not be negative");
      STD_TORCH_CHECK(dilation(which) > 0, name, ": dilation must be positive");
      STD_TORCH_CHECK(
          std::max({stride(which), padding(which), dilation(which)}) <= kMostGeometry,
          name,
          ": stride, padding and dilation must be ",
          kMostGeometry,
          " at most");
    }
    STD_TORCH_CHECK(groups() > 0, name, ": groups must be positive");
  }

  WindowAxis axis(size_t which, int64_t input, int64_t kernel) const {
    const int64_t reach = input + 2 * padding(which) - dilation(which) * (kernel - 1) - 1;
    STD_TORCH_CHECK(kernel > 0, name, ": the kernel is empty");
    STD_TORCH_CHECK(reach >= 0, name, ": the kernel is larger than the padded input");
    return {input, reach / stride(which) + 1, kernel, stride(which), padding(which), dilation(which)};
  }
};

void check_int8(const Tensor& tensor, const char* name, const char* argument);
void check_zero_point(int64_t zero_point, const char* name);

// After a pass whose result are sums.
void check_fits(float largest, const char* name);

// The convolution that is meant.
Conv2d conv_of(
    const Geometry& geometry,
    Pass pass,
    int64_t batch,
    const Pair& input_size,
    int64_t in_channels,
    const Tensor& weight);

Tensor channels_last(const Tensor& tensor);
// Images in channels_last, everything else contiguous.
Tensor in_memory_order(const Tensor& tensor);
const int8_t* bytes_of(const Tensor& tensor);
Tensor empty_image(const Pair& sizes, ScalarType dtype, const Tensor& like);
Tensor empty_flat(int64_t count, ScalarType dtype, const Tensor& like);
Tensor one_number(float value, const Tensor& like);

Threads threads_for(const Conv2d& conv);
Threads all_threads();
// Calls function(member) with each member of some threads, in parallel.
template <typename Function>
void run_members(const Threads& threads, const Function& function) {
  const auto task = [](const void* context, int64_t index) {
    const auto& [all, body] = *static_cast<const std::pair<Threads, const Function*>*>(context);
    Threads member = all;
    member.member = index;
    (*body)(member);
  };
  const std::pair<Threads, const Function*> context(threads, &function);
  threads.run(threads.count, task, &context);
}

// How sums become another type, from the arguments that say so.
struct Rescaling {
  std::vector<float> multipliers;
  Finish finish;
};

Rescaling rescaling(
    const char* name,
    Result result,
    const Tensor& scale,
    int64_t channels,
    bool channels_are_rows,
    const char* argument = "scale");
Rescaling rescaling(
    const char* name,
    Result result,
    std::vector<float> multipliers,
    bool channels_are_rows,
    const char* argument = "scale");
void set_rounding(const char* name, int64_t rounding, int64_t seed, Rescaling& made);
void set_range(const char* name, int64_t zero_point, int64_t low, int64_t high, Finish& finish);

// What was packed, if it is for this convolution and pass, or what is packed now; and where in it the weights begin.
Tensor packed_for(
    const Conv2d& conv, Pass pass, const Tensor& weight, const std::optional<Tensor>& packed, const Threads& threads);
const void* data_of_packed(const Tensor& packed);

// The numbers of a float32 tensor of so many.
const float* floats_of(const char* name, const Tensor& tensor, int64_t count, const char* argument);

// A step and a zero point.
struct Grid {
  float step;
  int64_t zero;

  Grid(const char* name, const Tensor& grid, const char* argument);

  // Bounds in real numbers, or none, as values of int8.
  std::pair<int64_t, int64_t> bounds(std::optional<double> low, std::optional<double> high) const;
};

// NaN in bfloat16, once, seen as a tensor of those sizes: see torch_odt/quant/activation.py.
Tensor slot_of(const Pair& sizes, const Tensor& like);

// Of an update of an int8 weight in place: its seed and the number of updates, or how many weights were clamped; weights
// and what they become, checked; and what rounding draws from.
int64_t* counters_of(const char* name, Tensor& tensor, int64_t count, const char* argument);
void check_update(const char* name, const Tensor& weight);
void check_update(const char* name, const Tensor& weight, const Tensor& floats, const char* argument);
uint64_t update_seed(const int64_t* seed_and_updates);

// Operators that others are made of; as they are called from there, numbers are no tensors.
using Numbers = std::vector<float>;

Tensor int8_conv2d_scaled(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<std::vector<int32_t>>& bias,
    Numbers scale,
    int64_t input_zero_point,
    const Sizes& windows);

// Rounded to the nearest; the output and its mask.
std::tuple<Tensor, Tensor> int8_conv2d_quantized(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<std::vector<int32_t>>& bias,
    Numbers scale,
    int64_t input_zero_point,
    int64_t output_zero_point,
    int64_t low,
    int64_t high,
    const Sizes& windows);

// As int8_conv2d_grad_input_scaled, rounded to the nearest; the scale is one number, or one for each input channel.
Tensor int8_conv2d_grad_input_in_bfloat16(
    const Tensor& grad_output,
    const Tensor& weight,
    Numbers scale,
    const Pair& input_size,
    const Sizes& windows);

Tensor int8_conv2d_grad_weight_scaled(
    const Tensor& grad_output,
    const Tensor& input,
    Numbers scale,
    int64_t input_zero_point,
    const Pair& kernel_size,
    const Sizes& windows);

// Gradient descent of a weight, see kernels/int8/descent.h: gradients are those of real numbers, and weights count steps.
struct Descending {
  Numbers rates;
  float shrink;
  uint64_t seed;

  Descending(double rate, double decay, const float* steps, int64_t channels, const int64_t* seed_and_updates);
};

// The weight's gradient is taken off the weight as int8_descend_ does it, and is never stored.
// Returns how many weights were clamped. What is not finite is told before a weight is changed: by the largest gradient
// that there could be, rather than by that which there is.
int64_t int8_conv2d_descend_weight_(
    Tensor weight,
    const Tensor& grad_output,
    const Tensor& input,
    Numbers scale,
    int64_t input_zero_point,
    const Descending& how,
    const Sizes& windows);

// What int8_quantize_gradient returns; tensors that were not asked for are empty.
struct RoundedGradient {
  Tensor for_input;
  Tensor for_weight;
  float input_step;
  Numbers weight_steps;
  Numbers sums;
};

RoundedGradient int8_quantize_gradient(
    const Tensor& gradient, const std::optional<Tensor>& mask, const std::optional<Tensor>& weight_scale, bool for_weight);

// Memory for the runs of an operator, which has the same for all of them: what it allocates does not depend on how many
// there are.
class Workspace {
 public:
  void* of(int64_t bytes, const Tensor& like) {
    if (!held_ || held_->numel() < bytes) {
      held_ = empty_flat(bytes, ScalarType::Byte, like);
    }
    return held_->mutable_data_ptr();
  }

 private:
  std::optional<Tensor> held_;
};

} // namespace torch_odt
