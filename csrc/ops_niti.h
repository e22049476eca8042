// What the two passes of a layer in NITI's arithmetic share: see torch_odt/quant/niti_integers.py, where the same is in
// plain torch, and the shapes for tracing are registered.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/int8/held_scale.h"
#include "ops_int8.h"

namespace torch_odt [[gnu::visibility("hidden")]] {

using kernels::int8::HeldScale;

inline constexpr char kNiti[] = "niti_layer";
inline constexpr int64_t kMostMantissa = 127;
inline constexpr int64_t kMantissaBits = 7;
inline constexpr ScalarType kCarrier = ScalarType::Float8_e5m2;

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

// What a sample reads and writes.
inline int64_t sample_bytes_of(const Tensor& image, const Conv2d& conv) {
  const int64_t read = image.size(1) * image.size(2) * image.size(3);
  return image.size(0) == 0 ? 0 : read + conv.rows.output * conv.columns.output * conv.out_channels;
}

// Integers as mantissas at the scale that is held, or that a check finds: attempt(shift) writes what is left of them, and
// returns their largest magnitude. Returns the exponent of what was written.
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
