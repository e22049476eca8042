// Gradients, in float32 or bfloat16, and updated weights to int8, see kernels/int8/rows.h. Shapes for tracing are
// registered in torch_odt/ops.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/draws.h"
#include "kernels/int8/rows.h"
#include "ops_int8.h"

namespace {

using namespace torch_odt;
using kernels::int8::kByteSteps;
using kernels::int8::Rows;
using kernels::int8::RoundedRows;

constexpr char kQuantize[] = "int8_quantize_gradient";
constexpr char kStore[] = "int8_store_rounded_";
constexpr float kMost = 127.0F;
constexpr float kLeastStep = 0x1p-118F; // kByteSteps over it is finite
// Elements below which a thread costs more than it saves.
constexpr int64_t kGrainElements = 1 << 15;

Threads threads_of(const Rows& rows) {
  Threads threads = all_threads();
  threads.count = std::clamp<int64_t>(rows.count * rows.columns / kGrainElements, 1, threads.count);
  return threads;
}

// Random numbers depend on what is rounded alone: another gradient draws others, the same one the same again.
uint64_t seed_of(const std::vector<float>& numbers) {
  uint32_t seed = 0;
  for (const float number : numbers) {
    uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof(bits));
    seed = kernels::int8::mixed((seed + kernels::int8::kGolden) ^ bits);
  }
  return seed;
}

// The step with which int8 reaches so far; 1 where a step would be so small that what kernels multiply by is infinite.
float step_of(float largest) {
  const float step = largest / kMost;
  return step >= kLeastStep ? step : 1.0F;
}

// Factors, as many as kernels read.
std::vector<float> padded(size_t channels) {
  return std::vector<float>(channels + kernels::int8::kPaddedColumns);
}

// Of a 256th of a step, as kernels take it.
float factor_of(float scale, float step) {
  constexpr float kMostFactor = std::numeric_limits<float>::max() / kByteSteps;
  return std::clamp(scale / step, -kMostFactor, kMostFactor) * kByteSteps;
}

struct Scanned {
  std::vector<float> largest;
  std::vector<float> sums;
};

Scanned scanned(const Rows& rows, const Threads& threads, const Tensor& like) {
  Scanned found{
      std::vector<float>(static_cast<size_t>(rows.columns)), std::vector<float>(static_cast<size_t>(rows.columns))};
  Tensor workspace = empty_flat(kernels::int8::scan_workspace_bytes(rows), ScalarType::Byte, like);
  kernels::int8::scan(rows, threads, found.largest.data(), found.sums.data(), workspace.mutable_data_ptr());
  return found;
}

// How many pixels there are for each row of values: all of an image, where they are the same in memory.
int64_t pixels_of_row(const Tensor& gradient) {
  const int64_t channels = gradient.size(1);
  const int64_t pixels = gradient.size(2) * gradient.size(3);
  // No element's place depends on the stride of a dimension of size 1.
  const auto strides_by = [&](int64_t dimension, int64_t stride) {
    return gradient.size(dimension) == 1 || gradient.stride(dimension) == stride;
  };
  return pixels > 1 && strides_by(2, 0) && strides_by(3, 0) && strides_by(1, 1) && strides_by(0, channels) ? pixels : 1;
}

bool all_finite(const std::vector<float>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](float number) { return std::isfinite(number); });
}

Tensor of_numbers(const std::vector<float>& numbers, const Tensor& like) {
  Tensor result = empty_flat(static_cast<int64_t>(numbers.size()), ScalarType::Float, like);
  std::copy(numbers.begin(), numbers.end(), static_cast<float*>(result.mutable_data_ptr()));
  return result;
}

} // namespace

namespace torch_odt {

RoundedGradient int8_quantize_gradient(
    const Tensor& gradient, const std::optional<Tensor>& mask, const std::optional<Tensor>& weight_scale, bool for_weight) {
  const bool in_bfloat16 = gradient.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(
      gradient.is_cpu() && (in_bfloat16 || gradient.scalar_type() == ScalarType::Float) && gradient.dim() == 4,
      kQuantize,
      ": gradient must be a float32 or bfloat16 CPU tensor of 4 dimensions");
  const int64_t channels = gradient.size(1);
  STD_TORCH_CHECK(
      !mask ||
          (mask->is_cpu() && mask->scalar_type() == ScalarType::Byte && mask->dim() == 1 && mask->is_contiguous() &&
           mask->size(0) == (gradient.numel() + 7) / 8),
      kQuantize,
      ": mask must be contiguous uint8, with a bit for each element");
  STD_TORCH_CHECK(
      !weight_scale ||
          (weight_scale->is_cpu() && weight_scale->scalar_type() == ScalarType::Float && weight_scale->dim() == 1 &&
           weight_scale->size(0) == channels),
      kQuantize,
      ": weight_scale must be float32, with one number for each channel");
  const int64_t repeats = pixels_of_row(gradient);
  const Tensor dense = repeats > 1 ? gradient : channels_last(gradient);
  const Rows rows{
      dense.const_data_ptr(),
      gradient.size(0) * gradient.size(2) * gradient.size(3),
      channels,
      mask ? static_cast<const uint8_t*>(mask->const_data_ptr()) : nullptr,
      repeats,
      in_bfloat16};
  const Threads threads = threads_of(rows);
  Scanned found = scanned(rows, threads, gradient);
  STD_TORCH_CHECK(
      all_finite(found.largest), "int8_layer: a gradient is not finite: the loss has diverged, or it overflows");

  std::vector<float> steps(found.largest.size());
  std::transform(found.largest.begin(), found.largest.end(), steps.begin(), step_of);
  std::vector<float> factors = padded(steps.size());
  std::vector<float> input_factors = padded(steps.size());
  float input_step = 1;
  const Tensor scale = weight_scale ? as_contiguous(*weight_scale) : gradient;
  if (weight_scale) {
    const auto* const scales = static_cast<const float*>(scale.const_data_ptr());
    float most = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      const float largest = std::abs(found.largest[i] * scales[i]);
      STD_TORCH_CHECK(std::isfinite(largest), kGradientNotFinite);
      most = std::max(most, largest);
    }
    input_step = step_of(most);
    for (size_t i = 0; i < steps.size(); ++i) {
      input_factors[i] = factor_of(scales[i], input_step);
    }
  }
  const auto made = [&](bool wanted) {
    return wanted
        ? empty_image({gradient.size(0), channels, gradient.size(2), gradient.size(3)}, ScalarType::Char, gradient)
        : empty_flat(0, ScalarType::Char, gradient);
  };
  Tensor of_input = made(weight_scale.has_value());
  Tensor of_weight = made(for_weight);
  if (for_weight) {
    std::transform(steps.begin(), steps.end(), factors.begin(), [](float step) { return factor_of(1, step); });
  }
  const RoundedRows to_input{static_cast<int8_t*>(of_input.mutable_data_ptr()), input_factors.data()};
  const RoundedRows to_weight{static_cast<int8_t*>(of_weight.mutable_data_ptr()), factors.data()};
  if (rows.count * rows.columns > 0 && (weight_scale || for_weight)) {
    const bool both = weight_scale && for_weight;
    kernels::int8::round_rows(
        rows, seed_of(found.largest), weight_scale ? to_input : to_weight, both ? &to_weight : nullptr, threads);
  }
  return {of_input, of_weight, input_step, std::move(steps), std::move(found.sums)};
}

