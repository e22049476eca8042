// What NITI's arithmetic does with integers between kernels, see kernels/int8/integers.h. Shapes for tracing are
// registered in torch_odt/ops.

#include <algorithm>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/integers.h"
#include "ops_int8.h"

namespace {

using namespace torch_odt;
using kernels::int8::Rounding;

constexpr char kShift[] = "int8_shift_sums";
constexpr char kKeep[] = "int8_keep_between";
constexpr char kTakeOff[] = "int8_take_off_";
constexpr int64_t kGrainElements = 1 << 15;

// Elements one after another in memory: as they are, or a copy.
Tensor dense(const Tensor& tensor) {
  if (tensor.dim() == 4) {
    const Tensor ordered = channels_last(tensor);
    if (ordered.const_data_ptr() == tensor.const_data_ptr()) {
      return ordered;
    }
  }
  return as_contiguous(tensor);
}

// An int8 tensor that lies as another one, which is dense.
Tensor empty_as(const Tensor& source) {
  Pair sizes;
  for (int64_t i = 0; i < source.dim(); ++i) {
    sizes.push_back(source.size(i));
  }
  return source.dim() == 4 && !source.is_contiguous()
      ? empty_image(sizes, ScalarType::Char, source)
      : empty_contiguous(sizes, ScalarType::Char, source);
}

void check_shapes(const Tensor& one, const Tensor& other, const char* name) {
  bool same = one.is_cpu() && other.is_cpu() && one.scalar_type() == ScalarType::Char &&
      other.scalar_type() == ScalarType::Char && one.dim() == other.dim();
  for (int64_t i = 0; same && i < one.dim(); ++i) {
    same = one.size(i) == other.size(i);
  }
  STD_TORCH_CHECK(same, name, ": both must be int8 CPU tensors of the same shape");
}

// Another tensor's elements in the order of one that is dense.
Tensor as_dense(const Tensor& other, const Tensor& one) {
  return one.dim() == 4 && !one.is_contiguous() ? channels_last(other) : as_contiguous(other);
}

Tensor shift_sums(const Tensor& sums, int64_t shift, int64_t rounding) {
  STD_TORCH_CHECK(
      sums.is_cpu() && sums.scalar_type() == ScalarType::Int, kShift, ": sums must be an int32 CPU tensor");
  STD_TORCH_CHECK(shift >= 0 && shift <= 30, kShift, ": shift must be from 0 to 30");
  STD_TORCH_CHECK(rounding == 0 || rounding == 2, kShift, ": rounding must be 0 (nearest) or 2 (pseudo-stochastic)");
  const Tensor source = dense(sums);
  Tensor result = empty_as(source);
  const auto* const from = static_cast<const int32_t*>(source.const_data_ptr());
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, sums.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
    kernels::int8::shift_to_int8(from + begin, end - begin, shift, static_cast<Rounding>(rounding), to + begin);
  });
  return result;
}

Tensor keep_between(const Tensor& values, const Tensor& others, int64_t low, int64_t high) {
  check_shapes(values, others, kKeep);
  const Tensor source = dense(values);
  const Tensor bounded = as_dense(others, source);
  Tensor result = empty_as(source);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  const auto least = static_cast<int32_t>(std::clamp<int64_t>(low, -129, 127));
  const auto most = static_cast<int32_t>(std::clamp<int64_t>(high, -128, 128));
  torch::stable::parallel_for(0, values.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
    kernels::int8::keep_between(bytes_of(source) + begin, bytes_of(bounded) + begin, end - begin, least, most, to + begin);
  });
  return result;
}

Tensor take_off_(Tensor weight, const Tensor& steps) {
  check_shapes(weight, steps, kTakeOff);
  const Tensor own = dense(weight);
  STD_TORCH_CHECK(
      own.const_data_ptr() == weight.const_data_ptr(), kTakeOff, ": weight must be contiguous, or in torch.channels_last");
  const Tensor ordered = as_dense(steps, own);
  Tensor changed = empty_flat(1, ScalarType::Bool, weight);
  *static_cast<bool*>(changed.mutable_data_ptr()) =
      kernels::int8::take_off(static_cast<int8_t*>(weight.mutable_data_ptr()), bytes_of(ordered), weight.numel());
  return changed;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("int8_shift_sums(Tensor sums, int shift, int rounding) -> Tensor");
  m.def("int8_keep_between(Tensor values, Tensor others, int low, int high) -> Tensor");
  m.def("int8_take_off_(Tensor(a!) weight, Tensor steps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_shift_sums", TORCH_BOX(&shift_sums));
  m.impl("int8_keep_between", TORCH_BOX(&keep_between));
  m.impl("int8_take_off_", TORCH_BOX(&take_off_));
}
