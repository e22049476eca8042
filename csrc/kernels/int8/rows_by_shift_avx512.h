// finish() by NITI's rounding for AVX-512.
#pragma once

#include "finish.h"

namespace torch_odt::kernels::int8 {

// To int8 without a mask and a zero point, and with one multiplier, a power of two.
float rows_by_shift_avx512(const Finish& how, const Block<int32_t>& block);

} // namespace torch_odt::kernels::int8
