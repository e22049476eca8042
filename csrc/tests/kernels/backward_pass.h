// One whole backward pass of the kernels, for tests of its parts.
#pragma once

#include <cstdint>
#include <vector>

#include "../../kernels/batch_norm_backward.h"
#include "../../kernels/batch_norm_residual_backward.h"
#include "samples.h"

namespace torch_odt::tests {

template <typename Storage, typename Parameter>
kernels::Normalised<Storage, Parameter> forward_of(
    const Sample<Storage, Parameter>& sample) {
  return {sample.input.data(), sample.mean.data(), sample.scale.data(), sample.shift.data()};
}

template <typename Storage, typename Parameter>
kernels::ClampedSum<Storage, Parameter> sum_of(
    const Sample<Storage, Parameter>& sample,
    const std::vector<Storage>& output,
    const Clamp<Storage, Parameter>& clamp) {
  return {output.data(), clamp, sample.input.data(), sample.mean.data()};
}

template <typename Storage, typename Parameter>
struct BackwardPass {
  kernels::Slices slices;
  std::vector<double> sum;
  std::vector<double> product;
  std::vector<Parameter> slope;
  std::vector<Parameter> mean_gradient;
  std::vector<Parameter> projection;
  std::vector<Parameter> grad_weight;
  std::vector<Parameter> grad_bias;
  std::vector<Storage> grad_input;

  explicit BackwardPass(const ChannelLayout& layout)
      : slices(layout),
        sum(static_cast<size_t>(slices.number * layout.channels)),
        product(sum.size()),
        slope(static_cast<size_t>(layout.channels)),
        mean_gradient(slope.size()),
        projection(slope.size()),
        grad_weight(slope.size()),
        grad_bias(slope.size()),
        grad_input(static_cast<size_t>(layout.elements())) {}

  kernels::GradientSums sums() {
    return {sum.data(), product.data()};
  }
  kernels::GradientFactors<Parameter> factors() {
    return {slope.data(), mean_gradient.data(), projection.data()};
  }

  template <typename Activation>
  void run(const Sample<Storage, Parameter>& sample, const Activation& activation, bool has_weight = true) {
    kernels::sum_gradients(
        sample.gradient.data(), forward_of(sample), activation, slices, 0, slices.tasks(), sums());
    kernels::finish_gradients(
        sums(),
        slices,
        sample.invstd.data(),
        has_weight ? sample.weight.data() : nullptr,
        factors(),
        grad_weight.data(),
        grad_bias.data());
    kernels::input_gradient_rows(
        sample.gradient.data(),
        forward_of(sample),
        activation,
        factors(),
        sample.layout,
        0,
        rows_of(sample.layout),
        grad_input.data());
  }
};

} // namespace torch_odt::tests
