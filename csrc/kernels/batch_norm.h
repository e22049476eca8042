// Batch normalisation with statistics that are given: y = x * scale + shift, per channel, kept between two bounds.
#pragma once

#include <cstdint>

#include "channel_layout.h"
#include "storage.h"

namespace torch_odt::kernels {

// What an activation function lets through: everything, what is above 0 (ReLU), what is between 0 and 6 (ReLU6).
template <typename Parameter>
struct Bounds {
  Parameter low;
  Parameter high;
};

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
// outer * channels; or, where inner is 1, all channels of one position, of which there are outer. A NaN stays one.
template <typename Storage, typename Parameter>
void normalise_rows(
    const Storage* input,
    const Parameter* scale,
    const Parameter* shift,
    const Bounds<Parameter>& bounds,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output);

} // namespace torch_odt::kernels
