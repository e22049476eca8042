// The gradients of batch normalisation in training mode and of what follows it. Shapes for tracing are registered in
// torch_odt/ops.

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/batch_norm_residual_backward.h"
#include "ops_batch_norm.h"

namespace {

using namespace torch_odt;

// What both operators have in common: they differ in what passes the activation function, and in how it is summed.
struct Backward {
  std::vector<bool> output_mask;
  ChannelTensor source;
  Tensor grad_output;
  Tensor mean;
  Tensor invstd;
  std::optional<Tensor> weight;
  NormalisationFactors normalisation;
  kernels::Slices slices;
  Tensor sum;
  Tensor product;
  Tensor grad_input;
  Tensor grad_weight;
  Tensor grad_bias;

  Backward(
      const char* name,
      const Tensor& grad_output,
      const Tensor& input,
      const Tensor& mean,
      const Tensor& invstd,
      const std::optional<Tensor>& weight,
      const std::optional<Tensor>& bias,
      const std::vector<bool>& output_mask)
      : output_mask(output_mask),
        source(input, name),
        grad_output(source.laid_out_alike(grad_output, name, "grad_output")),
        mean(channel_parameter(mean, source, name, "mean")),
        invstd(channel_parameter(invstd, source, name, "invstd")),
        weight(channel_parameter(weight, source, name, "weight")),
        normalisation(
            source, this->mean, this->invstd, this->weight, channel_parameter(bias, source, name, "bias"), name),
        slices(source.layout()),
        sum(per_slice(source, slices, ScalarType::Double)),
        product(per_slice(source, slices, ScalarType::Double)),
        grad_input(torch::stable::new_empty(input, {0})),
        grad_weight(source.per_channel()),
        grad_bias(source.per_channel()) {
    STD_TORCH_CHECK(output_mask.size() == 3, name, ": the mask must name three results");
    STD_TORCH_CHECK(input.numel() > 0, name, ": the input must have elements");
  }

  kernels::GradientSums sums() {
    return {mutable_data_of<double>(sum), mutable_data_of<double>(product)};
  }

  template <typename Storage, typename Parameter>
  kernels::Normalised<Storage, Parameter> forward() const {
    return {
        data_of<Storage>(source.tensor),
        data_of<Parameter>(mean),
        data_of<Parameter>(normalisation.scale),
        data_of<Parameter>(normalisation.shift)};
  }

  // Once the sums are taken: the gradients, from that of the activation function's output; the input's in `into`.
  template <typename Storage, typename Parameter, typename Function>
  void finish(const Storage* gradient, const Function& activation, const std::optional<Tensor>& into = std::nullopt) {
    Tensor slope = source.per_channel();
    Tensor mean_gradient = source.per_channel();
    Tensor projection = source.per_channel();
    const kernels::GradientFactors<Parameter> factors{
        mutable_data_of<Parameter>(slope),
        mutable_data_of<Parameter>(mean_gradient),
        mutable_data_of<Parameter>(projection)};
    kernels::finish_gradients(
        sums(),
        slices,
        data_of<Parameter>(invstd),
        data_of<Parameter>(weight),
        factors,
        mutable_data_of<Parameter>(grad_weight),
        mutable_data_of<Parameter>(grad_bias));
    if (output_mask[0]) {
      grad_input = into ? *into : torch::stable::empty_like(source.tensor);
      auto* const to = mutable_data_of<Storage>(grad_input);
      for_rows_backwards(slices.layout, [&](int64_t begin, int64_t end) {
        kernels::input_gradient_rows(
            gradient, forward<Storage, Parameter>(), activation, factors, slices.layout, begin, end, to);
      });
    }
  }

  // Where the caller's gradient is laid out in another way, what was computed in its place lies in a copy.
  void give_back(Tensor& gradient) const {
    if (gradient.const_data_ptr() != grad_output.const_data_ptr()) {
      torch::stable::copy_(gradient, grad_output);
    }
  }

