// Bernoulli draws as bits, against the standard library's Mersenne Twister.

#include <cstdint>
#include <random>
#include <vector>

#include "../../kernels/bernoulli.h"
#include "../../kernels/bits.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

constexpr uint32_t kSeed = 5489;

// As std::mt19937 fills its words from a seed.
kernels::Twister seeded() {
  kernels::Twister twister{};
  twister.words[0] = kSeed;
  for (uint32_t i = 1; i < kernels::kTwisterWords; ++i) {
    const uint32_t previous = twister.words[i - 1];
    twister.words[i] = 1812433253U * (previous ^ (previous >> 30)) + i;
  }
  twister.used = kernels::kTwisterWords;
  return twister;
}

bool next(std::mt19937& twister, double probability) {
  const uint64_t high = twister();
  const uint64_t number = ((high << 32) | twister()) & ((uint64_t{1} << 53) - 1);
  return static_cast<double>(number) / 9007199254740992.0 < probability;
}

TEST(bits_are_those_of_the_standard_twister) {
  for (const double probability : {0.0, 1e-9, 0.3, 0.9, 1.0}) {
    std::mt19937 reference(kSeed);
    kernels::Twister twister = seeded();
    // Together they lie across several renewals of the twister's words, and the parts in which bits are packed.
    for (const int64_t count : {1, 7, 8, 300, 511, 512, 513, 5000}) {
      std::vector<uint8_t> packed(static_cast<size_t>(kernels::packed_bytes(count)) + 1, 0xa5);
      kernels::draw_bits(twister, probability, count, packed.data());
      for (int64_t index = 0; index < 8 * kernels::packed_bytes(count); ++index) {
        const bool found = (packed[static_cast<size_t>(index / 8)] >> (index % 8)) & 1;
        CHECK_EQUAL(found, index < count && next(reference, probability));
      }
      CHECK_EQUAL(static_cast<int>(packed.back()), 0xa5);
    }
  }
}

} // namespace
} // namespace torch_odt::tests
