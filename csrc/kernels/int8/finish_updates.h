// Updates of int8 weights by what sums become, a few rows at a time, which stay in the first cache.
#pragma once

#include "finish.h"

namespace torch_odt::kernels::int8 {

// Of descent, take_off and nothing, of which `how.output` are the weights. Returns what finish() does.
template <typename Sum>
float finish_update(const Finish& how, const Block<Sum>& block);

} // namespace torch_odt::kernels::int8
