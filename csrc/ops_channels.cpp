#include "ops_channels.h"

namespace torch_odt {

namespace {

bool has_channels_innermost(const Tensor& tensor) {
  int64_t expected = 1;
  const auto is_dense_at = [&](int64_t axis) {
    if (tensor.size(axis) != 1 && tensor.stride(axis) != expected) {
      return false;
    }
    expected *= tensor.size(axis);
    return true;
  };
  if (!is_dense_at(1)) {
    return false;
  }
  for (int64_t axis = tensor.dim() - 1; axis >= 0; --axis) {
    if (axis != 1 && !is_dense_at(axis)) {
      return false;
    }
  }
  return true;
}

} // namespace

ChannelTensor::ChannelTensor(const Tensor& input, const char* operator_name)
    : tensor(input), channels_innermost(false) {
  STD_TORCH_CHECK(
      input.is_cpu() && input.dim() >= 2,
      operator_name,
      ": the input must be a CPU tensor of at least 2 dimensions, the second being the channels");
  channels_innermost = !input.is_contiguous() && has_channels_innermost(input);
  if (!channels_innermost) {
    tensor = torch::stable::contiguous(input);
  }
}

kernels::ChannelLayout ChannelTensor::layout() const {
  const int64_t elements = tensor.numel();
  if (elements == 0) {
    return {0, channels(), 1};
  }
  const int64_t positions = elements / channels();
  return channels_innermost ? kernels::ChannelLayout{positions, channels(), 1}
                            : kernels::ChannelLayout{tensor.size(0), channels(), positions / tensor.size(0)};
}

Tensor ChannelTensor::laid_out_alike(const Tensor& other, const char* operator_name, const char* name) const {
  bool fits = other.is_cpu() && other.scalar_type() == tensor.scalar_type() && other.dim() == tensor.dim();
  for (int64_t axis = 0; fits && axis < tensor.dim(); ++axis) {
    fits = other.size(axis) == tensor.size(axis);
  }
  STD_TORCH_CHECK(fits, operator_name, ": ", name, " must have the input's shape, dtype and device");
  if (!channels_innermost) {
    return torch::stable::contiguous(other);
  }
  if (has_channels_innermost(other)) {
    return other;
  }
  Tensor copy = torch::stable::empty_like(tensor);
  torch::stable::copy_(copy, other);
  return copy;
}

Tensor ChannelTensor::per_channel() const {
  return torch::stable::new_empty(tensor, {channels()}, parameter_dtype());
}

Tensor channel_parameter(
    const Tensor& parameter, const ChannelTensor& input, const char* operator_name, const char* name) {
  STD_TORCH_CHECK(
      parameter.is_cpu() && parameter.dim() == 1 && parameter.size(0) == input.channels(),
      operator_name,
      ": ",
      name,
      " must be a CPU tensor with one element for each of the ",
      input.channels(),
      " channels");
  STD_TORCH_CHECK(
      parameter.scalar_type() == input.parameter_dtype(),
      operator_name,
      ": ",
      name,
      " must be float64 for a float64 input, and float32 for any other");
  return torch::stable::contiguous(parameter);
}

std::optional<Tensor> channel_parameter(
    const std::optional<Tensor>& parameter, const ChannelTensor& input, const char* operator_name, const char* name) {
  if (!parameter) {
    return std::nullopt;
  }
  return channel_parameter(*parameter, input, operator_name, name);
}

} // namespace torch_odt
