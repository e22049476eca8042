// Tensors whose second dimension is channels, as the kernels take them: checks, memory formats, types and threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/activations.h"
#include "kernels/channel_layout.h"
#include "kernels/storage.h"

// Hidden, as the types of the stable ABI are.
namespace torch_odt [[gnu::visibility("hidden")]] {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements below which a thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

// A tensor that is dense with its channels as one axis.
struct ChannelTensor {
  Tensor tensor;
  bool channels_innermost;

  // As the argument `input` of an operator: kept in its memory format if it is dense, contiguous otherwise.
  ChannelTensor(const Tensor& input, const char* operator_name);

  kernels::ChannelLayout layout() const;
  int64_t channels() const {
    return tensor.size(1);
  }
  ScalarType parameter_dtype() const {
    return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
  // Another tensor of the same shape and dtype with its elements in the same order.
  Tensor laid_out_alike(const Tensor& other, const char* operator_name, const char* name) const;
  // Values for the channels, uninitialised.
  Tensor per_channel() const;
};

// A parameter of a channel tensor: checked and contiguous.
Tensor channel_parameter(
    const Tensor& parameter, const ChannelTensor& input, const char* operator_name, const char* name);
std::optional<Tensor> channel_parameter(
    const std::optional<Tensor>& parameter, const ChannelTensor& input, const char* operator_name, const char* name);

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? data_of<T>(*tensor) : nullptr;
}
template <typename T>
T* mutable_data_of(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls function<Storage, Parameter>() with the types of an input.
template <typename Function>
void with_types(ScalarType dtype, const char* operator_name, const Function& function) {
  switch (dtype) {
    case ScalarType::Float:
      function.template operator()<float, float>();
      break;
    case ScalarType::Double:
      function.template operator()<double, double>();
      break;
    case ScalarType::BFloat16:
      function.template operator()<kernels::BFloat16, float>();
      break;
    default:
      STD_TORCH_CHECK(false, operator_name, ": the input must be float32, float64 or bfloat16");
  }
}

// The bounds as ATen's activation functions see them: as numbers of the input's type.
template <typename Storage, typename Parameter>
kernels::Bounds<Parameter> bounds_of(double low, double high) {
  return {
      kernels::rounded<Storage>(static_cast<Parameter>(low)), kernels::rounded<Storage>(static_cast<Parameter>(high))};
}

// Calls function(begin, end) for blocks of rows (see normalise_rows), the last ones of each thread first: where a pass
// over the same tensor went before, they are what it has left in the caches.
template <typename Function>
void for_rows_backwards(const kernels::ChannelLayout& layout, const Function& function) {
  const int64_t rows = layout.inner == 1 ? layout.outer : layout.outer * layout.channels;
  const int64_t block = std::max<int64_t>(1, kGrainElements * rows / std::max<int64_t>(1, layout.elements()));
  torch::stable::parallel_for(0, (rows + block - 1) / block, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = end; index-- > begin;) {
      function(index * block, std::min(rows, (index + 1) * block));
    }
  });
}

} // namespace torch_odt
