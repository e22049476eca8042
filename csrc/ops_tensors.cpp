#include "ops_tensors.h"

#include <array>
#include <cstddef>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/MemoryFormat.h>

namespace torch_odt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// Dimensions from the innermost one to the outermost.
constexpr std::array<size_t, 4> kChannelsLast{1, 3, 2, 0};

Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i > 0; --i) {
    strides[i - 1] = stride;
    stride *= sizes[i - 1] > 1 ? sizes[i - 1] : 1;
  }
  return strides;
}

Sizes channels_last_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (const size_t i : kChannelsLast) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return strides;
}

Tensor empty_strided(const Sizes& sizes, const Sizes& strides, ScalarType dtype, const Tensor& like) {
  int32_t device_type = 0;
  int32_t device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), number, device_type, device_index, &made));
  return Tensor(made);
}

Tensor seen_strided(const Tensor& tensor, const Sizes& sizes, const Sizes& strides) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, &made));
  return Tensor(made);
}

} // namespace

Tensor empty_contiguous(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, like);
}

Tensor empty_channels_last(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, channels_last_strides(sizes), dtype, like);
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

bool lies_channels_last(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t stride = 1;
  bool lies_so = sizes.size() == kChannelsLast.size();
  for (size_t i = 0; lies_so && i < kChannelsLast.size(); ++i) {
    const size_t dimension = kChannelsLast[i];
    // No element's place depends on the stride of a dimension of size 1.
    lies_so = sizes[dimension] == 1 || strides[dimension] == stride;
    stride *= sizes[dimension];
  }
  return lies_so;
}

Tensor as_channels_last(const Tensor& tensor) {
  return lies_channels_last(tensor)
      ? tensor
      : torch::stable::contiguous(tensor, torch::headeronly::MemoryFormat::ChannelsLast);
}

Tensor seen_contiguous(const Tensor& tensor, const Sizes& sizes) {
  return seen_strided(tensor, sizes, contiguous_strides(sizes));
}

Tensor seen_everywhere(const Tensor& number, const Sizes& sizes) {
  // As torch's expand has them, dimensions of size 1 included.
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i > 0; --i) {
    strides[i - 1] = sizes[i - 1] == 1 ? stride : 0;
    stride = sizes[i - 1] * strides[i - 1];
  }
  return seen_strided(number, sizes, strides);
}

} // namespace torch_odt
