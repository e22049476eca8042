// Masks as bits: every run of a packed mask comes back, and nothing beside it is touched.

#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/bits.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

std::vector<uint8_t> random_mask(int64_t count) {
  std::vector<uint8_t> mask(static_cast<size_t>(count));
  uint32_t state = 12345;
  for (auto& element : mask) {
    state = state * 1664525 + 1013904223;
    element = static_cast<uint8_t>(state >> 31);
  }
  return mask;
}

std::vector<uint8_t> packed_mask(const std::vector<uint8_t>& mask) {
  const auto count = static_cast<int64_t>(mask.size());
  std::vector<uint8_t> bits(static_cast<size_t>(kernels::packed_bytes(count)), 0xff);
  kernels::pack_bits(mask.data(), count, bits.data());
  return bits;
}

TEST(bits_lie_from_the_lowest_up_and_the_rest_of_the_last_byte_is_zero) {
  const std::vector<uint8_t> bits = packed_mask({1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1});
  CHECK_EQUAL(bits.size(), size_t{2});
  CHECK_EQUAL(static_cast<int>(bits[0]), 0b10001101);
  CHECK_EQUAL(static_cast<int>(bits[1]), 0b00000110);
}

void check_run(const std::vector<uint8_t>& mask, const std::vector<uint8_t>& bits, int64_t first, int64_t length) {
  std::vector<uint8_t> found(static_cast<size_t>(length) + 1, 7);
  kernels::unpack_bits(bits.data(), first, length, found.data());
  for (int64_t index = 0; index < length; ++index) {
    CHECK_EQUAL(
        static_cast<int>(found[static_cast<size_t>(index)]),
        static_cast<int>(mask[static_cast<size_t>(first + index)]));
  }
  CHECK_EQUAL(static_cast<int>(found.back()), 7);
}

TEST(every_run_of_a_packed_mask_comes_back) {
  for (const int64_t count : {1, 7, 8, 9, 40}) {
    const std::vector<uint8_t> mask = random_mask(count);
    const std::vector<uint8_t> bits = packed_mask(mask);
    for (int64_t first = 0; first <= count; ++first) {
      for (int64_t length = 0; first + length <= count; ++length) {
        check_run(mask, bits, first, length);
      }
    }
  }
}

// Several vectors of bytes of bits, and what is left behind them.
TEST(long_masks_come_back) {
  for (const int64_t count : {511, 512, 513, 1024, 3000}) {
    const Context here("count " + std::to_string(count));
    const std::vector<uint8_t> mask = random_mask(count);
    const std::vector<uint8_t> bits = packed_mask(mask);
    for (int64_t index = 0; index < count; ++index) {
      CHECK_EQUAL((bits[static_cast<size_t>(index / 8)] >> (index % 8)) & 1, mask[static_cast<size_t>(index)]);
    }
    for (const int64_t first : {0, 1, 8, 13}) {
      for (const int64_t last : {0, 1, 8, 13}) {
        check_run(mask, bits, first, count - first - last);
      }
    }
  }
}

} // namespace
} // namespace torch_odt::tests
