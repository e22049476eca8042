// The gradient of batch normalisation and the clamp behind it, from the input and the saved statistics alone.
#pragma once

#include <cstdint>

#include "batch_norm.h"
#include "channel_layout.h"
#include "storage.h"

namespace torch_odt::kernels {

// The forward pass, from which the clamp's mask is computed again. The bounds are values of the storage's type.
template <typename Storage, typename Parameter>
struct Normalised {
  const Storage* input;
  const Parameter* mean;
  const Parameter* scale;
  const Parameter* shift;
  Bounds<Parameter> bounds;
};

// Sums over a channel, arrays of [slices][channels]: of the gradient behind the clamp, and of its products with the
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
template <typename Storage, typename Parameter>
void sum_gradients(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
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

// Works on the rows from begin up to end; for what a row is see normalise_rows.
template <typename Storage, typename Parameter>
void input_gradient_rows(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const GradientFactors<Parameter>& factors,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* grad_input);

} // namespace torch_odt::kernels
