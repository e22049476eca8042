// Batch normalisation with statistics that are given, and what follows it: y = activation(x * scale + shift + residual).
#pragma once

#include <cstdint>

#include "activations.h"
#include "channel_layout.h"
#include "isa.h"
#include "storage.h"

namespace torch_odt::kernels {

// An output before its activation function. Both passes compute it with this function, because they have to round it
// alike: compilers fuse what stands in one place.
template <typename Parameter>
TORCH_ODT_INLINE Parameter scaled(Parameter input, Parameter scale, Parameter shift) {
  return input * scale + shift;
}

// scale = invstd * weight and shift = bias - mean * scale; weight and bias may be null, meaning 1 and 0.
template <typename Parameter>
void normalisation_factors(
    const Parameter* mean,
    const Parameter* invstd,
    const Parameter* weight,
    const Parameter* bias,
    int64_t channels,
    Parameter* scale,
    Parameter* shift);

// Works on the rows from begin up to end. A row is a run of `inner` elements of one channel, of which there are
// outer * channels; or, where inner is 1, all channels of one position, of which there are outer. The residual lies as
// the input does; it may be null, meaning that nothing is added. A NaN stays one.
template <typename Storage, typename Parameter, typename Activation>
void normalise_rows(
    const Storage* input,
    const Storage* residual,
    const Parameter* scale,
    const Parameter* shift,
    const Activation& activation,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output);

} // namespace torch_odt::kernels
