// What stands between layers in int8, see kernels/int8/pointwise.h. Shapes for tracing, gradients and the same in plain
// torch are in torch_odt/quant/pointwise.py.

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "kernels/bits.h"
#include "kernels/int8/pointwise.h"
#include "ops_int8.h"

namespace {

using namespace torch_odt;
using kernels::int8::Grid8;
using kernels::int8::ToGrid;

constexpr char kQuantize[] = "int8_quantize";
constexpr char kAdd[] = "int8_add";
constexpr char kHoldsNan[] = ": the input holds NaN";
// A multiple of 8, so that each thread's part of a mask is its own.
constexpr int64_t kGrainElements = 1 << 15;
// Images of few channels, as loaders yield them, are brought into the order of channels_last so many pixels at a time; a
// multiple of 8.
constexpr int64_t kGatheredPixels = 64;
constexpr int64_t kMostGatheredChannels = 64;

Grid8 numbers_of(const Grid& grid) {
  return {grid.step, static_cast<float>(grid.zero)};
}

Pair sizes_of(const Tensor& tensor) {
  Pair sizes;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    sizes.push_back(tensor.size(i));
  }
  return sizes;
}

// What operators return: values, their slot, and a mask.
struct Made {
  Tensor values;
  Tensor slot;
  Tensor mask;
  ToGrid to;

  Made(const Tensor& like, const Grid& grid, std::optional<double> low, std::optional<double> high)
      : values(
            like.dim() == 4 ? empty_image(sizes_of(like), ScalarType::Char, like)
                            : empty_contiguous(sizes_of(like), ScalarType::Char, like)),
        slot(slot_of(sizes_of(like), like)),
        mask(empty_flat(kernels::packed_bytes(like.numel()), ScalarType::Byte, like)) {
    const auto [least, most] = grid.bounds(low, high);
    to = {
        numbers_of(grid),
        static_cast<float>(least),
        static_cast<float>(most),
        static_cast<int8_t*>(values.mutable_data_ptr()),
        static_cast<uint8_t*>(mask.mutable_data_ptr())};
  }

  // Calls function(first, count, where to) for parts of the elements.
  template <typename Function>
  void for_parts(const Function& function) const {
    const int64_t count = values.numel();
    const int64_t grains = (count + kGrainElements - 1) / kGrainElements;
    torch::stable::parallel_for(0, grains, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kGrainElements;
      ToGrid part = to;
      part.output += first;
      part.mask += first / 8;
      function(first, std::min(count, end * kGrainElements) - first, part);
    });
  }

  std::tuple<Tensor, Tensor, Tensor> all() const {
    return {values, slot, mask};
  }
};

// Images of any strides. These are asked for once, since every question is a call.
struct Images {
  const float* values;
  Sizes sizes;
  Sizes strides;

  explicit Images(const Tensor& tensor)
      : values(static_cast<const float*>(tensor.const_data_ptr())), sizes(sizes_of(tensor)) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      strides.push_back(tensor.stride(i));
    }
  }

  // Pixels [begin, end) in the order of channels_last.
  void gather(int64_t begin, int64_t end, float* to) const {
    const int64_t channels = sizes[1];
    const int64_t columns = sizes[3];
    const int64_t channel_stride = strides[1];
    const int64_t pixel_stride = strides[3];
    for (int64_t pixel = begin; pixel < end;) {
      const int64_t column = pixel % columns;
      const int64_t some = std::min(end - pixel, columns - column);
      const float* const line = values + pixel / columns / sizes[2] * strides[0] +
          pixel / columns % sizes[2] * strides[2] + column * pixel_stride;
      for (int64_t channel = 0; channel < channels; ++channel) {
        const float* const from = line + channel * channel_stride;
        for (int64_t i = 0; i < some; ++i) {
          to[i * channels + channel] = from[i * pixel_stride];
        }
      }
      to += some * channels;
      pixel += some;
    }
  }
};

