#include "bernoulli.h"

#include <algorithm>
#include <cmath>

#include "bits.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

constexpr int64_t kDistance = 397;
constexpr int64_t kRest = kTwisterWords - kDistance;
constexpr int kUniformBits = 53;
// Numbers that are drawn before they are packed: what they take stays in the first-level cache.
constexpr int64_t kPart = 512;

TORCH_ODT_INLINE uint32_t twisted(uint32_t word, uint32_t next) {
  const uint32_t mixed = (word & 0x80000000U) | (next & 0x7fffffffU);
  return (mixed >> 1) ^ ((0U - (next & 1U)) & 0x9908b0dfU);
}

TORCH_ODT_INLINE uint32_t tempered(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680U;
  word ^= (word << 15) & 0xefc60000U;
  return word ^ (word >> 18);
}

TORCH_ODT_INLINE void renew(uint32_t* words) {
  for (int64_t i = 0; i < kRest; ++i) {
    words[i] = words[i + kDistance] ^ twisted(words[i], words[i + 1]);
  }
  for (int64_t i = kRest; i < kTwisterWords - 1; ++i) {
    words[i] = words[i - kRest] ^ twisted(words[i], words[i + 1]);
  }
  words[kTwisterWords - 1] = words[kDistance - 1] ^ twisted(words[kTwisterWords - 1], words[0]);
}

TORCH_ODT_INLINE void give_out(Twister* twister, int64_t count, uint32_t* target) {
  while (count > 0) {
    if (twister->used == kTwisterWords) {
      renew(twister->words);
      twister->used = 0;
    }
    const int64_t taken = std::min(count, kTwisterWords - twister->used);
    const uint32_t* const words = twister->words + twister->used;
    for (int64_t i = 0; i < taken; ++i) {
      target[i] = tempered(words[i]);
    }
    twister->used += taken;
    target += taken;
    count -= taken;
  }
}

// `limit` is the probability in units of the numbers: comparing integers gives what comparing their quotients would.
TORCH_ODT_INLINE void draw(Twister* twister, int64_t limit, int64_t count, uint8_t* packed) {
  constexpr auto kMask = (int64_t{1} << kUniformBits) - 1;
  uint32_t words[2 * kPart];
  uint8_t mask[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t length = std::min(kPart, count - first);
    give_out(twister, 2 * length, words);
    for (int64_t i = 0; i < length; ++i) {
      const auto number = static_cast<int64_t>((static_cast<uint64_t>(words[2 * i]) << 32) | words[2 * i + 1]);
      mask[i] = (number & kMask) < limit ? 1 : 0;
    }
    pack_bits(mask, length, packed + first / 8);
  }
}

} // namespace

void draw_bits(Twister& twister, double probability, int64_t count, uint8_t* packed) {
  const auto limit = static_cast<int64_t>(std::ceil(std::ldexp(probability, kUniformBits)));
  run<draw>(&twister, limit, count, packed);
}

} // namespace torch_odt::kernels
