// Batch normalisation with statistics that are given: y = x * scale + shift, per channel.
#pragma once

#include <cstdint>

namespace torch_odt::kernels {

// bfloat16 as it lies in memory.
struct BFloat16 {
  uint16_t bits;
};

// The layouts that are dense with the channel as one axis: [outer][channels][inner].
struct ChannelLayout {
  int64_t outer;
  int64_t channels;
  int64_t inner;
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
// outer * channels; or, where inner is 1, all channels of one position, of which there are outer.
template <typename Storage, typename Parameter>
void normalise_rows(
    const Storage* input,
    const Parameter* scale,
    const Parameter* shift,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* output);

} // namespace torch_odt::kernels
