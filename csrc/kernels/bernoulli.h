// Bernoulli draws as bits, from the Mersenne Twister of torch's CPU generator and with its arithmetic.
#pragma once

#include <cstdint>

namespace torch_odt::kernels {

constexpr int64_t kTwisterWords = 624;

// MT19937: M. Matsumoto and T. Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998).
struct Twister {
  uint32_t words[kTwisterWords];
  // How many of the words have been given out; all of them in a generator that has just been seeded.
  int64_t used;
};

// Bit i tells whether the i-th number, uniform in [0, 1) with 53 bits, is below `probability`: eight a byte, the first
// in the lowest bit, and 0 behind the last.
void draw_bits(Twister& twister, double probability, int64_t count, uint8_t* packed);

} // namespace torch_odt::kernels
