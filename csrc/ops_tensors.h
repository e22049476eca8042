// Tensors that are made, and seen otherwise, without torch's dispatcher: it looks operators up by name, which takes longer
// than many a layer's arithmetic where an operator makes a dozen tensors.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace torch_odt [[gnu::visibility("hidden")]] {

using Sizes = std::vector<int64_t>;

// On the device of another one, contiguous or, of four dimensions, in channels_last.
torch::stable::Tensor empty_contiguous(
    const Sizes& sizes, torch::headeronly::ScalarType dtype, const torch::stable::Tensor& like);
torch::stable::Tensor empty_channels_last(
    const Sizes& sizes, torch::headeronly::ScalarType dtype, const torch::stable::Tensor& like);

// The tensor itself if it lies so, otherwise a copy that does.
torch::stable::Tensor as_contiguous(const torch::stable::Tensor& tensor);
torch::stable::Tensor as_channels_last(const torch::stable::Tensor& tensor);
bool lies_channels_last(const torch::stable::Tensor& tensor);

// The same memory with other sizes; of a dense tensor, read in the order in which it lies.
torch::stable::Tensor seen_contiguous(const torch::stable::Tensor& tensor, const Sizes& sizes);

// One number's memory as a tensor of any size.
torch::stable::Tensor seen_everywhere(const torch::stable::Tensor& number, const Sizes& sizes);

} // namespace torch_odt
