// Convolutions and linear layers in NITI's arithmetic, forward, and sums of two tensors.

#include "ops_niti.h"

#include <array>
#include <cstring>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/integers.h"
#include "ops_int8_outputs.h"

namespace torch_odt {

namespace {

// int32 has to hold the sums with it.
constexpr double kMostBias = 1073741824.0;

Tensor seen_as_int8(const Tensor& carrier, char* data, int64_t count) {
  STD_TORCH_CHECK(
      carrier.is_cpu() && (carrier.scalar_type() == kCarrier || carrier.scalar_type() == ScalarType::Char) &&
          carrier.dim() == 4,
      kNiti,
      ": mantissas are a CPU tensor of 4 dimensions, float8_e5m2 or int8");
  std::array<int64_t, 4> sizes;
  std::array<int64_t, 4> strides;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = i == 0 ? count : carrier.size(static_cast<int64_t>(i));
    strides[i] = carrier.stride(static_cast<int64_t>(i));
  }
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      data, 4, sizes.data(), strides.data(), 0, aoti_torch_dtype_int8(), aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

} // namespace

Tensor mantissas_of(const Tensor& carrier, int64_t begin, int64_t count) {
  // Nobody writes to it: the operators that take it only read.
  auto* const data = const_cast<char*>(static_cast<const char*>(carrier.const_data_ptr()));
  return seen_as_int8(carrier, data + begin * carrier.stride(0), count);
}

Tensor mantissas_of(const Tensor& carrier) {
  return mantissas_of(carrier, 0, carrier.size(0));
}

int64_t exponent_of(const Tensor& exponent, const char* argument) {
  return static_cast<int64_t>(*floats_of(kNiti, exponent, 1, argument));
}

const double* rows_of(const Tensor& state, int64_t scales) {
  STD_TORCH_CHECK(
      state.is_cpu() && state.scalar_type() == ScalarType::Double && state.is_contiguous() &&
          state.numel() == scales * HeldScale::kWidth,
      kNiti,
      ": state must be a contiguous float64 CPU tensor with a row of ",
      HeldScale::kWidth,
      " numbers for each scale");
  return static_cast<const double*>(state.const_data_ptr());
}

std::vector<SampleRange> parts_of(int64_t batch, int64_t sample_bytes, int64_t weight_bytes, int64_t part_bytes) {
  if (part_bytes == 0 || batch * sample_bytes + weight_bytes <= part_bytes) {
    return {{0, batch}};
  }
  const int64_t size = std::max<int64_t>(1, (part_bytes - weight_bytes) / std::max<int64_t>(sample_bytes, 1));
  std::vector<SampleRange> parts;
  for (int64_t begin = 0; begin < batch; begin += size) {
    parts.push_back({begin, std::min(begin + size, batch)});
  }
  return parts;
}

namespace {

// A bias in units of the sums.
std::optional<std::vector<int32_t>> whole_bias(
    const std::optional<Tensor>& bias, const std::optional<Tensor>& exponent, int64_t channels, int64_t sums_exponent) {
  if (!bias || !exponent) {
    return std::nullopt;
  }
  STD_TORCH_CHECK(
      bias->is_cpu() && (bias->scalar_type() == kCarrier || bias->scalar_type() == ScalarType::Char) &&
          bias->is_contiguous() && bias->numel() == channels,
      kNiti,
      ": bias must be contiguous mantissas, one for each output channel");
  const auto apart = static_cast<int>(exponent_of(*exponent, "bias_exponent") - sums_exponent);
  const auto* const mantissas = static_cast<const int8_t*>(bias->const_data_ptr());
  std::vector<int32_t> whole(static_cast<size_t>(channels));
  for (size_t i = 0; i < whole.size(); ++i) {
    const double units = std::nearbyint(std::ldexp(static_cast<double>(mantissas[i]), apart));
    whole[i] = static_cast<int32_t>(std::clamp(units, -kMostBias, kMostBias));
  }
  return whole;
}

// The upper bound of mantissas with that exponent.
int64_t most_mantissa(std::optional<double> ceiling, int64_t exponent) {
  const auto most = static_cast<double>(kMostMantissa);
  return ceiling ? static_cast<int64_t>(std::min(most, std::ldexp(*ceiling, static_cast<int>(-exponent)))) : kMostMantissa;
}

std::tuple<Tensor, Tensor, Tensor> layer(
    const Tensor& input,
    const Tensor& exponent,
    const Tensor& weight,
    const Tensor& weight_exponent,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& bias_exponent,
    const Tensor& state,
    const Tensor& backward_state,
    const Tensor& gradient_bits,
    bool relu,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  static_cast<void>(backward_state);
  static_cast<void>(gradient_bits);
  const Geometry geometry{kNiti, stride, padding, dilation, groups};
  const Tensor image = channels_last(mantissas_of(input));
  const Tensor weights = mantissas_of(weight);
  const std::optional<Tensor> unpacked;
  const Conv2d conv = ForwardArguments{image, weights, unpacked, 0, geometry}.conv();
  const int64_t sums_exponent = exponent_of(exponent, "exponent") + exponent_of(weight_exponent, "weight_exponent");
  const auto added = whole_bias(bias, bias_exponent, conv.out_channels, sums_exponent);
  Tensor output =
      empty_image({conv.batch, conv.out_channels, conv.rows.output, conv.columns.output}, kCarrier, input);
  auto* const to = static_cast<int8_t*>(output.mutable_data_ptr());
  const int64_t sample_outputs = conv.out_channels * conv.rows.output * conv.columns.output;
  const auto parts = parts_of(conv.batch, sample_bytes_of(image, conv), weight.numel(), part_bytes);
  // Packed once for all parts.
  const auto packed = parts.size() > 1
      ? std::optional<Tensor>(packed_for(conv, Pass::forward, weights, unpacked, threads_for(conv)))
      : std::nullopt;
  HeldScale scale(rows_of(state, 1));
  const auto attempt = [&](int64_t shift) {
    Rescaling made = rescaling(kNiti, Result::int8, dropping(shift), false);
    set_rounding(kNiti, rounding, 0, made);
    set_range(
        kNiti, 0, relu ? 0 : -kMostMantissa, relu ? most_mantissa(ceiling, sums_exponent + shift) : kMostMantissa,
        made.finish);
    float largest = 0;
    for (const SampleRange& part : parts) {
      const Tensor samples = mantissas_of(image, part.begin, part.count());
      const ForwardArguments arguments{samples, weights, packed, 0, geometry};
      made.finish.output = to + part.begin * sample_outputs;
      largest = std::max(largest, arguments.run(arguments.conv(), added ? added->data() : nullptr, made.finish));
    }
    return std::ldexp(static_cast<double>(largest), static_cast<int>(shift));
  };
  const int64_t found = settle(scale, sums_exponent, training, attempt);
  Tensor after = empty_flat(HeldScale::kWidth, ScalarType::Double, state);
  scale.write(static_cast<double*>(after.mutable_data_ptr()));
  return {output, one_number(static_cast<float>(found), input), after};
}

// What a thread adds up before it is rounded.
constexpr int64_t kSumsAtOnce = 2048;
constexpr int64_t kGrainElements = 1 << 15;
constexpr int64_t kMostUp = 16; // so that int32 holds the sums

// The same bytes in the order of another tensor's memory, which is channels_last or contiguous.
Tensor ordered(const Tensor& carrier, bool in_channels_last) {
  return in_channels_last ? channels_last(carrier) : as_contiguous(carrier);
}

// How far mantissas are moved up, and those of the finer scale down, so that int32 holds their sums.
struct Apart {
  int64_t up;
  int64_t down;

