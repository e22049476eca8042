// scan() and round_rows() for AVX-512.
#pragma once

#include "rows.h"

namespace torch_odt::kernels::int8 {

void scan_rows_avx512(const ScannedRows& of);
void round_rows_avx512(RowsPart& part);

} // namespace torch_odt::kernels::int8
