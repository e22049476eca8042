#include "ops_images.h"

#include <limits>

#include <torch/csrc/stable/ops.h>

namespace torch_odt {

// Beyond it, a graph from elsewhere could ask for work that hardly ever ends: images without channels take no memory.
constexpr int64_t kMostPixels = std::numeric_limits<int32_t>::max();

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_images(const char* operator_name, const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float && tensor.dim() == 4,
      operator_name,
      ": ",
      what,
      " must be a float32 CPU tensor of 4 dimensions");
  int64_t pixels = 1;
  for (const int64_t dimension : {0, 2, 3}) {
    const int64_t size = tensor.size(dimension);
    STD_TORCH_CHECK(size <= kMostPixels, operator_name, ": ", what, " is larger than images can be");
    pixels *= size;
    STD_TORCH_CHECK(pixels <= kMostPixels, operator_name, ": ", what, " has more pixels than images can have");
  }
}

void check_bias(const char* operator_name, const std::optional<Tensor>& bias, int64_t channels) {
  STD_TORCH_CHECK(
      !bias ||
          (bias->is_cpu() && bias->scalar_type() == ScalarType::Float && bias->dim() == 1 &&
           bias->size(0) == channels),
      operator_name,
      ": bias must be a float32 CPU tensor with one number for each channel");
}

Sizes sizes_of(const Tensor& images) {
  return {images.size(0), images.size(1), images.size(2), images.size(3)};
}

} // namespace torch_odt
