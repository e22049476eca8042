// The input's gradient of depthwise convolutions with kernels of three by three that move on by two: the four phases
// (see taps.h) of two by two inputs see the same two by two of the output's gradient, and are computed together.
#pragma once

#include "conv2d.h"

namespace torch_odt::kernels::int8 {

// Of a depthwise convolution that goes by channels.
bool has_joined_phases(const Conv2d& conv, Pass pass);

int64_t joined_packed_bytes(const Conv2d& conv);
void joined_pack_weight(const Conv2d& conv, const int8_t* weight, void* packed);
int64_t joined_workspace_bytes(const Conv2d& conv);

float joined_grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace);

} // namespace torch_odt::kernels::int8
