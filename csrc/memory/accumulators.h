// Who adds to the gradient of a parameter.
#pragma once

#include <cstdint>

namespace torch_odt::memory {

// How many hold the node that adds to a leaf's gradient: edges of autograd graphs that still exist, and references from
// Python. `tensor` is the address of its TensorImpl, which `Tensor._cdata` names in Python.
int64_t accumulator_holders(uintptr_t tensor);

} // namespace torch_odt::memory
