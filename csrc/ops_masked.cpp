// Masks of bits, made and applied. Shapes for tracing are registered in torch_odt/ops.

#include <limits>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/MemoryFormat.h>

#include "kernels/bits.h"
#include "kernels/masked.h"
#include "ops_channels.h"

namespace {

using namespace torch_odt;

using torch::headeronly::MemoryFormat;

constexpr char kClamp[] = "clamp_with_mask";
constexpr char kClampInPlace[] = "clamp_with_mask_";
constexpr char kClampBackward[] = "clamp_with_mask_backward";
constexpr char kClampBackwardInPlace[] = "clamp_with_mask_backward_";
constexpr char kScale[] = "scale_masked";

// The elements in the order in which bits stand for them.
Tensor in_order(const Tensor& tensor, bool channels_last, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, ": the tensor must be one of the CPU");
  STD_TORCH_CHECK(
      !channels_last || tensor.dim() == 4, name, ": only a tensor of 4 dimensions can have its channels last");
  return torch::stable::contiguous(tensor, channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
}

// A result that is laid out as ATen would do it, whose elements are written in the order of the bits.
class Result {
 public:
  Result(const Tensor& like, bool channels_last, const char* name)
      : laid_out_(torch::stable::empty_like(like)), ordered_(in_order(laid_out_, channels_last, name)) {}

  Tensor& ordered() {
    return ordered_;
  }
  Tensor finish() {
    if (ordered_.const_data_ptr() != laid_out_.const_data_ptr()) {
      torch::stable::copy_(laid_out_, ordered_);
    }
    return laid_out_;
  }

 private:
  Tensor laid_out_;
  Tensor ordered_;
};

void check_mask(const Tensor& mask, const Tensor& elements, const char* name) {
  STD_TORCH_CHECK(
      mask.is_cpu() && mask.scalar_type() == ScalarType::Byte && mask.dim() == 1 && mask.is_contiguous() &&
          mask.size(0) == kernels::packed_bytes(elements.numel()),
      name,
      ": the mask must be contiguous uint8, with a bit for each element");
}

// Calls function(first, count, byte) for runs of elements that begin where a byte of the mask does.
template <typename Function>
void for_runs(const Tensor& elements, const Function& function) {
  const int64_t count = elements.numel();
  torch::stable::parallel_for(
      0, kernels::packed_bytes(count), kGrainElements / 8, [&](int64_t begin, int64_t end) {
        function(8 * begin, std::min(count, 8 * end) - 8 * begin, begin);
      });
}

// Clamps elements in the order of the bits into `clamped`, which may be where they lie; returns the mask.
Tensor clamp_into(
    const Tensor& source, double low, std::optional<double> high, Tensor& clamped, const char* name) {
  Tensor mask = torch::stable::new_empty(source, {kernels::packed_bytes(source.numel())}, ScalarType::Byte);
  const double end = high.value_or(std::numeric_limits<double>::quiet_NaN());
  with_types(source.scalar_type(), name, [&]<typename Storage, typename Parameter>() {
    const kernels::Bounds<Parameter> bounds = bounds_of<Storage, Parameter>(low, end);
    const auto* const from = data_of<Storage>(source);
    auto* const to = mutable_data_of<Storage>(clamped);
    auto* const packed = mutable_data_of<uint8_t>(mask);
    for_runs(source, [&](int64_t first, int64_t count, int64_t byte) {
      kernels::clamp_with_mask(from + first, count, bounds, to + first, packed + byte);
    });
  });
  return mask;
}

std::tuple<Tensor, Tensor> clamp_with_mask(
    const Tensor& input, double low, std::optional<double> high, bool channels_last) {
  const Tensor source = in_order(input, channels_last, kClamp);
  Result output(input, channels_last, kClamp);
  const Tensor mask = clamp_into(source, low, high, output.ordered(), kClamp);
  return {output.finish(), mask};
}

// Where the order of the bits is another than that of the elements, they were worked on in a copy.
void give_back(const Tensor& ordered, Tensor& own) {
  if (ordered.const_data_ptr() != own.const_data_ptr()) {
    torch::stable::copy_(own, ordered);
  }
}

Tensor clamp_with_mask_(Tensor self, double low, std::optional<double> high, bool channels_last) {
  Tensor ordered = in_order(self, channels_last, kClampInPlace);
  const Tensor mask = clamp_into(ordered, low, high, ordered, kClampInPlace);
  give_back(ordered, self);
  return mask;
}

// A tensor whose elements, in the order of the bits, are runs of neighbours, each so far behind the one before it: what
// the backward pass of a concatenation hands out.
struct Runs {
  int64_t length;
  int64_t distance;
};

std::optional<Runs> runs_of(const Tensor& tensor, bool channels_last) {
  Runs runs{1, 0};
  int64_t expected = 1;
  for (int64_t step = 0; step < tensor.dim(); ++step) {
    const int64_t inner = tensor.dim() - 1 - step;
    const int64_t axis = !channels_last || inner == 0 ? inner : step == 0 ? 1 : inner + 1;
    if (tensor.size(axis) == 1) {
      continue;
    }
    if (runs.distance == 0 && tensor.stride(axis) > expected) {
      runs.distance = expected = tensor.stride(axis);
    }
    if (tensor.stride(axis) != expected) {
      return std::nullopt;
    }
    expected *= tensor.size(axis);
    runs.length *= runs.distance == 0 ? tensor.size(axis) : 1;
  }
  return runs;
}

// Elements in the order of the bits, and where each run of them begins.
struct Source {
  Tensor tensor;
  Runs runs;

