// Masks as bits: eight elements a byte, the first in the lowest bit.
#pragma once

#include <cstdint>

namespace torch_odt::kernels {

// Bytes that `count` bits take.
constexpr int64_t packed_bytes(int64_t count) {
  return (count + 7) / 8;
}

// mask holds zeros and ones. The bits behind the last element are 0.
void pack_bits(const uint8_t* mask, int64_t count, uint8_t* packed);

// The elements from `first` on, as zeros and ones.
void unpack_bits(const uint8_t* packed, int64_t first, int64_t count, uint8_t* mask);

} // namespace torch_odt::kernels
