// Masks as bits. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/bits.h"

namespace {

using namespace torch_odt;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Bytes of bits below which a thread costs more than it saves; a thread never shares one with another.
constexpr int64_t kGrainBytes = 8192;

Tensor pack_bits(const Tensor& mask) {
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "pack_bits: the mask must be boolean");
  STD_TORCH_CHECK(mask.is_contiguous(), "pack_bits: the mask must be contiguous");
  const int64_t count = mask.numel();
  Tensor packed = torch::stable::new_empty(mask, {kernels::packed_bytes(count)}, ScalarType::Byte);
  const auto* const source = static_cast<const uint8_t*>(mask.const_data_ptr());
  auto* const target = static_cast<uint8_t*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, kernels::packed_bytes(count), kGrainBytes, [&](int64_t begin, int64_t end) {
    kernels::pack_bits(source + 8 * begin, std::min(count, 8 * end) - 8 * begin, target + begin);
  });
  return packed;
}

Tensor unpack_bits(const Tensor& packed, int64_t first, int64_t count) {
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte, "unpack_bits: packed bits must be uint8");
  STD_TORCH_CHECK(packed.is_contiguous(), "unpack_bits: packed bits must be contiguous");
  STD_TORCH_CHECK(
      first >= 0 && count >= 0 && count <= 8 * packed.numel() && first <= 8 * packed.numel() - count,
      "unpack_bits: there are not so many bits");
  Tensor mask = torch::stable::new_empty(packed, {count}, ScalarType::Bool);
  const auto* const source = static_cast<const uint8_t*>(packed.const_data_ptr());
  auto* const target = static_cast<uint8_t*>(mask.mutable_data_ptr());
  torch::stable::parallel_for(0, kernels::packed_bytes(count), kGrainBytes, [&](int64_t begin, int64_t end) {
    kernels::unpack_bits(source, first + 8 * begin, std::min(count, 8 * end) - 8 * begin, target + 8 * begin);
  });
  return mask;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("pack_bits(Tensor mask) -> Tensor");
  m.def("unpack_bits(Tensor packed, int first, int count) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("pack_bits", TORCH_BOX(&pack_bits));
  m.impl("unpack_bits", TORCH_BOX(&unpack_bits));
}
