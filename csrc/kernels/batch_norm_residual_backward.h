// The gradient of a clamp behind the sum of a batch normalisation and a residual. Passing the clamp, it is the
// residual's gradient, and it is what the gradient of the batch normalisation is computed from.
#pragma once

#include <cstdint>

#include "activations.h"
#include "batch_norm_backward.h"
#include "channel_layout.h"
#include "storage.h"

namespace torch_odt::kernels {

// The clamp's mask comes from its output, which the next operator keeps anyway.
template <typename Storage, typename Parameter>
struct ClampedSum {
  const Storage* output;
  Clamp<Storage, Parameter> clamp;
  const Storage* input;
  const Parameter* mean;
};

// Writes what passes the clamp, maybe to where the gradient lies, and adds it up as sum_gradients does. Works on the
// tasks from begin up to end.
template <typename Storage, typename Parameter>
void pass_and_sum_gradients(
    const Storage* gradient,
    const ClampedSum<Storage, Parameter>& sum,
    const Slices& slices,
    int64_t begin,
    int64_t end,
    Storage* passed,
    const GradientSums& sums);

} // namespace torch_odt::kernels
