// int8 as float, many at a time.
#pragma once

#include "lanes.h"

namespace torch_odt::kernels::int8 {

// By halves: in one step GCC converts element by element.
template <int kBytes>
TORCH_ODT_INLINE typename Vectors<kBytes>::Floats widened(typename Vectors<kBytes>::Narrow values) {
  using V = Vectors<kBytes>;
  const auto half = __builtin_convertvector(values, typename V::Half);
  return __builtin_convertvector(__builtin_convertvector(half, typename V::Ints), typename V::Floats);
}

} // namespace torch_odt::kernels::int8
