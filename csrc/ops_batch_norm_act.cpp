// Batch normalisation in training mode with what follows it: a residual that is added, and an activation function.
// Shapes for tracing are registered in torch_odt/ops.

#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "kernels/batch_norm_statistics.h"
#include "ops_batch_norm.h"

namespace {

using namespace torch_odt;

constexpr char kName[] = "batch_norm_act";

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_act(
    const Tensor& input,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const Tensor& running_mean,
    const Tensor& running_var,
    double momentum,
    double eps,
    const std::string& activation,
    double low,
    double high,
    const std::optional<Tensor>& residual) {
  const ChannelTensor source(input, kName);
  STD_TORCH_CHECK(input.numel() > 0, kName, ": the input must have elements");
  const std::optional<Tensor> weight_data = channel_parameter(weight, source, kName, "weight");
  const std::optional<Tensor> bias_data = channel_parameter(bias, source, kName, "bias");
  const Tensor running_mean_data = channel_parameter(running_mean, source, kName, "running_mean");
  const Tensor running_var_data = channel_parameter(running_var, source, kName, "running_var");
  Tensor mean = source.per_channel();
  Tensor invstd = source.per_channel();
  Tensor new_mean = source.per_channel();
  Tensor new_var = source.per_channel();

  const kernels::Slices slices(source.layout());
  Tensor centre = per_slice(source, slices, source.parameter_dtype());
  Tensor sum = per_slice(source, slices, ScalarType::Double);
  Tensor square = per_slice(source, slices, ScalarType::Double);
  with_types(input.scalar_type(), kName, [&]<typename Storage, typename Parameter>() {
    const kernels::Moments<Parameter> moments{
        mutable_data_of<Parameter>(centre), mutable_data_of<double>(sum), mutable_data_of<double>(square)};
    const auto* const from = data_of<Storage>(source.tensor);
    for_tasks(slices, [&](int64_t begin, int64_t end) { kernels::take_moments(from, slices, begin, end, moments); });
    kernels::finish_statistics(
        moments,
        slices,
        eps,
        kernels::RunningAverages<Parameter>{
            momentum,
            data_of<Parameter>(running_mean_data),
            data_of<Parameter>(running_var_data),
            mutable_data_of<Parameter>(new_mean),
            mutable_data_of<Parameter>(new_var)},
        mutable_data_of<Parameter>(mean),
        mutable_data_of<Parameter>(invstd));
  });
  const NormalisationFactors factors(source, mean, invstd, weight_data, bias_data, kName);
  const Tensor output = normalised(source, factors, residual, Activation{activation, low, high}, kName);
  return {output, mean, invstd, new_mean, new_var};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
      "float momentum, float eps, str activation, float low, float high, Tensor? residual) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
}
