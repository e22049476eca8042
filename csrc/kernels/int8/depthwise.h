// Depthwise convolutions, see conv2d.h, whose functions call these where a convolution is one.
#pragma once

#include <cstdint>

#include "conv2d.h"

namespace torch_odt::kernels::int8 {

// Whether a pass is computed channel by channel: depthwise ones, unless int32 does not hold their sums or taps reach over
// more columns than the workspace has room for. Those are products of matrices with a group for each channel. It goes by
// the weight alone.
bool goes_by_channels(const Conv2d& conv, Pass pass);

int64_t depthwise_packed_bytes(const Conv2d& conv, Pass pass);
void depthwise_pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, void* packed);
int64_t depthwise_workspace_bytes(const Conv2d& conv, Pass pass);

// Source and target are input and output of a pass, whichever it is.
float depthwise_pass(
    const Conv2d& conv,
    Pass pass,
    const int8_t* source,
    int32_t zero_point,
    const void* packed,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace);

// Whether threads share samples, rather than channels: of few channels, whose vectors would come out partly empty, if the
// samples are about as many for each thread.
bool shares_samples(const Conv2d& conv, const Threads& threads);
int64_t depthwise_grad_weight_workspace_bytes(const Conv2d& conv, const Threads& threads);
float depthwise_grad_weight(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* input,
    int32_t zero_point,
    int64_t* grad_bias,
    const Finish& how,
    const Threads& threads,
    void* workspace);

} // namespace torch_odt::kernels::int8
