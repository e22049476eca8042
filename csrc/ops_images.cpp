#include "ops_images.h"

#include <torch/csrc/stable/ops.h>

namespace torch_odt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_images(const char* operator_name, const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float && tensor.dim() == 4,
      operator_name,
      ": ",
      what,
      " must be a float32 CPU tensor of 4 dimensions");
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