// Returns whether none of the input is NaN.
bool quantize_gathered(const Images& images, const ToGrid& to) {
  const int64_t channels = images.sizes[1];
  const int64_t pixels = images.sizes[0] * images.sizes[2] * images.sizes[3];
  const int64_t pieces = (pixels + kGatheredPixels - 1) / kGatheredPixels;
  std::atomic<bool> is_number = true;
  torch::stable::parallel_for(
      0, pieces, kGrainElements / (kGatheredPixels * channels), [&](int64_t begin, int64_t end) {
        float gathered[kGatheredPixels * kMostGatheredChannels];
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t first = piece * kGatheredPixels;
          const int64_t last = std::min(pixels, first + kGatheredPixels);
          images.gather(first, last, gathered);
          ToGrid part = to;
          part.output += first * channels;
          part.mask += first * channels / 8;
          if (!kernels::int8::quantize(gathered, (last - first) * channels, part)) {
            is_number = false;
          }
        }
      });
  return is_number;
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& input, const Tensor& grid) {
  STD_TORCH_CHECK(
      input.is_cpu() && input.scalar_type() == ScalarType::Float, kQuantize, ": the input must be float32, and on the CPU");
  const Made made(input, Grid(kQuantize, grid, "grid"), std::nullopt, std::nullopt);
  if (input.dim() == 4 && input.numel() > 0 && input.size(1) <= kMostGatheredChannels && !lies_channels_last(input)) {
    STD_TORCH_CHECK(quantize_gathered(Images(input), made.to), kQuantize, kHoldsNan);
    return made.all();
  }
  const Tensor source = in_memory_order(input);
  const auto* const from = static_cast<const float*>(source.const_data_ptr());
  std::atomic<bool> is_number = true;
  made.for_parts([&](int64_t first, int64_t count, const ToGrid& to) {
    if (!kernels::int8::quantize(from + first, count, to)) {
      is_number = false;
    }
  });
  STD_TORCH_CHECK(is_number, kQuantize, kHoldsNan);
  return made.all();
}

std::tuple<Tensor, Tensor, Tensor> add(
    const Tensor& left,
    const Tensor& left_slot,
    const Tensor& left_grid,
    const Tensor& right,
    const Tensor& right_slot,
    const Tensor& right_grid,
    const Tensor& output_grid,
    std::optional<double> low,
    std::optional<double> high) {
  static_cast<void>(left_slot);
  static_cast<void>(right_slot);
  for (const Tensor* tensor : {&left, &right}) {
    STD_TORCH_CHECK(
        tensor->is_cpu() && tensor->scalar_type() == ScalarType::Char, kAdd, ": both must be int8 CPU tensors");
  }
  STD_TORCH_CHECK(sizes_of(left) == sizes_of(right), kAdd, ": the shapes of both differ");
  const Tensor one = in_memory_order(left);
  const Tensor other = in_memory_order(right);
  const Grid8 one_grid = numbers_of(Grid(kAdd, left_grid, "left_grid"));
  const Grid8 other_grid = numbers_of(Grid(kAdd, right_grid, "right_grid"));
  const Made made(left, Grid(kAdd, output_grid, "output_grid"), low, high);
  made.for_parts([&](int64_t first, int64_t count, const ToGrid& to) {
    kernels::int8::add(bytes_of(one) + first, one_grid, bytes_of(other) + first, other_grid, count, to);
  });
  return made.all();
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("int8_quantize(Tensor input, Tensor grid) -> (Tensor, Tensor, Tensor)");
  m.def(
      "int8_add(Tensor left, Tensor left_slot, Tensor left_grid, Tensor right, Tensor right_slot, Tensor right_grid, "
      "Tensor output_grid, float? low, float? high) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("int8_quantize", TORCH_BOX(&quantize));
  m.impl("int8_add", TORCH_BOX(&add));
}
