// What stochastic rounding draws: a number for each element of a result, from the seed and the element's index alone.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace torch_odt::kernels::int8 {

// The finaliser of a 32-bit hash with little bias (Wellons' lowbias32) without its last step, which moves bits that are
// not used. Of numbers or of vectors.
inline constexpr uint32_t kFirstFactor = 0x7feb352dU;
inline constexpr uint32_t kSecondFactor = 0x846ca68bU;

template <typename Bits>
TORCH_ODT_INLINE Bits mixed(Bits bits) {
  bits ^= bits >> 16;
  bits *= kFirstFactor;
  bits ^= bits >> 15;
  bits *= kSecondFactor;
  return bits;
}

// 2^32 over the golden ratio: multiples of it spread evenly.
inline constexpr uint32_t kGolden = 0x9e3779b9U;

// The key of elements whose index has these upper 32 bits. The draw of an element is the upper 24 bits of
// mixed(index * kGolden + key), as a fraction.
TORCH_ODT_INLINE uint32_t key_of(uint64_t seed, uint32_t high) {
  const uint32_t upper = mixed(high + kGolden);
  const uint32_t middle = mixed(static_cast<uint32_t>(seed >> 32) ^ upper ^ upper >> 16);
  const uint32_t lower = mixed(static_cast<uint32_t>(seed) ^ middle ^ middle >> 16);
  return lower ^ lower >> 16;
}

// The keys of a block's rows, one after another.
struct Keys {
  uint64_t seed;
  uint32_t high = 0;
  uint32_t key;

  TORCH_ODT_INLINE explicit Keys(uint64_t of) : seed(of), key(key_of(of, 0)) {}

  TORCH_ODT_INLINE uint32_t at(int64_t place) {
    const auto upper = static_cast<uint32_t>(static_cast<uint64_t>(place) >> 32);
    if (upper != high) [[unlikely]] {
      high = upper;
      key = key_of(seed, high);
    }
    return key;
  }
};

} // namespace torch_odt::kernels::int8
