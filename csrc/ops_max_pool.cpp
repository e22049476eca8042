// Max-pooling with offsets of a byte, forward and backward. Shapes for tracing are registered in torch_odt/ops.

#include <algorithm>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/MemoryFormat.h>

#include "ops_channels.h"
#include "ops_max_pool.h"

namespace torch_odt {

namespace {

constexpr int64_t kMostStride = int64_t{1} << 30; // whose products 64 bits hold

int64_t windows_of(const kernels::WindowAxis& axis, bool ceil_mode) {
  const int64_t least = axis.dilation * (axis.kernel - 1) + 1;
  const int64_t reach = axis.input + 2 * axis.padding - least + (ceil_mode ? axis.stride - 1 : 0);
  if (reach < 0) {
    return 0;
  }
  const int64_t count = reach / axis.stride + 1;
  return (count - 1) * axis.stride >= axis.input + axis.padding ? count - 1 : count;
}

} // namespace

kernels::WindowAxis pool_axis(
    const char* name,
    int64_t input,
    int64_t kernel,
    int64_t stride,
    int64_t padding,
    int64_t dilation,
    bool ceil_mode) {
  STD_TORCH_CHECK(
      kernel <= kernels::kMostWindowElements, name, ": a window has more than ", kernels::kMostWindowElements, " elements");
  STD_TORCH_CHECK(
      stride <= kMostStride && dilation <= kMostStride, name, ": stride and dilation must be ", kMostStride, " at most");
  STD_TORCH_CHECK(
      kernel > 0 && stride > 0 && dilation > 0 && padding >= 0 && padding <= ((kernel - 1) * dilation + 1) / 2,
      name,
      ": kernel size, stride and dilation must be positive, and padding at most half of the window");
  kernels::WindowAxis axis{input, 0, kernel, stride, padding, dilation};
  axis.output = windows_of(axis, ceil_mode);
  STD_TORCH_CHECK(input > 0 && axis.output > 0, name, ": the input is too small for a window");
  // A window that begins inside the input has an element there.
  const int64_t before = std::min(axis.output, padding / stride + 1);
  for (int64_t window = 0; window < before; ++window) {
    STD_TORCH_CHECK(axis.first(window) < axis.last(window), name, ": a window lies outside of the input");
  }
  return axis;
}

} // namespace torch_odt

namespace {

using namespace torch_odt;

using torch::headeronly::MemoryFormat;

constexpr char kForward[] = "max_pool2d_with_offsets";
constexpr char kBackward[] = "max_pool2d_with_offsets_backward";

// The format that ATen takes a tensor for, dense or not, and gives to a result that is like it.
MemoryFormat format_of(const Tensor& image) {
  if (image.dim() != 4 || image.stride(1) == 0) {
    return MemoryFormat::Contiguous;
  }
  int64_t smallest = 0;
  for (const int64_t axis : {1, 3, 2, 0}) {
    if (image.size(axis) == 0 || image.stride(axis) < smallest || (axis == 0 && smallest == image.stride(1))) {
      return MemoryFormat::Contiguous;
    }
    smallest = image.stride(axis) * image.size(axis);
  }
  return MemoryFormat::ChannelsLast;
}

kernels::Pool pool_of(
    const char* name,
    const Tensor& input,
    const std::vector<int64_t>& kernel_size,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation,
    bool ceil_mode) {
  STD_TORCH_CHECK(
      input.is_cpu() && (input.dim() == 3 || input.dim() == 4),
      name,
      ": the input must be a CPU tensor of 3 or 4 dimensions");
  STD_TORCH_CHECK(input.numel() > 0, name, ": the input must have elements");
  for (const auto* pair : {&kernel_size, &stride, &padding, &dilation}) {
    STD_TORCH_CHECK(pair->size() == 2, name, ": windows are described by two numbers, for rows and for columns");
  }
  const auto axis = [&](size_t which) {
    return pool_axis(
        name,
        input.size(input.dim() - 2 + static_cast<int64_t>(which)),
        kernel_size[which],
        stride[which],
        padding[which],
        dilation[which],
        ceil_mode);
  };
  const bool channels_innermost = format_of(input) == MemoryFormat::ChannelsLast;
  const kernels::Pool pool{axis(0), axis(1), channels_innermost ? input.size(1) : 1};
  STD_TORCH_CHECK(
      pool.window_elements() <= kernels::kMostWindowElements,
      name,
      ": a window has more than ",
      kernels::kMostWindowElements,
      " elements");
  return pool;
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    sizes.push_back(tensor.size(axis));
  }
  return sizes;
}

