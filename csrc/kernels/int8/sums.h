// Plain sums of int8 values.
#pragma once

#include <cstdint>

namespace torch_odt::kernels::int8 {

// The sum of values that lie side by side; 2^24 of them at most.
int32_t sum_of(const int8_t* values, int64_t count);

// Adds the first columns of each row to `sums`.
void add_rows(const int8_t* const* rows, int64_t count, int64_t columns, int32_t* sums);

} // namespace torch_odt::kernels::int8
