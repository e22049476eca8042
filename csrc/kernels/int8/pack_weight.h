// Packing some panels of a pass's right operand.
#pragma once

#include "correlation.h"

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kMostPanelsAtOnce = 64;
// Fewer weights are packed by one thread before two have begun.
inline constexpr int64_t kManyWeights = 1 << 18;

// Of each pass: so many columns from the first one on, kMostPanelsAtOnce panels at most. `sums` become those of columns,
// which the offsets of the left operand need; they must be zeros.
void pack_forward_panels(
    const Conv2d& conv,
    const Correlation& part,
    const int8_t* weight,
    int64_t group,
    int64_t first_column,
    int64_t columns,
    char* panels,
    int32_t* sums);
void pack_gradient_panels(
    const Conv2d& conv,
    const Correlation& part,
    const int8_t* weight,
    int64_t group,
    int64_t first_column,
    int64_t columns,
    char* panels,
    int32_t* sums);

} // namespace torch_odt::kernels::int8