  explicit Apart(int64_t exponents) : up(std::min(exponents, kMostUp)), down(std::min(exponents - up, kernels::int8::kLargestShift)) {}
};

// The sum of two tensors of different scales, see `added` in torch_odt/quant/niti_numbers.py.
std::tuple<Tensor, Tensor> add(
    const Tensor& first,
    const Tensor& first_exponent,
    const Tensor& second,
    const Tensor& second_exponent,
    int64_t rounding) {
  constexpr char kName[] = "niti_add";
  const auto is_carrier = [](const Tensor& tensor) {
    return tensor.is_cpu() && (tensor.scalar_type() == kCarrier || tensor.scalar_type() == ScalarType::Char);
  };
  STD_TORCH_CHECK(
      is_carrier(first) && is_carrier(second) && first.dim() == second.dim(),
      kName,
      ": both must be mantissas of the same shape on the CPU");
  Pair sizes;
  for (int64_t i = 0; i < first.dim(); ++i) {
    STD_TORCH_CHECK(first.size(i) == second.size(i), kName, ": both must have the same shape");
    sizes.push_back(first.size(i));
  }
  STD_TORCH_CHECK(rounding == 0 || rounding == 2, kName, ": rounding must be 0 (nearest) or 2 (pseudo-stochastic)");
  const bool in_channels_last =
      first.dim() == 4 && (!first.is_contiguous() || (first.stride(1) == 1 && first.stride(3) == first.size(1)));
  const int64_t exponents[2] = {exponent_of(first_exponent, "first_exponent"), exponent_of(second_exponent, "second_exponent")};
  const bool first_is_coarse = exponents[0] >= exponents[1];
  const Tensor coarse = ordered(first_is_coarse ? first : second, in_channels_last);
  Tensor fine = ordered(first_is_coarse ? second : first, in_channels_last);
  const Apart apart(std::abs(exponents[0] - exponents[1]));
  const int64_t count = coarse.numel();
  if (apart.down > 0) {
    Tensor moved = empty_flat(count, ScalarType::Char, fine);
    auto* const to = static_cast<int8_t*>(moved.mutable_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<int8_t>(
          std::nearbyint(std::ldexp(static_cast<float>(bytes_of(fine)[i]), static_cast<int>(-apart.down))));
    }
    fine = moved;
  }
  const int8_t* const upper = bytes_of(coarse);
  const int8_t* const lower = bytes_of(fine);
  const auto blocks = count / kGrainElements + 1;
  std::vector<int32_t> largest(static_cast<size_t>(blocks), 0);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t place = block * kGrainElements;
      const int64_t some = std::min(kGrainElements, count - place);
      largest[static_cast<size_t>(block)] = kernels::int8::largest_sum(upper + place, lower + place, some, apart.up);
    }
  });
  const auto most = static_cast<double>(*std::max_element(largest.begin(), largest.end()));
  const int64_t shift = std::max<int64_t>(0, kernels::int8::bits_of(most) - kMantissaBits);
  Tensor result = in_channels_last ? empty_image(sizes, kCarrier, first) : empty_contiguous(sizes, kCarrier, first);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, count, kGrainElements, [&](int64_t begin, int64_t end) {
    alignas(64) std::array<int32_t, kSumsAtOnce> sums;
    for (int64_t place = begin; place < end; place += kSumsAtOnce) {
      const int64_t some = std::min(kSumsAtOnce, end - place);
      kernels::int8::add_shifted(upper + place, lower + place, some, apart.up, sums.data());
      kernels::int8::shift_to_int8(
          sums.data(), some, shift, static_cast<kernels::int8::Rounding>(rounding), to + place);
    }
  });
  const int64_t exponent = std::min(exponents[0], exponents[1]) + std::abs(exponents[0] - exponents[1]) - apart.up + shift;
  return {result, one_number(static_cast<float>(exponent), first)};
}

} // namespace

} // namespace torch_odt

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "niti_layer(Tensor input, Tensor exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, "
      "Tensor? bias_exponent, Tensor state, Tensor backward_state, Tensor gradient_bits, bool relu, float? ceiling, "
      "int rounding, int part_bytes, bool training, int[] stride, int[] padding, int[] dilation, int groups) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "niti_add(Tensor first, Tensor first_exponent, Tensor second, Tensor second_exponent, int rounding) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("niti_layer", TORCH_BOX(&torch_odt::layer));
  m.impl("niti_add", TORCH_BOX(&torch_odt::add));
}
