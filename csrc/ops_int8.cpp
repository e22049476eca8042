#include "ops_int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/storage.h"

namespace torch_odt {

using kernels::int8::Rounding;
using kernels::int8::kMostTerms;

namespace {

void run_tasks(int64_t tasks, void (*task)(const void*, int64_t), const void* context) {
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      task(context, index);
    }
  });
}

// Work below which a thread costs more than it saves, in multiply-adds.
constexpr int64_t kGrainProducts = 1 << 20;
constexpr int64_t kDepthwiseGrainProducts = 1 << 18; // few of which are done at a time

// In front of packed weights: what they were packed for, so that others are told from them.
constexpr int64_t kTagBytes = 64;

uint64_t tag_of(const Conv2d& conv, Pass pass) {
  // FNV-1a: G. Fowler, L. C. Noll and K.-P. Vo.
  uint64_t tag = 0xcbf29ce484222325;
  const auto add = [&tag](int64_t value) { tag = (tag ^ static_cast<uint64_t>(value)) * 0x100000001b3; };
  for (const WindowAxis& axis : {conv.rows, conv.columns}) {
    for (const int64_t value : {axis.kernel, axis.stride, axis.padding, axis.dilation}) {
      add(value);
    }
  }
  for (const int64_t value : {conv.in_channels, conv.out_channels, conv.groups}) {
    add(value);
  }
  add(static_cast<int64_t>(pass));
  add(static_cast<int64_t>(kernels::isa()));
  return tag;
}

} // namespace

void check_int8(const Tensor& tensor, const char* name, const char* argument) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Char && tensor.dim() == 4,
      name,
      ": ",
      argument,
      " must be an int8 CPU tensor of 4 dimensions");
}

Conv2d conv_of(
    const Geometry& geometry,
    Pass pass,
    int64_t batch,
    const Pair& input_size,
    int64_t in_channels,
    const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.size(0) % geometry.groups() == 0 && weight.size(1) * geometry.groups() == in_channels,
      geometry.name,
      ": weight has ",
      weight.size(0),
      " x ",
      weight.size(1),
      " channels, which do not fit ",
      in_channels,
      " input channels in ",
      geometry.groups(),
      " groups");
  const Conv2d conv{
      batch,
      geometry.axis(0, input_size[0], weight.size(2)),
      geometry.axis(1, input_size[1], weight.size(3)),
      in_channels,
      weight.size(0),
      geometry.groups()};
  STD_TORCH_CHECK(
      conv.taps() * (pass == Pass::forward ? conv.in_depth() : conv.out_depth()) <= kMostTerms,
      geometry.name,
      ": sums of more than ",
      kMostTerms,
      " terms are not supported");
  return conv;
}

void check_zero_point(int64_t zero_point, const char* name) {
  STD_TORCH_CHECK(
      zero_point >= -128 && zero_point <= 127, name, ": input_zero_point must be a value of int8, not ", zero_point);
}

void check_fits(float largest, const char* name) {
  STD_TORCH_CHECK(
      std::isfinite(largest), name, ": a sum does not fit into int32; ", name, "_scaled takes sums of any size");
}

Tensor channels_last(const Tensor& tensor) {
  return as_channels_last(tensor);
}

Tensor in_memory_order(const Tensor& tensor) {
  return tensor.dim() == 4 ? as_channels_last(tensor) : as_contiguous(tensor);
}

const int8_t* bytes_of(const Tensor& tensor) {
  return static_cast<const int8_t*>(tensor.const_data_ptr());
}

Tensor empty_image(const Pair& sizes, ScalarType dtype, const Tensor& like) {
  return empty_channels_last(sizes, dtype, like);
}

Tensor empty_flat(int64_t count, ScalarType dtype, const Tensor& like) {
  return empty_contiguous({count}, dtype, like);
}

Threads threads_for(const Conv2d& conv) {
  const int64_t products = conv.out_pixels() * conv.out_channels * conv.taps() * conv.in_depth();
  const auto available = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t grain = conv.depthwise() ? kDepthwiseGrainProducts : kGrainProducts;
  return {std::clamp<int64_t>(products / grain, 1, available), run_tasks};
}

Threads all_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()), run_tasks};
}

Rescaling rescaling(
    const char* name,
    Result result,
    const Tensor& scale,
    int64_t channels,
    bool channels_are_rows,
    const char* argument) {
  const bool fits = scale.numel() == 1 || (channels > 0 && scale.numel() == channels);
  const bool numbers = scale.is_cpu() && scale.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(
      (numbers && fits) || channels != 1, name, ": ", argument, " must be a float32 CPU tensor of one number");
  STD_TORCH_CHECK(
      numbers && fits,
      name,
      ": ",
      argument,
      " must be a float32 CPU tensor of one number or of one for each of the ",
      channels,
      " output channels");
  const Tensor dense = as_contiguous(scale);
  const auto* const values = static_cast<const float*>(dense.const_data_ptr());
  return rescaling(name, result, std::vector<float>(values, values + scale.numel()), channels_are_rows, argument);
}

