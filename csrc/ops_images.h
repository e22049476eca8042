// Images of float32, weights and biases of their convolutions: what operators ask of them.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "ops_tensors.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

// `what` is the argument's name in the error.
void check_images(const char* operator_name, const torch::stable::Tensor& tensor, const char* what);
void check_bias(const char* operator_name, const std::optional<torch::stable::Tensor>& bias, int64_t channels);

Sizes sizes_of(const torch::stable::Tensor& images);

} // namespace torch_odt
