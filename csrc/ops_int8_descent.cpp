// Gradient descent of int8 weights, see kernels/int8/descent.h. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/descent.h"
#include "ops_int8.h"

namespace {

using namespace torch_odt;
using kernels::int8::Descended;
using kernels::int8::Descent;

constexpr char kName[] = "int8_descend_";
// Elements below which a thread costs more than it saves.
constexpr int64_t kGrainElements = 1 << 15;

void descend_(
    Tensor weight,
    const Tensor& gradient,
    const Tensor& scale,
    Tensor rounding,
    Tensor saturated,
    double rate,
    double weight_decay) {
  check_update(kName, weight, gradient, "gradient");
  const Tensor source = in_memory_order(gradient);
  int64_t* const seed_and_updates = counters_of(kName, rounding, 2, "rounding");
  int64_t* const clamped = counters_of(kName, saturated, 1, "saturated");
  const int64_t rows = weight.size(0);
  const float* const steps = floats_of(kName, scale, rows, "scale");
  if (weight.numel() > 0) {
    Threads threads = all_threads();
    threads.count = std::clamp<int64_t>(weight.numel() / kGrainElements, 1, threads.count);
    const Descending descending(rate, weight_decay, steps, rows, seed_and_updates);
    const Descent how{
        static_cast<const float*>(source.const_data_ptr()),
        static_cast<int8_t*>(weight.mutable_data_ptr()),
        rows,
        weight.numel() / rows,
        descending.rates.data(),
        descending.shrink,
        descending.seed};
    const Descended found = kernels::int8::descend(how, threads);
    STD_TORCH_CHECK(found.is_finite, kNotFinite);
    *clamped += found.clamped;
  }
  ++seed_and_updates[1];
}

} // namespace

torch_odt::Descending::Descending(
    double rate, double decay, const float* steps, int64_t channels, const int64_t* seed_and_updates)
    : rates(static_cast<size_t>(channels)),
      shrink(static_cast<float>(rate) * static_cast<float>(decay)),
      seed(update_seed(seed_and_updates)) {
  for (int64_t i = 0; i < channels; ++i) {
    rates[static_cast<size_t>(i)] = static_cast<float>(rate) / steps[i];
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "int8_descend_(Tensor(a!) weight, Tensor gradient, Tensor scale, Tensor(b!) rounding, Tensor(c!) saturated, "
      "float rate, float weight_decay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_descend_", TORCH_BOX(&descend_));
}
