#include "bits.h"

#include <bit>
#include <cstring>

#include "isa.h"

namespace torch_odt::kernels {

namespace {

constexpr bool kFirstByteIsLowest = std::endian::native == std::endian::little;

// Byte i's lowest bit moves to bit i of the lowest byte. A product would move all of them at once, but few instruction
// sets can multiply vectors of so wide numbers.
TORCH_ODT_INLINE uint8_t pack_eight(const uint8_t* mask) {
  uint64_t bytes;
  std::memcpy(&bytes, mask, sizeof(bytes));
  bytes |= bytes >> 7;
  bytes |= bytes >> 14;
  bytes |= bytes >> 28;
  return static_cast<uint8_t>(bytes);
}

// Byte i keeps bit i; adding 0x7f carries it, wherever it is, into the byte's highest bit.
TORCH_ODT_INLINE void unpack_eight(uint8_t packed, uint8_t* mask) {
  const uint64_t selected = (packed * 0x0101010101010101U) & 0x8040201008040201;
  const uint64_t bytes = ((selected + 0x7f7f7f7f7f7f7f7f) >> 7) & 0x0101010101010101;
  std::memcpy(mask, &bytes, sizeof(bytes));
}

TORCH_ODT_INLINE uint8_t bit_at(const uint8_t* packed, int64_t index) {
  return (packed[index / 8] >> (index % 8)) & 1;
}

TORCH_ODT_INLINE void pack(const uint8_t* __restrict mask, int64_t count, uint8_t* __restrict packed) {
  const int64_t whole = kFirstByteIsLowest ? count / 8 : 0;
  for (int64_t byte = 0; byte < whole; ++byte) {
    packed[byte] = pack_eight(mask + 8 * byte);
  }
  for (int64_t index = 8 * whole; index < count; ++index) {
    const auto bit = static_cast<uint8_t>(mask[index] << (index % 8));
    packed[index / 8] = index % 8 == 0 ? bit : packed[index / 8] | bit;
  }
}

TORCH_ODT_INLINE void unpack(
    const uint8_t* __restrict packed, int64_t first, int64_t count, uint8_t* __restrict mask) {
  int64_t index = 0;
  if constexpr (kFirstByteIsLowest) {
    for (; index < count && (first + index) % 8 != 0; ++index) {
      mask[index] = bit_at(packed, first + index);
    }
    const uint8_t* const bytes = packed + (first + index) / 8;
    const int64_t whole = (count - index) / 8;
    for (int64_t byte = 0; byte < whole; ++byte) {
      unpack_eight(bytes[byte], mask + index + 8 * byte);
    }
    index += 8 * whole;
  }
  for (; index < count; ++index) {
    mask[index] = bit_at(packed, first + index);
  }
}

} // namespace

void pack_bits(const uint8_t* mask, int64_t count, uint8_t* packed) {
  run<pack>(mask, count, packed);
}

void unpack_bits(const uint8_t* packed, int64_t first, int64_t count, uint8_t* mask) {
  run<unpack>(packed, first, count, mask);
}

} // namespace torch_odt::kernels
