// int32 that becomes int8, and int8 that is taken off int8: what NITI's arithmetic does between
// kernels.
#pragma once

#include <cstdint>

#include "finish.h"

namespace torch_odt::kernels::int8 {

// sums * 2^-shift, rounded, clamped to -127 and 127; `shift` is from 0 to 30, `rounding` nearest or pseudo-stochastic.
void shift_to_int8(const int32_t* sums, int64_t count, int64_t shift, Rounding rounding, int8_t* output);

// weights - steps, clamped to -127 and 127, in place. Returns whether a step is not 0; if none is, nothing is written.
bool take_off(int8_t* weights, const int8_t* steps, int64_t count);

// output = values where low < others < high, and 0 elsewhere.
void keep_between(
    const int8_t* values, const int8_t* others, int64_t count, int32_t low, int32_t high, int8_t* output);

} // namespace torch_odt::kernels::int8
