#include "accumulators.h"

#include <ATen/core/TensorBase.h>
#include <torch/csrc/autograd/variable.h>

namespace torch_odt::memory {

int64_t accumulator_holders(uintptr_t tensor) {
  auto* impl = reinterpret_cast<c10::TensorImpl*>(tensor);
  const auto leaf = at::TensorBase::wrap_tensor_impl(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl));
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return accumulator ? static_cast<int64_t>(accumulator.use_count()) - 1 : 0;
}

} // namespace torch_odt::memory
