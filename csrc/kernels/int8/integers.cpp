#include "integers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace torch_odt::kernels::int8 {

namespace {

template <Rounding kRounding>
struct Shift {
  template <int kBytes>
  struct Body {
    using L = Lanes<kBytes>;
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;

    TORCH_ODT_INLINE static Ints rounded(Ints sums, int64_t shift, float factor) {
      if constexpr (kRounding == Rounding::nearest) {
        const Floats whole = L::nearest(__builtin_convertvector(sums, Floats) * factor);
        return __builtin_convertvector(L::between(whole, Floats{} - 127.0F, Floats{} + 127.0F), Ints);
      } else {
        return L::between(L::shifted(sums, shift), Ints{} - 127, Ints{} + 127);
      }
    }

    TORCH_ODT_INLINE static void run(const int32_t* sums, int64_t count, int64_t shift, float factor, int8_t* output) {
      int64_t i = 0;
      for (; i + L::kCount <= count; i += L::kCount) {
        store_lanes(L::narrowed(rounded(L::template load<Ints>(sums + i), shift, factor)), L::kCount, output + i);
      }
      if (i < count) {
        int32_t some[L::kCount] = {};
        std::memcpy(some, sums + i, static_cast<size_t>(count - i) * sizeof(int32_t));
        store_lanes(L::narrowed(rounded(L::template load<Ints>(some), shift, factor)), count - i, output + i);
      }
    }
  };
};

template <int kBytes>
struct Whole {
  using L = Lanes<kBytes>;
  using Floats = typename L::Floats;
  using Ints = typename L::Ints;

  TORCH_ODT_INLINE static Ints rounded(Floats values, float first, float second) {
    return __builtin_convertvector(L::nearest(values * first * second), Ints);
  }

  TORCH_ODT_INLINE static void run(const float* values, int64_t count, float first, float second, int32_t* whole) {
    int64_t i = 0;
    for (; i + L::kCount <= count; i += L::kCount) {
      const Ints some = rounded(L::template load<Floats>(values + i), first, second);
      __builtin_memcpy(whole + i, &some, sizeof(some));
    }
    if (i < count) {
      float room[L::kCount] = {};
      std::memcpy(room, values + i, static_cast<size_t>(count - i) * sizeof(float));
      const Ints some = rounded(L::template load<Floats>(room), first, second);
      std::memcpy(whole + i, &some, static_cast<size_t>(count - i) * sizeof(int32_t));
    }
  }
};

// Bits of magnitudes have their order, and those of what is not finite come last.
TORCH_ODT_INLINE void magnitude_body(const int32_t* bits, int64_t count, int32_t* largest) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = bits[i] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  *largest = most;
}

TORCH_ODT_INLINE void any_body(const int8_t* steps, int64_t count, uint8_t* any) {
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    bits = static_cast<uint8_t>(bits | static_cast<uint8_t>(steps[i]));
  }
  *any = bits;
}

TORCH_ODT_INLINE void take_body(int8_t* weights, const int8_t* steps, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int16_t wide = static_cast<int16_t>(weights[i] - steps[i]);
    const int16_t raised = wide < -127 ? int16_t{-127} : wide;
    weights[i] = static_cast<int8_t>(raised > 127 ? int16_t{127} : raised);
  }
}

// Bounds are values of int8 that still pass.
TORCH_ODT_INLINE void
keep_body(const int8_t* values, const int8_t* others, int64_t count, int8_t least, int8_t most, int8_t* output) {
  for (int64_t i = 0; i < count; ++i) {
    // All bits or none, by subtraction: compilers keep vectors away from a choice.
    const auto passes = static_cast<int8_t>((others[i] >= least) & (others[i] <= most));
    output[i] = static_cast<int8_t>(values[i] & static_cast<int8_t>(-passes));
  }
}

TORCH_ODT_INLINE void add_body(const int8_t* coarse, const int8_t* fine, int64_t count, int32_t factor, int32_t* sums) {
  for (int64_t i = 0; i < count; ++i) {
    sums[i] = coarse[i] * factor + fine[i];
  }
}