  Source(const Tensor& given, bool channels_last, const char* name) : tensor(given), runs{given.numel(), 0} {
    if (const auto found = runs_of(given, channels_last)) {
      runs = *found;
    } else {
      tensor = in_order(given, channels_last, name);
    }
  }
};

template <typename Word>
void keep_masked(const Source& source, const Tensor& mask, Tensor& result) {
  const auto* const from = data_of<Word>(source.tensor);
  const auto* const packed = data_of<uint8_t>(mask);
  auto* const to = mutable_data_of<Word>(result);
  const Runs runs = source.runs;
  for_runs(source.tensor, [&](int64_t first, int64_t count, int64_t) {
    for (int64_t end = first + count; first < end;) {
      const int64_t run = first / runs.length;
      const int64_t inside = first - run * runs.length;
      const int64_t length = std::min(end - first, runs.length - inside);
      kernels::keep_masked(from + run * runs.distance + inside, packed, first, length, to + first);
      first += length;
    }
  });
}

void keep_masked(const Source& source, const Tensor& mask, Tensor& result, const char* name) {
  with_types(result.scalar_type(), name, [&]<typename Storage, typename Parameter>() {
    if constexpr (sizeof(Storage) == 2) {
      keep_masked<uint16_t>(source, mask, result);
    } else if constexpr (sizeof(Storage) == 4) {
      keep_masked<uint32_t>(source, mask, result);
    } else {
      keep_masked<uint64_t>(source, mask, result);
    }
  });
}

Tensor clamp_with_mask_backward(const Tensor& grad_output, const Tensor& mask, bool channels_last) {
  Result result(grad_output, channels_last, kClampBackward);
  check_mask(mask, grad_output, kClampBackward);
  const Source gradient(grad_output, channels_last, kClampBackward);
  keep_masked(gradient, mask, result.ordered(), kClampBackward);
  return result.finish();
}

void clamp_with_mask_backward_(Tensor grad_output, const Tensor& mask, bool channels_last) {
  check_mask(mask, grad_output, kClampBackwardInPlace);
  Tensor ordered = in_order(grad_output, channels_last, kClampBackwardInPlace);
  keep_masked(Source(ordered, channels_last, kClampBackwardInPlace), mask, ordered, kClampBackwardInPlace);
  give_back(ordered, grad_output);
}

Tensor scale_masked(const Tensor& input, const Tensor& mask, double scale, bool channels_last) {
  const Tensor source = in_order(input, channels_last, kScale);
  check_mask(mask, source, kScale);
  Result result(input, channels_last, kScale);
  with_types(source.scalar_type(), kScale, [&]<typename Storage, typename Parameter>() {
    const auto factor = static_cast<Parameter>(scale);
    const auto* const from = data_of<Storage>(source);
    const auto* const packed = data_of<uint8_t>(mask);
    auto* const to = mutable_data_of<Storage>(result.ordered());
    for_runs(source, [&](int64_t first, int64_t count, int64_t byte) {
      kernels::scale_masked(from + first, packed + byte, count, factor, to + first);
    });
  });
  return result.finish();
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("clamp_with_mask(Tensor self, float low, float? high, bool channels_last) -> (Tensor, Tensor)");
  m.def("clamp_with_mask_(Tensor(a!) self, float low, float? high, bool channels_last) -> Tensor");
  m.def("clamp_with_mask_backward_(Tensor(a!) grad_output, Tensor mask, bool channels_last) -> ()");
  m.def("clamp_with_mask_backward(Tensor grad_output, Tensor mask, bool channels_last) -> Tensor");
  m.def("scale_masked(Tensor self, Tensor mask, float scale, bool channels_last) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("clamp_with_mask", TORCH_BOX(&clamp_with_mask));
  m.impl("clamp_with_mask_", TORCH_BOX(&clamp_with_mask_));
  m.impl("clamp_with_mask_backward_", TORCH_BOX(&clamp_with_mask_backward_));
  m.impl("clamp_with_mask_backward", TORCH_BOX(&clamp_with_mask_backward));
  m.impl("scale_masked", TORCH_BOX(&scale_masked));
}
