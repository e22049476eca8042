// Windows of max-pooling, checked.
#pragma once

#include <cstdint>

#include "kernels/max_pool.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

// Windows along an axis of so many elements, each of which has one of them. `name` is the operator's, for errors.
kernels::WindowAxis pool_axis(
    const char* name,
    int64_t input,
    int64_t kernel,
    int64_t stride,
    int64_t padding,
    int64_t dilation,
    bool ceil_mode);

} // namespace torch_odt
