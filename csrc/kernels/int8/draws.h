// What stochastic rounding draws: a number for each element of a result, from the seed and the element's place alone. A
// place is where its row begins (the channels of a group at one pixel, or a row of a weight) and its column there: each
// hash of 32 bits serves two columns that are 16 apart.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace torch_odt::kernels::int8 {

// The finaliser of a 32-bit hash with little bias (Wellons' lowbias32), of numbers or of vectors.
inline constexpr uint32_t kFirstFactor = 0x7feb352dU;
inline constexpr uint32_t kSecondFactor = 0x846ca68bU;

template <typename Bits>
TORCH_ODT_INLINE Bits mixed(Bits bits) {
  bits ^= bits >> 16;
  bits *= kFirstFactor;
  bits ^= bits >> 15;
  bits *= kSecondFactor;
  bits ^= bits >> 16;
  return bits;
}

// 2^32 over the golden ratio: multiples of it spread evenly.
inline constexpr uint32_t kGolden = 0x9e3779b9U;

// The key of rows whose place has these upper 32 bits.
TORCH_ODT_INLINE uint32_t key_of(uint64_t seed, uint32_t high) {
  return mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) ^ mixed(high + kGolden)));
}

// Of a column: which hash is its own, counted from the row's place on, and whether its upper half is.
TORCH_ODT_INLINE int64_t hash_of(int64_t column) {
  return column / 32 * 16 + column % 16;
}

TORCH_ODT_INLINE bool takes_upper_half(int64_t column) {
  return column % 32 >= 16;
}

// The hash itself is mixed((place + hash_of(column)) * kGolden + key). A draw is one of its halves, as a fraction.
inline constexpr float kDrawUnit = 0x1p-16F;

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