Rescaling rescaling(
    const char* name, Result result, std::vector<float> multipliers, bool channels_are_rows, const char* argument) {
  Rescaling made;
  made.multipliers = std::move(multipliers);
  for (const float value : made.multipliers) {
    STD_TORCH_CHECK(std::isfinite(value), name, ": ", argument, " must be finite");
  }
  made.finish.result = result;
  made.finish.multipliers = made.multipliers.data();
  made.finish.per_channel = made.multipliers.size() > 1;
  made.finish.channels_are_rows = channels_are_rows;
  return made;
}

void set_rounding(const char* name, int64_t rounding, int64_t seed, Rescaling& made) {
  STD_TORCH_CHECK(rounding >= 0 && rounding <= 2, name, ": rounding must be 0 (nearest), 1 (stochastic) or 2 (pseudo-stochastic)");
  Finish& finish = made.finish;
  finish.rounding = static_cast<Rounding>(rounding);
  finish.seed = static_cast<uint64_t>(seed);
  if (finish.rounding == Rounding::pseudo_stochastic) {
    int exponent = 0;
    const float fraction = std::frexp(made.multipliers.front(), &exponent);
    finish.shift = 1 - exponent;
    STD_TORCH_CHECK(
        made.multipliers.size() == 1 && fraction == 0.5F && finish.shift >= 0 && finish.shift <= 30,
        name,
        ": pseudo-stochastic rounding needs one scale, a power of two from 2^-30 to 1");
  }
}

void set_range(const char* name, int64_t zero_point, int64_t low, int64_t high, Finish& finish) {
  STD_TORCH_CHECK(
      -128 <= low && low <= high && high <= 127 && zero_point >= -128 && zero_point <= 127,
      name,
      ": low, high and output_zero_point must be values of int8, and low at most high");
  finish.zero_point = static_cast<int32_t>(zero_point);
  finish.low = static_cast<int32_t>(low);
  finish.high = static_cast<int32_t>(high);
}

Tensor packed_for(
    const Conv2d& conv, Pass pass, const Tensor& weight, const std::optional<Tensor>& packed, const Threads& threads) {
  const int64_t bytes = kTagBytes + kernels::int8::packed_bytes(conv, pass);
  const uint64_t tag = tag_of(conv, pass);
  if (packed) {
    STD_TORCH_CHECK(
        packed->is_cpu() && packed->scalar_type() == ScalarType::Byte && packed->dim() == 1 &&
            packed->numel() == bytes && packed->stride(0) == 1 &&
            std::memcmp(packed->const_data_ptr(), &tag, sizeof(tag)) == 0,
        "int8_conv2d: packed is not what int8_pack_weight made of such a weight for this pass and these windows");
    return *packed;
  }
  Tensor result = empty_flat(bytes, ScalarType::Byte, weight);
  auto* const to = static_cast<char*>(result.mutable_data_ptr());
  std::memset(to, 0, kTagBytes);
  std::memcpy(to, &tag, sizeof(tag));
  const Tensor dense = channels_last(weight);
  kernels::int8::pack_weight(conv, pass, bytes_of(dense), threads, to + kTagBytes);
  return result;
}

const void* data_of_packed(const Tensor& packed) {
  return static_cast<const char*>(packed.const_data_ptr()) + kTagBytes;
}

Tensor one_number(float value, const Tensor& like) {
  Tensor result = empty_flat(1, ScalarType::Float, like);
  *static_cast<float*>(result.mutable_data_ptr()) = value;
  return result;
}

const float* floats_of(const char* name, const Tensor& tensor, int64_t count, const char* argument) {
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() && tensor.numel() == count,
      name,
      ": ",
      argument,
      " must be a contiguous float32 CPU tensor of ",
      count,
      " numbers");
  return static_cast<const float*>(tensor.const_data_ptr());
}

Grid::Grid(const char* name, const Tensor& grid, const char* argument) {
  const float* const numbers = floats_of(name, grid, 2, argument);
  STD_TORCH_CHECK(
      std::isfinite(numbers[0]) && numbers[1] >= -128 && numbers[1] <= 127,
      name,
      ": ",
      argument,
      " must be a finite step and a zero point that is a value of int8");
  step = numbers[0];
  zero = static_cast<int64_t>(numbers[1]);
}

std::pair<int64_t, int64_t> Grid::bounds(std::optional<double> low, std::optional<double> high) const {
  const auto value_of = [&](double bound) {
    const double whole = std::nearbyint(bound / static_cast<double>(step)) + static_cast<double>(zero);
    return static_cast<int64_t>(std::clamp(whole, -128.0, 127.0));
  };
  const int64_t least = low ? value_of(*low) : -128;
  return {least, high ? std::max(least, value_of(*high)) : 127};
}

Tensor slot_of(const Pair& sizes, const Tensor& like) {
  Tensor number = empty_flat(1, ScalarType::BFloat16, like);
  kernels::store(std::numeric_limits<float>::quiet_NaN(), *static_cast<kernels::BFloat16*>(number.mutable_data_ptr()));
  return seen_everywhere(number, sizes);
}

} // namespace torch_odt