int64_t* counters_of(const char* name, Tensor& tensor, int64_t count, const char* argument) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.numel() == count,
      name,
      ": ",
      argument,
      " must be a contiguous int64 CPU tensor of ",
      count,
      " numbers");
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

void check_update(const char* name, const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.is_cpu() && weight.scalar_type() == ScalarType::Char && (weight.dim() == 2 || weight.dim() == 4),
      name,
      ": weight must be an int8 CPU tensor of 2 or of 4 dimensions");
  const Tensor dense = in_memory_order(weight);
  STD_TORCH_CHECK(
      dense.const_data_ptr() == weight.const_data_ptr(),
      name,
      ": weight is updated in place, and must be contiguous, with 4 dimensions in memory_format=torch.channels_last");
}

void check_update(const char* name, const Tensor& weight, const Tensor& floats, const char* argument) {
  STD_TORCH_CHECK(
      weight.is_cpu() && weight.scalar_type() == ScalarType::Char && floats.is_cpu() &&
          floats.scalar_type() == ScalarType::Float && weight.dim() == floats.dim() &&
          (weight.dim() == 2 || weight.dim() == 4),
      name,
      ": weight must be int8 and ",
      argument,
      " float32, CPU tensors of 2 or of 4 dimensions");
  for (int64_t i = 0; i < weight.dim(); ++i) {
    STD_TORCH_CHECK(
        weight.size(i) == floats.size(i), name, ": weight and ", argument, " must be of the same shape");
  }
  check_update(name, weight);
}

uint64_t update_seed(const int64_t* seed_and_updates) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15; // 2^64 over the golden ratio
  return static_cast<uint64_t>(seed_and_updates[0]) * kFactor + static_cast<uint64_t>(seed_and_updates[1]);
}

} // namespace torch_odt

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_gradient(
    const Tensor& gradient, const std::optional<Tensor>& mask, const std::optional<Tensor>& weight_scale, bool for_weight) {
  const RoundedGradient made = int8_quantize_gradient(gradient, mask, weight_scale, for_weight);
  return {
      made.for_input,
      made.for_weight,
      one_number(made.input_step, gradient),
      of_numbers(made.weight_steps, gradient),
      of_numbers(made.sums, gradient)};
}

void store_rounded_(Tensor weight, const Tensor& steps, Tensor rounding, Tensor saturated) {
  int64_t* const seed_and_updates = counters_of(kStore, rounding, 2, "rounding");
  int64_t* const clamped = counters_of(kStore, saturated, 1, "saturated");
  check_update(kStore, weight, steps, "steps");
  const Tensor source = in_memory_order(steps);
  const int64_t count = weight.size(0);
  const Rows rows{source.const_data_ptr(), count, count > 0 ? weight.numel() / count : 0};
  const Threads threads = threads_of(rows);
  STD_TORCH_CHECK(all_finite(scanned(rows, threads, steps).largest), kNotFinite);
  const uint64_t seed = update_seed(seed_and_updates);
  if (weight.numel() > 0) {
    *clamped += kernels::int8::round_rows(
        rows, seed, {static_cast<int8_t*>(weight.mutable_data_ptr())}, nullptr, threads);
  }
  ++seed_and_updates[1];
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_quantize_gradient(Tensor gradient, Tensor? mask, Tensor? weight_scale, bool for_weight) -> (Tensor, Tensor, "
      "Tensor, Tensor, Tensor)");
  m.def(
      "int8_store_rounded_(Tensor(a!) weight, Tensor steps, Tensor(b!) rounding, Tensor(c!) saturated) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_quantize_gradient", TORCH_BOX(&quantize_gradient));
  m.impl("int8_store_rounded_", TORCH_BOX(&store_rounded_));
}
