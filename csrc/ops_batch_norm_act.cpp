// Batch normalisation in training mode with the clamp behind it, forward and backward. Shapes for tracing are
// registered in torch_odt/ops.

#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/batch_norm_backward.h"
#include "kernels/batch_norm_statistics.h"
#include "ops_channels.h"

namespace {

using namespace torch_odt;

constexpr char kForward[] = "batch_norm_act";
constexpr char kBackward[] = "batch_norm_act_backward";

// An array of [slices][channels].
Tensor per_slice(const ChannelTensor& source, const kernels::Slices& slices, ScalarType dtype) {
  return torch::stable::new_empty(source.tensor, {slices.number * slices.layout.channels}, dtype);
}

// Calls function(begin, end) for the tasks of the slices.
template <typename Function>
void for_tasks(const kernels::Slices& slices, const Function& function) {
  const int64_t task_elements = std::max<int64_t>(1, slices.layout.elements() / slices.tasks());
  torch::stable::parallel_for(0, slices.tasks(), std::max<int64_t>(1, kGrainElements / task_elements), function);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_act(
    const Tensor& input,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const Tensor& running_mean,
    const Tensor& running_var,
    double momentum,
    double eps,
    double low,
    double high) {
  const ChannelTensor source(input, kForward);
  STD_TORCH_CHECK(input.numel() > 0, kForward, ": the input must have elements");
  const std::optional<Tensor> weight_data = channel_parameter(weight, source, kForward, "weight");
  const std::optional<Tensor> bias_data = channel_parameter(bias, source, kForward, "bias");
  const Tensor running_mean_data = channel_parameter(running_mean, source, kForward, "running_mean");
  const Tensor running_var_data = channel_parameter(running_var, source, kForward, "running_var");
  Tensor output = torch::stable::empty_like(source.tensor);
  Tensor mean = source.per_channel();
  Tensor invstd = source.per_channel();
  Tensor new_mean = source.per_channel();
  Tensor new_var = source.per_channel();

  const kernels::ChannelLayout layout = source.layout();
  const kernels::Slices slices(layout);
  Tensor centre = per_slice(source, slices, source.parameter_dtype());
  Tensor sum = per_slice(source, slices, ScalarType::Double);
  Tensor square = per_slice(source, slices, ScalarType::Double);
  Tensor scale = source.per_channel();
  Tensor shift = source.per_channel();
  with_types(input.scalar_type(), kForward, [&]<typename Storage, typename Parameter>() {
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
    kernels::normalisation_factors(
        data_of<Parameter>(mean),
        data_of<Parameter>(invstd),
        data_of<Parameter>(weight_data),
        data_of<Parameter>(bias_data),
        layout.channels,
        mutable_data_of<Parameter>(scale),
        mutable_data_of<Parameter>(shift));
    const kernels::Bounds<Parameter> bounds = bounds_of<Storage, Parameter>(low, high);
    auto* const to = mutable_data_of<Storage>(output);
    for_rows_backwards(layout, [&](int64_t begin, int64_t end) {
      kernels::normalise_rows(
          from, data_of<Parameter>(scale), data_of<Parameter>(shift), bounds, layout, begin, end, to);
    });
  });
  return {output, mean, invstd, new_mean, new_var};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_backward(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double low,
    double high,
    const std::vector<bool>& output_mask) {
  STD_TORCH_CHECK(output_mask.size() == 3, kBackward, ": the mask must name three results");
  const ChannelTensor source(input, kBackward);
  STD_TORCH_CHECK(input.numel() > 0, kBackward, ": the input must have elements");
  const Tensor gradient = source.laid_out_alike(grad_output, kBackward, "grad_output");
  const Tensor mean_data = channel_parameter(mean, source, kBackward, "mean");
  const Tensor invstd_data = channel_parameter(invstd, source, kBackward, "invstd");
  const std::optional<Tensor> weight_data = channel_parameter(weight, source, kBackward, "weight");
  const std::optional<Tensor> bias_data = channel_parameter(bias, source, kBackward, "bias");
  const Tensor nothing = torch::stable::new_empty(input, {0});
  Tensor grad_input = output_mask[0] ? torch::stable::empty_like(source.tensor) : nothing;
  Tensor grad_weight = source.per_channel();
  Tensor grad_bias = source.per_channel();

  const kernels::ChannelLayout layout = source.layout();
  const kernels::Slices slices(layout);
  Tensor sum = per_slice(source, slices, ScalarType::Double);
  Tensor product = per_slice(source, slices, ScalarType::Double);
  Tensor scale = source.per_channel();
  Tensor shift = source.per_channel();
  Tensor slope = source.per_channel();
  Tensor mean_gradient = source.per_channel();
  Tensor projection = source.per_channel();
  with_types(input.scalar_type(), kBackward, [&]<typename Storage, typename Parameter>() {
    kernels::normalisation_factors(
        data_of<Parameter>(mean_data),
        data_of<Parameter>(invstd_data),
        data_of<Parameter>(weight_data),
        data_of<Parameter>(bias_data),
        layout.channels,
        mutable_data_of<Parameter>(scale),
        mutable_data_of<Parameter>(shift));
    const kernels::Normalised<Storage, Parameter> normalised{
        data_of<Storage>(source.tensor),
        data_of<Parameter>(mean_data),
        data_of<Parameter>(scale),
        data_of<Parameter>(shift),
        bounds_of<Storage, Parameter>(low, high)};
    const kernels::GradientSums sums{mutable_data_of<double>(sum), mutable_data_of<double>(product)};
    const auto* const from = data_of<Storage>(gradient);
    for_tasks(slices, [&](int64_t begin, int64_t end) {
      kernels::sum_gradients(from, normalised, slices, begin, end, sums);
    });
    const kernels::GradientFactors<Parameter> factors{
        mutable_data_of<Parameter>(slope),
        mutable_data_of<Parameter>(mean_gradient),
        mutable_data_of<Parameter>(projection)};
    kernels::finish_gradients(
        sums,
        slices,
        data_of<Parameter>(invstd_data),
        data_of<Parameter>(weight_data),
        factors,
        mutable_data_of<Parameter>(grad_weight),
        mutable_data_of<Parameter>(grad_bias));
    if (output_mask[0]) {
      auto* const to = mutable_data_of<Storage>(grad_input);
      for_rows_backwards(layout, [&](int64_t begin, int64_t end) {
        kernels::input_gradient_rows(from, normalised, factors, layout, begin, end, to);
      });
    }
  });
  const Tensor no_parameter = torch::stable::new_empty(mean, {0});
  return {grad_input, output_mask[1] ? grad_weight : no_parameter, output_mask[2] ? grad_bias : no_parameter};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
      "float momentum, float eps, float low, float high) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_act_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? bias, float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
}
