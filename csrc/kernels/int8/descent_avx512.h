// A part of gradient descent for AVX-512, bit for bit as in descent.cpp.
#pragma once

#include "descent.h"

#if defined(__x86_64__) && defined(__GNUC__)

namespace torch_odt::kernels::int8 {

void descend_avx512(DescentPart& part);

} // namespace torch_odt::kernels::int8

#endif
