// Batch normalisation with statistics that are given. Shapes for tracing and gradients are registered in torch_odt/ops.

#include <limits>
#include <optional>

#include <torch/csrc/stable/library.h>

#include "ops_channels.h"

namespace {

using namespace torch_odt;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor normalise(
    const char* name,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double low,
    double high) {
  const ChannelTensor source(input, name);
  const Tensor mean_data = channel_parameter(mean, source, name, "mean");
  const Tensor invstd_data = channel_parameter(invstd, source, name, "invstd");
  const std::optional<Tensor> weight_data = channel_parameter(weight, source, name, "weight");
  const std::optional<Tensor> bias_data = channel_parameter(bias, source, name, "bias");
  Tensor scale = source.per_channel();
  Tensor shift = source.per_channel();
  Tensor output = torch::stable::empty_like(source.tensor);
  const kernels::ChannelLayout layout = source.layout();
  with_types(input.scalar_type(), name, [&]<typename Storage, typename Parameter>() {
    kernels::normalisation_factors(
        data_of<Parameter>(mean_data),
        data_of<Parameter>(invstd_data),
        data_of<Parameter>(weight_data),
        data_of<Parameter>(bias_data),
        layout.channels,
        mutable_data_of<Parameter>(scale),
        mutable_data_of<Parameter>(shift));
    const kernels::Bounds<Parameter> bounds = bounds_of<Storage, Parameter>(low, high);
    for_rows_backwards(layout, [&](int64_t begin, int64_t end) {
      kernels::normalise_rows(
          data_of<Storage>(source.tensor),
          data_of<Parameter>(scale),
          data_of<Parameter>(shift),
          bounds,
          layout,
          begin,
          end,
          mutable_data_of<Storage>(output));
    });
  });
  return output;
}

Tensor batch_norm_normalize(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  return normalise("batch_norm_normalize", input, mean, invstd, weight, bias, -kInfinity, kInfinity);
}

Tensor batch_norm_act_normalize(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double low,
    double high) {
  return normalise("batch_norm_act_normalize", input, mean, invstd, weight, bias, low, high);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("batch_norm_normalize(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor");
  m.def(
      "batch_norm_act_normalize(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
      "float low, float high) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_normalize", TORCH_BOX(&batch_norm_normalize));
  m.impl("batch_norm_act_normalize", TORCH_BOX(&batch_norm_act_normalize));
}
