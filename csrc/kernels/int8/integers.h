// Integers that become int8, int8 that is added up and taken off int8: what NITI's arithmetic does between kernels.
#pragma once

#include <cstdint>

#include "finish.h"

namespace torch_odt::kernels::int8 {

// sums * 2^-shift, rounded, clamped to -127 and 127; `shift` is from 0 to 30, `rounding` nearest or pseudo-stochastic.
void shift_to_int8(const int32_t* sums, int64_t count, int64_t shift, Rounding rounding, int8_t* output);

// The same of int64, one after another; `shift` is from 0 to 62.
void shift_to_int8(const int64_t* sums, int64_t count, int64_t shift, Rounding rounding, int8_t* output);

// Floats times two factors, to the nearest whole number; int32 has to hold it.
void whole_numbers(const float* values, int64_t count, float first, float second, int32_t* whole);

// The largest magnitude; 0 of none. Of floats: not finite where one of them is not.
float largest_magnitude(const float* numbers, int64_t count);
int64_t largest_magnitude(const int64_t* numbers, int64_t count);

// coarse * 2^up + fine, of which int32 has to hold all; and their largest magnitude.
void add_shifted(const int8_t* coarse, const int8_t* fine, int64_t count, int64_t up, int32_t* sums);
int32_t largest_sum(const int8_t* coarse, const int8_t* fine, int64_t count, int64_t up);

// Clips numbers that are not below -127 at -most and most; returns the largest magnitude before.
int64_t clip(int8_t* numbers, int64_t count, int64_t most);

// weights - steps, clamped to -127 and 127, in place. Returns whether a step is not 0; if none is, nothing is written.
bool take_off(int8_t* weights, const int8_t* steps, int64_t count);

// output = values where low < others < high, and 0 elsewhere.
void keep_between(
    const int8_t* values, const int8_t* others, int64_t count, int32_t low, int32_t high, int8_t* output);

} // namespace torch_odt::kernels::int8
