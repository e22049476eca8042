// The exponential function, so that compilers can run it with vectors.
#pragma once

#include <bit>
#include <cstdint>

#include "isa.h"

namespace torch_odt::kernels {

// e to the r is 1 + r + r * r * polynomial(r) for r up to half of ln 2 from 0: coefficients from the highest power on.
template <typename Number>
struct ExponentialConstants;

template <>
struct ExponentialConstants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Bits kBias = 127;
  // Its exponent is the one that stands for 0.
  static constexpr float kLow = -88;
  // A number out of which, added to another one, the last bits say that one's integer.
  static constexpr float kShifter = 0x1.8p23f;
  static constexpr float kPerLn2 = 1.44269504088896341f;
  // Their sum is ln 2; the first has so few bits that its product with an exponent is exact.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440054690583e-4f;
  static constexpr float kPolynomial[] = {
      1.3926183587713495e-3f, 8.3631790527225774e-3f, 4.1666554617204574e-2f, 0.16666576989698776f, 0.5f};
};

template <>
struct ExponentialConstants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kLow = -709;
  static constexpr double kShifter = 0x1.8p52;
  static constexpr double kPerLn2 = 1.44269504088896340736;
  static constexpr double kLn2High = 6.93145751953125e-1;
  static constexpr double kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kPolynomial[] = {
      2.5100385495510319066e-8,
      2.7620088445409748146e-7,
      2.7557268459997064772e-6,
      2.4801521295954375131e-5,
      1.9841269863053616878e-4,
      1.3888888917213716901e-3,
      8.3333333333300618325e-3,
      4.1666666666624127873e-2,
      0.16666666666666667453,
      0.50000000000000010221};
};

// Of a number that is not positive: within two units in the last place, or 0 where that is about the smallest normal
// number. A NaN stays one.
template <typename Number>
TORCH_ODT_INLINE Number exponential(Number number) {
  using Constants = ExponentialConstants<Number>;
  using Bits = typename Constants::Bits;
  const Number x = number < Constants::kLow ? Constants::kLow : number;
  const Number shifted = x * Constants::kPerLn2 + Constants::kShifter;
  const Number exponent = shifted - Constants::kShifter;
  const Number rest = x - exponent * Constants::kLn2High - exponent * Constants::kLn2Low;
  Number polynomial = 0;
#pragma GCC unroll 16
  for (const Number coefficient : Constants::kPolynomial) {
    polynomial = polynomial * rest + coefficient;
  }
  const Number fraction = polynomial * rest * rest + rest + 1;
  const Bits power = (std::bit_cast<Bits>(shifted) + Constants::kBias) << Constants::kMantissaBits;
  return fraction * std::bit_cast<Number>(power);
}

} // namespace torch_odt::kernels
