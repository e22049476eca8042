// The input's gradient where it has few channels: a row of the product is a patch of pixels, so that its columns, all
// channels of all of them, fill panels that the channels of one pixel would leave empty, and all phases of a stride are
// one product.
#pragma once

#include <cstdint>

#include "conv2d.h"

namespace torch_odt::kernels::int8 {

// Whether that is less work. It goes by the weight and the instruction set alone.
bool goes_by_patches(const Conv2d& conv, Pass pass);

int64_t patches_packed_bytes(const Conv2d& conv);
void patches_pack_weight(const Conv2d& conv, const int8_t* weight, void* packed);
int64_t patches_workspace_bytes(const Conv2d& conv);

float patches_grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace);

} // namespace torch_odt::kernels::int8