TORCH_ODT_INLINE void
largest_sum_body(const int8_t* coarse, const int8_t* fine, int64_t count, int32_t factor, int32_t* largest) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t sum = coarse[i] * factor + fine[i];
    const int32_t magnitude = sum < 0 ? -sum : sum;
    most = magnitude > most ? magnitude : most;
  }
  *largest = most;
}

TORCH_ODT_INLINE void clip_body(int8_t* numbers, int64_t count, int8_t most, uint8_t* largest) {
  uint8_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int8_t number = numbers[i];
    const auto magnitude = static_cast<uint8_t>(number < 0 ? -number : number);
    found = magnitude > found ? magnitude : found;
    const int8_t raised = number < -most ? static_cast<int8_t>(-most) : number;
    numbers[i] = raised > most ? most : raised;
  }
  *largest = found;
}

} // namespace

void shift_to_int8(const int64_t* sums, int64_t count, int64_t shift, Rounding rounding, int8_t* output) {
  for (int64_t i = 0; i < count; ++i) {
    const float whole = rounding == Rounding::nearest
        ? std::nearbyint(std::ldexp(static_cast<float>(sums[i]), static_cast<int>(-shift)))
        : static_cast<float>(shifted(sums[i], shift));
    output[i] = static_cast<int8_t>(std::clamp(whole, -127.0F, 127.0F));
  }
}

void whole_numbers(const float* values, int64_t count, float first, float second, int32_t* whole) {
  run_with_vectors<Whole>(values, count, first, second, whole);
}

float largest_magnitude(const float* numbers, int64_t count) {
  int32_t largest = 0;
  run<magnitude_body>(reinterpret_cast<const int32_t*>(numbers), count, &largest);
  return std::bit_cast<float>(largest);
}

int64_t largest_magnitude(const int64_t* numbers, int64_t count) {
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::abs(numbers[i]));
  }
  return largest;
}

void add_shifted(const int8_t* coarse, const int8_t* fine, int64_t count, int64_t up, int32_t* sums) {
  run<add_body>(coarse, fine, count, int32_t{1} << up, sums);
}

int32_t largest_sum(const int8_t* coarse, const int8_t* fine, int64_t count, int64_t up) {
  int32_t largest = 0;
  run<largest_sum_body>(coarse, fine, count, int32_t{1} << up, &largest);
  return largest;
}

int64_t clip(int8_t* numbers, int64_t count, int64_t most) {
  uint8_t largest = 0;
  run<clip_body>(numbers, count, static_cast<int8_t>(std::min<int64_t>(most, 127)), &largest);
  return largest;
}

void shift_to_int8(const int32_t* sums, int64_t count, int64_t shift, Rounding rounding, int8_t* output) {
  const float factor = 1.0F / static_cast<float>(int64_t{1} << shift);
  if (rounding == Rounding::nearest) {
    run_with_vectors<Shift<Rounding::nearest>::Body>(sums, count, shift, factor, output);
  } else {
    run_with_vectors<Shift<Rounding::pseudo_stochastic>::Body>(sums, count, shift, factor, output);
  }
}

bool take_off(int8_t* weights, const int8_t* steps, int64_t count) {
  uint8_t any = 0;
  run<any_body>(steps, count, &any);
  if (any != 0) {
    run<take_body>(weights, steps, count);
  }
  return any != 0;
}

void keep_between(
    const int8_t* values, const int8_t* others, int64_t count, int32_t low, int32_t high, int8_t* output) {
  const int32_t least = std::max(low + 1, -128);
  const int32_t most = std::min(high - 1, 127);
  if (least > most) {
    std::memset(output, 0, static_cast<size_t>(count));
    return;
  }
  run<keep_body>(values, others, count, static_cast<int8_t>(least), static_cast<int8_t>(most), output);
}

} // namespace torch_odt::kernels::int8
