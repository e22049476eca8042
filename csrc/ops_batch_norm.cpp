// Batch normalisation with statistics that are given. Shapes for tracing and gradients are registered in torch_odt/ops.

#include "ops_batch_norm.h"

#include <limits>
#include <optional>

#include <torch/csrc/stable/library.h>

namespace torch_odt {

NormalisationFactors::NormalisationFactors(
    const ChannelTensor& source,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const char* operator_name)
    : scale(source.per_channel()), shift(source.per_channel()) {
  with_types(source.tensor.scalar_type(), operator_name, [&]<typename Storage, typename Parameter>() {
    kernels::normalisation_factors(
        data_of<Parameter>(mean),
        data_of<Parameter>(invstd),
        data_of<Parameter>(weight),
        data_of<Parameter>(bias),
        source.channels(),
        mutable_data_of<Parameter>(scale),
        mutable_data_of<Parameter>(shift));
  });
}

Tensor normalised(
    const ChannelTensor& source,
    const NormalisationFactors& factors,
    const std::optional<Tensor>& residual,
    const Activation& activation,
    const char* operator_name) {
  std::optional<Tensor> addend;
  if (residual) {
    addend = source.laid_out_alike(*residual, operator_name, "residual");
  }
  Tensor output = torch::stable::empty_like(source.tensor);
  const kernels::ChannelLayout layout = source.layout();
  with_types(source.tensor.scalar_type(), operator_name, [&]<typename Storage, typename Parameter>() {
    with_activation<Storage, Parameter>(activation, operator_name, [&](const auto& function) {
      for_rows_backwards(layout, [&](int64_t begin, int64_t end) {
        kernels::normalise_rows(
            data_of<Storage>(source.tensor),
            data_of<Storage>(addend),
            data_of<Parameter>(factors.scale),
            data_of<Parameter>(factors.shift),
            function,
            layout,
            begin,
            end,
            mutable_data_of<Storage>(output));
      });
    });
  });
  return output;
}

Tensor per_slice(const ChannelTensor& source, const kernels::Slices& slices, ScalarType dtype) {
  return torch::stable::new_empty(source.tensor, {slices.number * slices.layout.channels}, dtype);
}

namespace {

Tensor normalise(
    const char* name,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const Activation& activation,
    const std::optional<Tensor>& residual) {
  const ChannelTensor source(input, name);
  const NormalisationFactors factors(
      source,
      channel_parameter(mean, source, name, "mean"),
      channel_parameter(invstd, source, name, "invstd"),
      channel_parameter(weight, source, name, "weight"),
      channel_parameter(bias, source, name, "bias"),
      name);
  return normalised(source, factors, residual, activation, name);
}

Tensor batch_norm_normalize(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Activation none{"clamp", -kInfinity, kInfinity};
  return normalise("batch_norm_normalize", input, mean, invstd, weight, bias, none, std::nullopt);
}

Tensor batch_norm_act_normalize(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::string& activation,
    double low,
    double high,
    const std::optional<Tensor>& residual) {
  return normalise(
      "batch_norm_act_normalize", input, mean, invstd, weight, bias, Activation{activation, low, high}, residual);
}

} // namespace

} // namespace torch_odt

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("batch_norm_normalize(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor");
  m.def(
      "batch_norm_act_normalize(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
      "str activation, float low, float high, Tensor? residual) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_normalize", TORCH_BOX(&torch_odt::batch_norm_normalize));
  m.impl("batch_norm_act_normalize", TORCH_BOX(&torch_odt::batch_norm_act_normalize));
}
