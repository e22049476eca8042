// A max-pool behind an int8 layer, as a part of the layer's operators: what is larger than its output is there no longer
// than the operator runs.
#pragma once

#include <optional>
#include <tuple>

#include "kernels/max_pool.h"
#include "ops_int8.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

// The argument `windows` of a layer: those of its convolution, and behind them, where its output is pooled, seven more
// numbers: kernel size, stride and padding, each of rows and of columns, and whether sizes are rounded up. Windows of
// the pool do not overlap, so that int8 holds its gradients.
class LayerWindows {
 public:
  LayerWindows(const char* name, const Sizes& windows);
  LayerWindows(const LayerWindows&) = delete;

  const Sizes& convolution() const {
    return convolution_;
  }
  bool has_pool() const {
    return has_pool_;
  }

  // The output, of shape (batch, channels, rows, columns), pooled; and of each of its elements where in its window it
  // lies, as a byte, and behind them all its bit of the mask.
  std::tuple<Tensor, Tensor> pooled(const Tensor& output, const Tensor& mask) const;
  // The bits of those notes, for a gradient behind the pool of a convolution's output of so many rows and columns.
  Tensor mask_of(const Tensor& notes, const Tensor& gradient, int64_t rows, int64_t columns) const;
  // A gradient in int8 behind the pool as one before it.
  Tensor unpooled(const Tensor& gradient, const Tensor& notes, int64_t rows, int64_t columns) const;

 private:
  kernels::Pool pool_of(int64_t channels, int64_t rows, int64_t columns) const;

  const char* name_;
  const Sizes& windows_;
  const bool has_pool_;
  Sizes own_;
  const Sizes& convolution_;
};

} // namespace torch_odt
