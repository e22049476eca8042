// Mantissas, exponents and states as NITI's operators take them.

#include "ops_niti.h"

#include <array>

namespace torch_odt {

namespace {

// Of a float that is rounded pseudo-stochastically: seven are compared with seven.
constexpr int kExtraBits = 14;

Tensor seen_as_int8(const Tensor& carrier, char* data, int64_t count) {
  STD_TORCH_CHECK(
      are_mantissas(carrier) && carrier.dim() == 4,
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

void check_rounding(int64_t rounding, const char* name) {
  STD_TORCH_CHECK(rounding == 0 || rounding == 2, name, ": rounding must be 0 (nearest) or 2 (pseudo-stochastic)");
}

int64_t bound_of(std::optional<double> ceiling, int64_t exponent) {
  const auto most = static_cast<double>(kMostMantissa + 1);
  const double bound = ceiling ? std::ldexp(*ceiling, static_cast<int>(-exponent)) : most;
  return static_cast<int64_t>(std::clamp(bound, -1.0, most));
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
  if (batch == 0 || part_bytes == 0 || batch * sample_bytes + weight_bytes <= part_bytes) {
    return {{0, batch}};
  }
  const int64_t size = std::max<int64_t>(1, (part_bytes - weight_bytes) / std::max<int64_t>(sample_bytes, 1));
  std::vector<SampleRange> parts;
  for (int64_t begin = 0; begin < batch; begin += size) {
    parts.push_back({begin, std::min(begin + size, batch)});
  }
  return parts;
}

Scaled quantized(const Tensor& values, int64_t rounding, const char* what) {
  STD_TORCH_CHECK(
      values.is_cpu() && values.scalar_type() == ScalarType::Float && values.dim() == 4,
      kNiti,
      ": ",
      what,
      " must be mantissas with an exponent, or a float32 CPU tensor of 4 dimensions");
  const Tensor dense = channels_last(values);
  const auto* const from = static_cast<const float*>(dense.const_data_ptr());
  const float largest = largest_of(from, values.numel());
  STD_TORCH_CHECK(
      std::isfinite(largest),
      what,
      " holds numbers that are not finite, which have no mantissas in 8 bits: lower the learning rate of what trains "
      "in float32, or look at the batch");
  int exponent = 0;
  std::frexp(largest, &exponent);
  exponent = largest == 0 ? 0 : exponent - static_cast<int>(kMantissaBits);
  // Pseudo-stochastic rounding takes bits behind the point for those that are dropped. Two factors, because one alone
  // may leave float32's range.
  const int extra = rounding == 0 ? 0 : kExtraBits;
  const int half = exponent >> 1;
  const float first = std::ldexp(1.0F, -half);
  const float second = std::ldexp(1.0F, half - exponent + extra);
  Tensor result = empty_image({values.size(0), values.size(1), values.size(2), values.size(3)}, kCarrier, values);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, values.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
    alignas(64) std::array<int32_t, kWholeAtOnce> whole;
    for (int64_t place = begin; place < end; place += kWholeAtOnce) {
      const int64_t some = std::min(kWholeAtOnce, end - place);
      kernels::int8::whole_numbers(from + place, some, first, second, whole.data());
      kernels::int8::shift_to_int8(
          whole.data(), some, extra, static_cast<kernels::int8::Rounding>(rounding), to + place);
    }
  });
  return {result, exponent};
}

} // namespace torch_odt
