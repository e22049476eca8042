// What the operators of batch normalisation share: activation functions by name, statistics, normalisation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/activations.h"
#include "kernels/batch_norm.h"
#include "ops_channels.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

// An activation function as an operator is given it; the bounds are those of "clamp".
struct Activation {
  std::string name;
  double low;
  double high;
};

template <typename Storage, typename Parameter>
kernels::Clamp<Storage, Parameter> clamp_of(double low, double high) {
  return kernels::Clamp<Storage, Parameter>(bounds_of<Storage, Parameter>(low, high));
}

// Calls function(activation) with the object that kernels take.
template <typename Storage, typename Parameter, typename Function>
void with_activation(const Activation& activation, const char* operator_name, const Function& function) {
  if (activation.name == "clamp") {
    function(clamp_of<Storage, Parameter>(activation.low, activation.high));
  } else if (activation.name == "hardswish") {
    function(kernels::Hardswish());
  } else if (activation.name == "silu") {
    function(kernels::Silu());
  } else {
    STD_TORCH_CHECK(false, operator_name, ": there is no activation function ", activation.name);
  }
}

// What a batch normalisation multiplies by and adds, per channel.
struct NormalisationFactors {
  Tensor scale;
  Tensor shift;

  NormalisationFactors(
      const ChannelTensor& source,
      const Tensor& mean,
      const Tensor& invstd,
      const std::optional<Tensor>& weight,
      const std::optional<Tensor>& bias,
      const char* operator_name);
};

// The source normalised, with the residual added, behind the activation function.
Tensor normalised(
    const ChannelTensor& source,
    const NormalisationFactors& factors,
    const std::optional<Tensor>& residual,
    const Activation& activation,
    const char* operator_name);

// An array of [slices][channels].
Tensor per_slice(const ChannelTensor& source, const kernels::Slices& slices, ScalarType dtype);

// Calls function(begin, end) for the tasks of the slices.
template <typename Function>
void for_tasks(const kernels::Slices& slices, const Function& function) {
  const int64_t task_elements = std::max<int64_t>(1, slices.layout.elements() / slices.tasks());
  torch::stable::parallel_for(0, slices.tasks(), std::max<int64_t>(1, kGrainElements / task_elements), function);
}

} // namespace torch_odt
