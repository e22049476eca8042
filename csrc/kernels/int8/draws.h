// What stochastic rounding draws: a number for each element of a result, from the seed and the element's place alone. A
// place is where its row begins (the channels of a group at one pixel, or a row of a weight) and its column there.
//
// Weights in int8 are rounded by 16 bits, half a hash each, because an update of a hundredth of a step has to count.
// Activations and gradients are rounded by 8 bits, a quarter of a hash each: to the nearest 256th of a step first, so that
// so few bits leave no bias (Fitzgibbon and Felix, arXiv 2504.20634), and then up or down.
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

// The hashes of a row are those of numbers from its place on.
template <typename Bits>
TORCH_ODT_INLINE Bits hash(Bits number, uint32_t key) {
  return mixed(number * kGolden + key);
}

// Of 16 bits: which hash a column's is in, counted from the row's place on, and whether it is the upper half.
TORCH_ODT_INLINE int64_t half_hash_of(int64_t column) {
  return column / 32 * 16 + column % 16;
}

TORCH_ODT_INLINE bool takes_upper_half(int64_t column) {
  return column % 32 >= 16;
}

// A draw of 16 bits is a fraction.
inline constexpr float kHalfUnit = 0x1p-16F;

// Of 8 bits: the hashes of 64 columns, and where in which of them a column's byte is. The order is what comes out when
// vectors of 16 columns are narrowed to 16 bits, two and two.
inline constexpr int64_t kByteColumns = 64;
inline constexpr int64_t kByteHashes = 16;

TORCH_ODT_INLINE int64_t byte_hash_of(int64_t column) {
  return column / kByteColumns * kByteHashes + column % 16 / 4 * 4 + column / 16 % 2 * 2 + column % 4 / 2;
}

TORCH_ODT_INLINE int byte_shift_of(int64_t column) {
  return static_cast<int>(column % 2 * 16 + column / 32 % 2 * 8);
}

// A draw of 8 bits is a number of 256ths.
inline constexpr float kByteSteps = 256;

TORCH_ODT_INLINE uint32_t byte_draw(uint32_t key, int64_t place, int64_t column) {
  return hash(static_cast<uint32_t>(place + byte_hash_of(column)), key) >> byte_shift_of(column) & 0xffU;
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
