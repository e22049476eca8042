#include "ops_int8_pooled.h"

#include <algorithm>

#include "ops_channels.h"
#include "ops_max_pool.h"

namespace torch_odt {

namespace {

constexpr size_t kPoolNumbers = 7;

// What a thread does at a time, in units that take so many elements each.
int64_t grain(int64_t elements) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements));
}

Sizes convolution_of(const Sizes& windows, bool has_pool) {
  return has_pool ? Sizes(windows.begin(), windows.begin() + Geometry::kNumbers) : Sizes();
}

} // namespace

LayerWindows::LayerWindows(const char* name, const Sizes& windows)
    : name_(name),
      windows_(windows),
      has_pool_(windows.size() == Geometry::kNumbers + kPoolNumbers),
      own_(convolution_of(windows, has_pool_)),
      convolution_(has_pool_ ? own_ : windows) {
  STD_TORCH_CHECK(
      has_pool_ || windows.size() == Geometry::kNumbers,
      name,
      ": windows are seven numbers of a convolution, and of a pool seven more");
}

kernels::Pool LayerWindows::pool_of(int64_t channels, int64_t rows, int64_t columns) const {
  const int64_t* const numbers = windows_.data() + Geometry::kNumbers;
  const auto axis = [&](size_t which, int64_t input) {
    return pool_axis(name_, input, numbers[which], numbers[2 + which], numbers[4 + which], 1, numbers[6] != 0);
  };
  const kernels::Pool pool{axis(0, rows), axis(1, columns), channels};
  STD_TORCH_CHECK(
      pool.window_elements() <= kernels::kMostWindowElements,
      name_,
      ": a window has more than ",
      kernels::kMostWindowElements,
      " elements");
  STD_TORCH_CHECK(!pool.windows_overlap(), name_, ": windows of the pool behind a layer must not overlap");
  return pool;
}

std::tuple<Tensor, Tensor> LayerWindows::pooled(const Tensor& output, const Tensor& mask) const {
  const int64_t batch = output.size(0);
  const int64_t channels = output.size(1);
  const kernels::Pool pool = pool_of(channels, output.size(2), output.size(3));
  Tensor result = empty_image({batch, channels, pool.rows.output, pool.columns.output}, ScalarType::Char, output);
  const int64_t elements = result.numel();
  Tensor notes = empty_flat(elements + (elements + 7) / 8, ScalarType::Byte, output);
  if (elements == 0) {
    return {result, notes};
  }
  const auto* const from = static_cast<const int8_t*>(output.const_data_ptr());
  const auto* const bits = static_cast<const uint8_t*>(mask.const_data_ptr());
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  auto* const offsets = static_cast<uint8_t*>(notes.mutable_data_ptr());
  const int64_t pixels = batch * pool.rows.output * pool.columns.output;
  torch::stable::parallel_for(
      0,
      batch * pool.rows.output,
      grain(pool.columns.output * channels * pool.window_elements()),
      [&](int64_t begin, int64_t end) { kernels::max_pool_rows(from, pool, begin, end, to, offsets); });
  // Eight pixels end with a byte, whatever the channels.
  torch::stable::parallel_for(0, (pixels + 7) / 8, grain(8 * channels), [&](int64_t begin, int64_t end) {
    kernels::pooled_bits(bits, offsets, pool, begin * 8, std::min(end * 8, pixels), offsets + elements);
  });
  return {result, notes};
}

Tensor LayerWindows::mask_of(const Tensor& notes, const Tensor& gradient, int64_t rows, int64_t columns) const {
  const kernels::Pool pool = pool_of(gradient.size(1), rows, columns);
  STD_TORCH_CHECK(
      gradient.size(2) == pool.rows.output && gradient.size(3) == pool.columns.output,
      name_,
      ": gradient must have the pooled output's shape, ",
      pool.rows.output,
      " x ",
      pool.columns.output,
      " for each sample");
  const int64_t elements = gradient.numel();
  const int64_t bytes = (elements + 7) / 8;
  STD_TORCH_CHECK(
      notes.is_cpu() && notes.scalar_type() == ScalarType::Byte && notes.dim() == 1 && notes.is_contiguous() &&
          notes.size(0) == elements + bytes,
      name_,
      ": mask must be contiguous uint8, with a byte and a bit for each element that was pooled");
  Tensor all = notes;
  return torch::stable::narrow(all, 0, elements, bytes);
}

Tensor LayerWindows::unpooled(const Tensor& gradient, const Tensor& notes, int64_t rows, int64_t columns) const {
  const int64_t batch = gradient.size(0);
  const int64_t channels = gradient.size(1);
  const kernels::Pool pool = pool_of(channels, rows, columns);
  Tensor result = empty_image({batch, channels, rows, columns}, ScalarType::Char, gradient);
  if (result.numel() == 0) {
    return result;
  }
  const auto* const from = static_cast<const int8_t*>(gradient.const_data_ptr());
  const auto* const offsets = static_cast<const uint8_t*>(notes.const_data_ptr());
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, batch * rows, grain(columns * channels), [&](int64_t begin, int64_t end) {
    kernels::max_pool_backward_rows(from, offsets, pool, begin, end, to);
  });
  return result;
}

} // namespace torch_odt
