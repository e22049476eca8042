// The most frequent ways to finish sums, written with AVX2's own roundings. Same bits as finish.cpp.
#pragma once

#include "finish.h"

namespace torch_odt::kernels::int8 {

// Whether this file has what is asked for, for blocks like this one.
bool has_finish_avx2(const Finish& how, const Block<int32_t>& block);

float finish_avx2(const Finish& how, const Block<int32_t>& block);

} // namespace torch_odt::kernels::int8
