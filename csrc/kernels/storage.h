// Numbers as they lie in memory, and as they are computed with.
#pragma once

#include <bit>
#include <cstdint>

#include "isa.h"

namespace torch_odt::kernels {

// bfloat16 as it lies in memory.
struct BFloat16 {
  uint16_t bits;
};

TORCH_ODT_INLINE float load(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
TORCH_ODT_INLINE float load(float value) {
  return value;
}
TORCH_ODT_INLINE double load(double value) {
  return value;
}
TORCH_ODT_INLINE int8_t load(int8_t value) {
  return value;
}

TORCH_ODT_INLINE void store(float value, BFloat16& place) {
  const auto bits = std::bit_cast<uint32_t>(value);
  // To the nearest, ties to even. A NaN is set apart because rounding could carry it away into an infinity; by bits and
  // not by a branch, which keeps compilers from using vectors.
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t number = uint32_t{value != value} - 1;
  place.bits = static_cast<uint16_t>((rounded & number) | (0x7FC0u & ~number));
}
TORCH_ODT_INLINE void store(float value, float& place) {
  place = value;
}
TORCH_ODT_INLINE void store(double value, double& place) {
  place = value;
}
TORCH_ODT_INLINE void store(int8_t value, int8_t& place) {
  place = value;
}

// The value that is loaded after this one has been stored.
template <typename Storage, typename Parameter>
TORCH_ODT_INLINE Parameter rounded(Parameter value) {
  Storage place;
  store(value, place);
  return load(place);
}

} // namespace torch_odt::kernels
