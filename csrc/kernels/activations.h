// Activation functions as kernels take them: objects with a value and a gradient, chosen once for a whole tensor.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "exponential.h"
#include "isa.h"
#include "storage.h"

namespace torch_odt::kernels {

// What a clamp lets through: everything, what is above 0 (ReLU), what is between 0 and 6 (ReLU6).
template <typename Parameter>
struct Bounds {
  Parameter low;
  Parameter high;
};

// The largest number that is stored as the bound or less; the bound is a value of the storage's type.
template <typename Storage, typename Parameter>
Parameter last_stored_within(Parameter bound) {
  if constexpr (std::is_same_v<Storage, Parameter>) {
    return bound;
  } else {
    // A step up is stored as the bound again, or as 0 where that is -0: what follows it has the next bits.
    Storage next;
    store(std::nextafter(bound, std::numeric_limits<Parameter>::infinity()), next);
    next.bits = static_cast<uint16_t>(bound < 0 ? next.bits - 1 : next.bits + 1);
    const Parameter middle = bound + (load(next) - bound) / 2;
    return rounded<Storage>(middle) <= bound ? middle : std::nextafter(middle, bound);
  }
}

// Where a gradient ends: at a bound and beyond it, once the output is stored. An infinite bound is none, not even for
// an infinite output, and NaNs are passed; comparing with a NaN says both.
template <typename Storage, typename Parameter>
Bounds<Parameter> borders(const Bounds<Parameter>& bounds) {
  constexpr Parameter kNone = std::numeric_limits<Parameter>::quiet_NaN();
  return {
      std::isinf(bounds.low) ? kNone : last_stored_within<Storage>(bounds.low),
      std::isinf(bounds.high) ? kNone : -last_stored_within<Storage>(-bounds.high)};
}

// ReLU, ReLU6, hardtanh; infinite bounds are no activation function. The bounds are values of the storage's type.
template <typename Storage, typename Parameter>
class Clamp {
 public:
  explicit Clamp(const Bounds<Parameter>& bounds) : bounds_(bounds), borders_(borders<Storage>(bounds)) {}

  TORCH_ODT_INLINE Parameter value(Parameter input) const {
    const Parameter above = input < bounds_.low ? bounds_.low : input;
    return above > bounds_.high ? bounds_.high : above;
  }
  // Of an input that is not yet rounded to the storage's type, or, which is the same, of the stored value.
  TORCH_ODT_INLINE Parameter gradient(Parameter gradient, Parameter input) const {
    // Out of bits and not of branches, which keep compilers from using vectors. An infinite gradient becomes 0 too.
    using Bits = std::conditional_t<sizeof(Parameter) == 4, uint32_t, uint64_t>;
    const Bits ends = Bits{input <= borders_.low} | Bits{input >= borders_.high};
    return std::bit_cast<Parameter>(std::bit_cast<Bits>(gradient) & (ends - 1));
  }

 private:
  Bounds<Parameter> bounds_;
  Bounds<Parameter> borders_;
};

// x * min(max(x + 3, 0), 6) / 6
struct Hardswish {
  template <typename Parameter>
  TORCH_ODT_INLINE Parameter value(Parameter input) const {
    const Parameter above = input + 3 < 0 ? Parameter{0} : input + 3;
    return input * ((above > 6 ? Parameter{6} : above) * (Parameter{1} / 6));
  }
  template <typename Parameter>
  TORCH_ODT_INLINE Parameter gradient(Parameter gradient, Parameter input) const {
    const Parameter inside = gradient * (input * (Parameter{1} / 3) + Parameter{0.5});
    const Parameter passed = input >= 3 ? gradient : inside;
    return input <= -3 ? Parameter{0} : passed;
  }
};

// x / (1 + e^-x), and so e^x * x / (1 + e^x): of the two exponentials the one that is at most 1.
struct Silu {
  template <typename Parameter>
  TORCH_ODT_INLINE Parameter value(Parameter input) const {
    const Parameter power = exponential(-std::abs(input));
    return input * (input < 0 ? power : Parameter{1}) / (1 + power);
  }
  template <typename Parameter>
  TORCH_ODT_INLINE Parameter gradient(Parameter gradient, Parameter input) const {
    const Parameter power = exponential(-std::abs(input));
    const Parameter logistic = (input < 0 ? power : Parameter{1}) / (1 + power);
    return gradient * logistic * (1 + input * (1 - logistic));
  }
};

} // namespace torch_odt::kernels

// Instantiates for every type of storage, its type of parameters, and every activation function.
#define TORCH_ODT_FOR_ACTIVATIONS(instantiate)         \
  instantiate(float, float, Clamp<float, float>)       \
  instantiate(double, double, Clamp<double, double>)   \
  instantiate(BFloat16, float, Clamp<BFloat16, float>) \
  instantiate(float, float, Hardswish)                 \
  instantiate(double, double, Hardswish)               \
  instantiate(BFloat16, float, Hardswish)              \
  instantiate(float, float, Silu)                      \
  instantiate(double, double, Silu)                    \
  instantiate(BFloat16, float, Silu)
