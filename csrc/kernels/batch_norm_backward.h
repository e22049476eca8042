// The gradient of batch normalisation and the activation function behind it, from the input and the saved statistics
// alone.
#pragma once

#include <cstdint>

#include "batch_norm.h"
#include "channel_layout.h"
#include "storage.h"

namespace torch_odt::kernels {

// The forward pass, from which the activation function's input is computed again.
template <typename Storage, typename Parameter>
struct Normalised {
  const Storage* input;
  const Parameter* mean;
  const Parameter* scale;
  const Parameter* shift;
};

// Sums over a channel, arrays of [slices][channels]: of the gradient that the activation
// function passes, and of its products with the
// input's deviations from the mean.
struct GradientSums {
  double* gradient;
  double* product;
};

// The gradient of an input is (gradient - mean_gradient - (input - mean) * projection) * slope, per channel.
template <typename Parameter>
struct GradientFactors {
  Parameter* slope;
  Parameter* mean_gradient;
  Parameter* projection;
};

// Works on the tasks from begin up to end.
template <typename Storage, typename Parameter, typename Activation>
void sum_gradients(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const Activation& activation,
    const Slices& slices,
    int64_t begin,
    int64_t end,
    const GradientSums& sums);

// Once all tasks are done. The weight may be null, meaning 1.
template <typename Parameter>
void finish_gradients(
    const GradientSums& sums,
    const Slices& slices,
    const Parameter* invstd,
    const Parameter* weight,
    const GradientFactors<Parameter>& factors,
    Parameter* grad_weight,
    Parameter* grad_bias);

// Works on the rows from begin up to end; for what a row is see normalise_rows. The result may lie where the gradient
// does.
template <typename Storage, typename Parameter, typename Activation>
void input_gradient_rows(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const Activation& activation,
    const GradientFactors<Parameter>& factors,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* grad_input);

} // namespace torch_odt::kernels
