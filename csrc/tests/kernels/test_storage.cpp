// bfloat16 in memory: every number survives loading and storing, and what lies between two goes to the nearest.

#include <bit>
#include <cmath>

#include "samples.h"

namespace torch_odt::tests {
namespace {

BFloat16 of_bits(uint32_t bits) {
  return {static_cast<uint16_t>(bits)};
}

constexpr uint32_t kInfinityBits = 0x7F80;
constexpr uint32_t kSign = 0x8000;

TEST(every_bfloat16_is_stored_as_itself) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = kernels::load(of_bits(bits));
    BFloat16 place;
    kernels::store(value, place);
    if (std::isnan(value)) {
      CHECK(std::isnan(kernels::load(place)));
    } else {
      CHECK_EQUAL(place.bits, bits);
    }
  }
}

TEST(a_float_is_stored_as_the_nearest_bfloat16_and_a_tie_as_the_even_one) {
  for (const uint32_t sign : {0u, kSign}) {
    for (uint32_t bits = 0; bits < kInfinityBits; ++bits) {
      const float middle = std::bit_cast<float>((sign | bits) << 16 | 0x8000u);
      const float direction = sign == 0 ? INFINITY : -INFINITY;
      CHECK_EQUAL(stored<BFloat16>(middle).bits, sign | (bits + (bits & 1)));
      CHECK_EQUAL(stored<BFloat16>(std::nextafter(middle, -direction)).bits, sign | bits);
      CHECK_EQUAL(stored<BFloat16>(std::nextafter(middle, direction)).bits, sign | (bits + 1));
    }
  }
}

TEST(no_nan_becomes_an_infinity) {
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FC00000u}) {
    BFloat16 place;
    kernels::store(std::bit_cast<float>(bits), place);
    CHECK(std::isnan(kernels::load(place)));
  }
}

} // namespace
} // namespace torch_odt::tests