std::vector<int64_t> pooled_sizes(const Tensor& input, const kernels::Pool& pool) {
  std::vector<int64_t> sizes = sizes_of(input);
  sizes[sizes.size() - 2] = pool.rows.output;
  sizes[sizes.size() - 1] = pool.columns.output;
  return sizes;
}

Tensor empty_image(const std::vector<int64_t>& sizes, const Tensor& like, ScalarType dtype) {
  return torch::stable::empty(sizes, dtype, std::nullopt, like.device(), std::nullopt, format_of(like));
}

int64_t grain(int64_t elements_of_each) {
  return std::max<int64_t>(1, kGrainElements / elements_of_each);
}

template <typename Function>
void with_pooled_types(ScalarType dtype, const char* name, const Function& function) {
  if (dtype == ScalarType::Char) {
    function.template operator()<int8_t, float>();
    return;
  }
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16,
      name,
      ": the input must be int8, float32, float64 or bfloat16");
  with_types(dtype, name, function);
}

std::tuple<Tensor, Tensor> max_pool2d_with_offsets(
    const Tensor& input,
    const std::vector<int64_t>& kernel_size,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation,
    bool ceil_mode) {
  const kernels::Pool pool = pool_of(kForward, input, kernel_size, stride, padding, dilation, ceil_mode);
  const Tensor source = torch::stable::contiguous(input, format_of(input));
  Tensor output = empty_image(pooled_sizes(input, pool), input, input.scalar_type());
  Tensor offsets = empty_image(pooled_sizes(input, pool), input, ScalarType::Byte);
  const int64_t row_elements = pool.columns.output * pool.channels;
  with_pooled_types(input.scalar_type(), kForward, [&]<typename Storage, typename Parameter>() {
    const auto* const from = data_of<Storage>(source);
    auto* const to = mutable_data_of<Storage>(output);
    auto* const where = mutable_data_of<uint8_t>(offsets);
    torch::stable::parallel_for(
        0,
        output.numel() / row_elements,
        grain(row_elements * pool.window_elements()),
        [&](int64_t begin, int64_t end) { kernels::max_pool_rows(from, pool, begin, end, to, where); });
  });
  return {output, offsets};
}

Tensor max_pool2d_with_offsets_backward(
    const Tensor& grad_output,
    const Tensor& input,
    const std::vector<int64_t>& kernel_size,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation,
    bool ceil_mode,
    const Tensor& offsets) {
  const kernels::Pool pool = pool_of(kBackward, input, kernel_size, stride, padding, dilation, ceil_mode);
  const std::vector<int64_t> pooled = pooled_sizes(input, pool);
  STD_TORCH_CHECK(
      grad_output.is_cpu() && grad_output.scalar_type() == input.scalar_type() && sizes_of(grad_output) == pooled,
      kBackward,
      ": grad_output must have the output's shape, dtype and device");
  STD_TORCH_CHECK(
      offsets.is_cpu() && offsets.scalar_type() == ScalarType::Byte && sizes_of(offsets) == pooled,
      kBackward,
      ": offsets must be uint8, with the output's shape and device");
  STD_TORCH_CHECK(
      input.scalar_type() != ScalarType::Char || !pool.windows_overlap(),
      kBackward,
      ": of windows that overlap, int8 does not hold the sums of gradients");
  const Tensor gradient = torch::stable::contiguous(grad_output, format_of(input));
  const Tensor where = torch::stable::contiguous(offsets, format_of(input));
  Tensor grad_input = empty_image(sizes_of(input), input, input.scalar_type());
  with_pooled_types(input.scalar_type(), kBackward, [&]<typename Storage, typename Parameter>() {
    const auto* const from = data_of<Storage>(gradient);
    const auto* const window_offsets = data_of<uint8_t>(where);
    auto* const to = mutable_data_of<Storage>(grad_input);
    const int64_t row_elements = pool.columns.input * pool.channels;
    torch::stable::parallel_for(
        0, input.numel() / row_elements, grain(row_elements), [&](int64_t begin, int64_t end) {
          kernels::max_pool_backward_rows(from, window_offsets, pool, begin, end, to);
        });
  });
  return grad_input;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "max_pool2d_with_offsets(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
      "bool ceil_mode) -> (Tensor, Tensor)");
  m.def(
      "max_pool2d_with_offsets_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, "
      "int[2] padding, int[2] dilation, bool ceil_mode, Tensor offsets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("max_pool2d_with_offsets", TORCH_BOX(&max_pool2d_with_offsets));
  m.impl("max_pool2d_with_offsets_backward", TORCH_BOX(&max_pool2d_with_offsets_backward));
}
