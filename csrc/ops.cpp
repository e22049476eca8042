// The torch layer over csrc/kernels: checks, memory formats and threads. It uses the stable ABI only, so that one build
// loads into several versions of torch. Shapes for tracing and gradients are registered in torch_odt/ops.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/batch_norm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch_odt::kernels::BFloat16;
using torch_odt::kernels::ChannelLayout;

// Elements below which a thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

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

void check_per_channel(const Tensor& tensor, ScalarType dtype, int64_t channels, const char* name) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.dim() == 1 && tensor.size(0) == channels,
      "batch_norm_normalize: ",
      name,
      " must be a CPU tensor with one element for each of the ",
      channels,
      " channels");
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype,
      "batch_norm_normalize: ",
      name,
      " must be float64 for a float64 input, and float32 for any other");
}

template <typename Parameter>
const Parameter* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const Parameter*>(tensor->const_data_ptr()) : nullptr;
}

template <typename Storage, typename Parameter>
void normalise(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const ChannelLayout& layout,
    Tensor& output) {
  const auto factors = std::make_unique<Parameter[]>(static_cast<size_t>(2 * layout.channels));
  Parameter* const scale = factors.get();
  Parameter* const shift = scale + layout.channels;
  torch_odt::kernels::normalisation_factors<Parameter>(
      static_cast<const Parameter*>(mean.const_data_ptr()),
      static_cast<const Parameter*>(invstd.const_data_ptr()),
      data_of<Parameter>(weight),
      data_of<Parameter>(bias),
      layout.channels,
      scale,
      shift);

  const auto* const from = static_cast<const Storage*>(input.const_data_ptr());
  auto* const to = static_cast<Storage*>(output.mutable_data_ptr());
  const int64_t rows = layout.inner == 1 ? layout.outer : layout.outer * layout.channels;
  const int64_t row_elements = layout.inner == 1 ? layout.channels : layout.inner;
  const int64_t grain_rows = std::max<int64_t>(1, kGrainElements / row_elements);
  torch::stable::parallel_for(0, rows, grain_rows, [&](int64_t begin, int64_t end) {
    torch_odt::kernels::normalise_rows<Storage, Parameter>(from, scale, shift, layout, begin, end, to);
  });
}

Tensor batch_norm_normalize(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(
      input.is_cpu() && input.dim() >= 2,
      "batch_norm_normalize: the input must be a CPU tensor of at least 2 dimensions, the second being the channels");
  const int64_t channels = input.size(1);
  const ScalarType dtype = input.scalar_type();
  const ScalarType parameter_dtype = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  check_per_channel(mean, parameter_dtype, channels, "mean");
  check_per_channel(invstd, parameter_dtype, channels, "invstd");
  if (weight) {
    check_per_channel(*weight, parameter_dtype, channels, "weight");
  }
  if (bias) {
    check_per_channel(*bias, parameter_dtype, channels, "bias");
  }

  const bool channels_innermost = !input.is_contiguous() && has_channels_innermost(input);
  const Tensor source = channels_innermost ? input : torch::stable::contiguous(input);
  Tensor output = torch::stable::empty_like(source);
  const int64_t elements = source.numel();
  if (elements == 0) {
    return output;
  }
  const int64_t positions = elements / channels;
  const ChannelLayout layout = channels_innermost
      ? ChannelLayout{positions, channels, 1}
      : ChannelLayout{source.size(0), channels, positions / source.size(0)};

  const Tensor mean_data = torch::stable::contiguous(mean);
  const Tensor invstd_data = torch::stable::contiguous(invstd);
  std::optional<Tensor> weight_data;
  std::optional<Tensor> bias_data;
  if (weight) {
    weight_data = torch::stable::contiguous(*weight);
  }
  if (bias) {
    bias_data = torch::stable::contiguous(*bias);
  }
  switch (dtype) {
    case ScalarType::Float:
      normalise<float, float>(source, mean_data, invstd_data, weight_data, bias_data, layout, output);
      break;
    case ScalarType::Double:
      normalise<double, double>(source, mean_data, invstd_data, weight_data, bias_data, layout, output);
      break;
    case ScalarType::BFloat16:
      normalise<BFloat16, float>(source, mean_data, invstd_data, weight_data, bias_data, layout, output);
      break;
    default:
      STD_TORCH_CHECK(false, "batch_norm_normalize: the input must be float32, float64 or bfloat16");
  }
  return output;
}

} // namespace

STABLE_TORCH_LIBRARY(torch_odt, m) {
  m.def("batch_norm_normalize(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_normalize", TORCH_BOX(&batch_norm_normalize));
}

// Importing the module runs the registrations above; there is nothing in it.
extern "C" PyObject* PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
