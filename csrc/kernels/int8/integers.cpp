#include "integers.h"

#include <algorithm>
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

} // namespace

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