  Tensor wanted(const Tensor& parameter_gradient, size_t position) const {
    return output_mask[position] ? parameter_gradient : torch::stable::new_empty(mean, {0});
  }
};

void differentiate(Backward& pass, const Activation& activation, const char* name, const std::optional<Tensor>& into) {
  with_types(pass.source.tensor.scalar_type(), name, [&]<typename Storage, typename Parameter>() {
    with_activation<Storage, Parameter>(activation, name, [&](const auto& function) {
      const auto* const gradient = data_of<Storage>(pass.grad_output);
      for_tasks(pass.slices, [&](int64_t begin, int64_t end) {
        kernels::sum_gradients(
            gradient, pass.forward<Storage, Parameter>(), function, pass.slices, begin, end, pass.sums());
      });
      pass.finish<Storage, Parameter>(gradient, function, into);
    });
  });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_backward(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::string& activation,
    double low,
    double high,
    const std::vector<bool>& output_mask) {
  constexpr char kName[] = "batch_norm_act_backward";
  Backward pass(kName, grad_output, input, mean, invstd, weight, bias, output_mask);
  differentiate(pass, {activation, low, high}, kName, std::nullopt);
  return {pass.grad_input, pass.wanted(pass.grad_weight, 1), pass.wanted(pass.grad_bias, 2)};
}

std::tuple<Tensor, Tensor> batch_norm_act_backward_(
    Tensor grad_output,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::string& activation,
    double low,
    double high,
    const std::vector<bool>& output_mask) {
  constexpr char kName[] = "batch_norm_act_backward_";
  Backward pass(kName, grad_output, input, mean, invstd, weight, bias, output_mask);
  STD_TORCH_CHECK(output_mask[0], kName, ": the input's gradient must be wanted");
  differentiate(pass, {activation, low, high}, kName, pass.grad_output);
  pass.give_back(grad_output);
  return {pass.wanted(pass.grad_weight, 1), pass.wanted(pass.grad_bias, 2)};
}

// The sum's gradient goes to `grad_residual`, which may be where the gradient lies.
void differentiate_sum(
    Backward& pass, const Tensor& output, double low, double high, const char* name, Tensor& grad_residual) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Tensor sum_output = pass.source.laid_out_alike(output, name, "output");
  with_types(pass.source.tensor.scalar_type(), name, [&]<typename Storage, typename Parameter>() {
    const kernels::ClampedSum<Storage, Parameter> sum{
        data_of<Storage>(sum_output),
        clamp_of<Storage, Parameter>(low, high),
        data_of<Storage>(pass.source.tensor),
        data_of<Parameter>(pass.mean)};
    auto* const passed = mutable_data_of<Storage>(grad_residual);
    for_tasks(pass.slices, [&](int64_t begin, int64_t end) {
      kernels::pass_and_sum_gradients(
          data_of<Storage>(pass.grad_output), sum, pass.slices, begin, end, passed, pass.sums());
    });
    pass.finish<Storage, Parameter>(
        static_cast<const Storage*>(passed), clamp_of<Storage, Parameter>(-kInfinity, kInfinity));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_add_act_backward(
    const Tensor& grad_output,
    const Tensor& output,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    double low,
    double high,
    const std::vector<bool>& output_mask) {
  constexpr char kName[] = "batch_norm_add_act_backward";
  Backward pass(kName, grad_output, input, mean, invstd, weight, std::nullopt, output_mask);
  Tensor grad_residual = torch::stable::empty_like(pass.source.tensor);
  differentiate_sum(pass, output, low, high, kName, grad_residual);
  return {pass.grad_input, pass.wanted(pass.grad_weight, 1), pass.wanted(pass.grad_bias, 2), grad_residual};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_add_act_backward_(
    Tensor grad_output,
    const Tensor& output,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    double low,
    double high,
    const std::vector<bool>& output_mask) {
  constexpr char kName[] = "batch_norm_add_act_backward_";
  Backward pass(kName, grad_output, input, mean, invstd, weight, std::nullopt, output_mask);
  differentiate_sum(pass, output, low, high, kName, pass.grad_output);
  pass.give_back(grad_output);
  return {pass.grad_input, pass.wanted(pass.grad_weight, 1), pass.wanted(pass.grad_bias, 2)};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "batch_norm_act_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? bias, str activation, float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_add_act_backward(Tensor grad_output, Tensor output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_act_backward_(Tensor(a!) grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? bias, str activation, float low, float high, bool[3] output_mask) -> (Tensor, Tensor)");
  m.def(
      "batch_norm_add_act_backward_(Tensor(a!) grad_output, Tensor output, Tensor input, Tensor mean, Tensor invstd, "
      "Tensor? weight, float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
  m.impl("batch_norm_add_act_backward", TORCH_BOX(&batch_norm_add_act_backward));
  m.impl("batch_norm_act_backward_", TORCH_BOX(&batch_norm_act_backward_));
  m.impl("batch_norm_add_act_backward_", TORCH_BOX(&batch_norm_add_act_backward_));
}
