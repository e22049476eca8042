#include "bits.h"

#include <bit>
#include <cstring>

namespace torch_odt::kernels {

namespace {

constexpr bool kFirstByteIsLowest = std::endian::native == std::endian::little;

// The product moves byte i's lowest bit to bit i of the highest byte; no two of its terms meet.
uint8_t pack_eight(const uint8_t* mask) {
  uint64_t bytes;
  std::memcpy(&bytes, mask, sizeof(bytes));
  return static_cast<uint8_t>((bytes * 0x0102040810204080) >> 56);
}

// Byte i keeps bit i; adding 0x7f carries it, wherever it is, into the byte's highest bit.
void unpack_eight(uint8_t packed, uint8_t* mask) {
  const uint64_t selected = (packed * 0x0101010101010101U) & 0x8040201008040201;
  const uint64_t bytes = ((selected + 0x7f7f7f7f7f7f7f7f) >> 7) & 0x0101010101010101;
  std::memcpy(mask, &bytes, sizeof(bytes));
}

uint8_t bit_at(const uint8_t* packed, int64_t index) {
  return (packed[index / 8] >> (index % 8)) & 1;
}

} // namespace

void pack_bits(const uint8_t* mask, int64_t count, uint8_t* packed) {
  int64_t index = 0;
  if constexpr (kFirstByteIsLowest) {
    for (; index + 8 <= count; index += 8) {
      packed[index / 8] = pack_eight(mask + index);
    }
  }
  for (; index < count; ++index) {
    const auto bit = static_cast<uint8_t>(mask[index] << (index % 8));
    packed[index / 8] = index % 8 == 0 ? bit : packed[index / 8] | bit;
  }
}

void unpack_bits(const uint8_t* packed, int64_t first, int64_t count, uint8_t* mask) {
  int64_t index = 0;
  if constexpr (kFirstByteIsLowest) {
    for (; index < count && (first + index) % 8 != 0; ++index) {
      mask[index] = bit_at(packed, first + index);
    }
    for (; index + 8 <= count; index += 8) {
      unpack_eight(packed[(first + index) / 8], mask + index);
    }
  }
  for (; index < count; ++index) {
    mask[index] = bit_at(packed, first + index);
  }
}

} // namespace torch_odt::kernels
