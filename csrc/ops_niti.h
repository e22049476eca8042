// What the two passes of a layer in NITI's arithmetic share: see torch_odt/quant/niti_integers.py, where the same is in
// plain torch, and the shapes for tracing are registered.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/int8/held_scale.h"
#include "kernels/int8/integers.h"
#include "ops_int8.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

using kernels::int8::HeldScale;

inline constexpr char kNiti[] = "niti_layer";
inline constexpr int64_t kMostMantissa = 127;
inline constexpr int64_t kMantissaBits = 7;
inline constexpr ScalarType kCarrier = ScalarType::Float8_e5m2;

inline bool are_mantissas(const Tensor& tensor) {
  return tensor.is_cpu() && (tensor.scalar_type() == kCarrier || tensor.scalar_type() == ScalarType::Char);
}

void check_rounding(int64_t rounding, const char* name);

// Mantissas of that exponent are below this where a ceiling stops nothing: those that are pass the gradient, too.
int64_t bound_of(std::optional<double> ceiling, int64_t exponent);

// Mantissas as they travel, seen as int8; the tensor that has them must outlive this one. `begin` and `count`: of the
// first dimension.
Tensor mantissas_of(const Tensor& carrier, int64_t begin, int64_t count);
Tensor mantissas_of(const Tensor& carrier);

// The whole number that a tensor of one holds.
int64_t exponent_of(const Tensor& exponent, const char* argument);

// A row of state for each scale, as float64.
const double* rows_of(const Tensor& state, int64_t scales);

// A factor of 2^-shift.
inline Numbers dropping(int64_t shift) {
  return {std::ldexp(1.0F, static_cast<int>(-shift))};
}

// Samples from `begin` up to but without `end`.
struct SampleRange {
  int64_t begin;
  int64_t end;

  int64_t count() const {
    return end - begin;
  }
};

// Parts of a batch that fit into so many bytes with the weight; 0 does not split.
std::vector<SampleRange> parts_of(int64_t batch, int64_t sample_bytes, int64_t weight_bytes, int64_t part_bytes);

// What a sample reads, and writes in elements of so many bytes.
inline int64_t sample_bytes_of(const Tensor& image, const Conv2d& conv, int64_t element_bytes) {
  const int64_t read = image.size(1) * image.size(2) * image.size(3);
  const int64_t written = conv.rows.output * conv.columns.output * conv.out_channels;
  return image.size(0) == 0 ? 0 : read + written * element_bytes;
}

// Mantissas in channels_last, and their exponent.
struct Scaled {
  Tensor mantissas;
  int64_t exponent;
};

// From a tensor of floats; `what` is for the error where one of them is not finite.
Scaled quantized(const Tensor& values, int64_t rounding, const char* what);

inline Tensor nothing(ScalarType dtype, const Tensor& like) {
  return empty_flat(0, dtype, like);
}

inline constexpr int64_t kGrainElements = 1 << 15;
// What a thread computes before it is rounded.
inline constexpr int64_t kWholeAtOnce = 2048;

// The largest magnitude, found in parallel.
template <typename Number>
auto largest_of(const Number* numbers, int64_t count) {
  using Largest = decltype(kernels::int8::largest_magnitude(numbers, count));
  std::vector<Largest> largest(static_cast<size_t>(count / kGrainElements + 1), Largest{0});
  torch::stable::parallel_for(0, static_cast<int64_t>(largest.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kGrainElements;
      const int64_t some = std::min(kGrainElements, count - first);
      largest[static_cast<size_t>(block)] = kernels::int8::largest_magnitude(numbers + first, some);
    }
  });
  Largest most{0};
  for (const Largest each : largest) {
    // NaN stays, too.
    most = each <= most ? most : each;
  }
  return most;
}

// Integers as mantissas at the scale that is held, or that a check finds: attempt(shift) writes what is left of them,
// and returns their largest magnitude. Returns the exponent of what was written.
template <typename Attempt>
int64_t settle(HeldScale& scale, int64_t sums_exponent, bool training, const Attempt& attempt) {
  const int64_t shift = scale.shift(sums_exponent);
  const double largest = attempt(shift);
  if (training ? !scale.is_due() : scale.is_known) {
    if (training) {
      scale.note_batch(std::ldexp(largest, static_cast<int>(-shift)) >= static_cast<double>(kMostMantissa + 1));
    }
    return sums_exponent + shift;
  }
  const int64_t fitting = scale.fitting_shift(largest, kMantissaBits, sums_exponent);
  if (fitting != shift) {
    attempt(fitting);
  }
  if (training) {
    scale.note_check(sums_exponent + fitting, largest == 0);
  }
  return sums_exponent + fitting;
}

} // namespace torch_odt
