// Vectors of 16, 32 or 64 bytes, and the arithmetic that rounds them to int8: whatever their size, the same bits.
#pragma once

#include <cstdint>

#include "draws.h"
#include "shuffle.h"

namespace torch_odt::kernels::int8 {

// Vectors of each size, written out: GCC forgets what a vector's size is where it is a template's argument.
template <int kBytes>
struct Vectors;
#define TORCH_ODT_VECTORS(bytes)                                   \
  template <>                                                      \
  struct Vectors<bytes> {                                          \
    typedef float Floats __attribute__((vector_size(bytes)));      \
    typedef int32_t Ints __attribute__((vector_size(bytes)));      \
    typedef uint32_t Bits __attribute__((vector_size(bytes)));     \
    typedef int16_t Half __attribute__((vector_size((bytes) / 2)));  \
    typedef int8_t Narrow __attribute__((vector_size((bytes) / 4))); \
  };
TORCH_ODT_VECTORS(16)
TORCH_ODT_VECTORS(32)
TORCH_ODT_VECTORS(64)
#undef TORCH_ODT_VECTORS

// The arithmetic of as many columns as a vector holds.
template <int kBytes>
struct Lanes {
  using Floats = typename Vectors<kBytes>::Floats;
  using Ints = typename Vectors<kBytes>::Ints;
  using Bits = typename Vectors<kBytes>::Bits;
  using Halves = typename Vectors<kBytes>::Half;
  static constexpr int64_t kCount = kBytes / 4;

  template <typename Vector, typename T>
  TORCH_ODT_INLINE static Vector load(const T* from) {
    Vector result;
    __builtin_memcpy(&result, from, sizeof(result));
    return result;
  }

  TORCH_ODT_INLINE static Ints numbers() {
    Ints result;
    for (int i = 0; i < kCount; ++i) {
      result[i] = i;
    }
    return result;
  }

  template <typename Vector>
  TORCH_ODT_INLINE static Vector between(Vector value, Vector low, Vector high) {
    value = low > value ? low : value;
    return high < value ? high : value;
  }

  // Keeps a product from becoming part of a fused multiply-add, which some sets have: all get the same bits.
  TORCH_ODT_INLINE static Floats product(Floats a, Floats b) {
    Floats result = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(result));
#elif defined(__aarch64__)
    asm("" : "+w"(result));
#endif
    return result;
  }

  // bfloat16 as it lies in memory: to the nearest, ties to even. Not of NaN.
  TORCH_ODT_INLINE static Halves to_bfloat16(Floats values) {
    const Bits bits = (Bits)values;
    return __builtin_convertvector((Ints)((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16), Halves);
  }

  TORCH_ODT_INLINE static Floats from_bfloat16(Halves halves) {
    return (Floats)((Bits)__builtin_convertvector(halves, Ints) << 16);
  }

  TORCH_ODT_INLINE static typename Vectors<kBytes>::Narrow narrowed(Ints values) {
    if constexpr (kBytes == 64) {
      return __builtin_convertvector(values, typename Vectors<kBytes>::Narrow);
    } else {
      const auto half = __builtin_convertvector(values, Halves);
      return __builtin_convertvector(half, typename Vectors<kBytes>::Narrow);
    }
  }

  // To even where two integers are as near.
  TORCH_ODT_INLINE static Floats nearest(Floats value) {
    constexpr float kShift = 12582912.0F; // 1.5 * 2^23: what is added to it loses its fraction
    return (value + kShift) - kShift;
  }

  TORCH_ODT_INLINE static Floats floor_of(Floats value) {
    const Floats near = nearest(value);
    return near > value ? near - 1.0F : near;
  }

  // Up or down to a whole number by draws of 8 bits.
  TORCH_ODT_INLINE static Floats by_chance(Floats value, Floats draws) {
    return floor_by_draws(value * kByteSteps, draws);
  }

  // The same of a number of steps.
  TORCH_ODT_INLINE static Floats floor_by_draws(Floats steps, Floats draws) {
    return floor_of((nearest(steps) + draws) * (1 / kByteSteps));
  }

  TORCH_ODT_INLINE static Bits hashes(uint32_t key, int64_t first) {
    const Bits steps = (Bits)numbers() * kGolden;
    return mixed(steps + (static_cast<uint32_t>(first) * kGolden + key));
  }

  // NITI (arXiv 2009.13108), section 3.3: of the bits that a shift loses, the lower half is the random number that says
  // whether the upper half rounds.
  TORCH_ODT_INLINE static Ints shifted(Ints sums, int64_t shift) {
    const auto half = static_cast<int32_t>(shift / 2);
    const auto whole = static_cast<int32_t>(shift);
    const Bits magnitude = (Bits)(sums < 0 ? -sums : sums);
    const Bits lost = magnitude & ((1U << whole) - 1);
    const Bits upper = lost >> half;
    const Bits random = (lost & ((1U << half) - 1)) << (whole - 2 * half);
    const Ints rounded = (Ints)((magnitude >> whole) - (Bits)(upper > random));
    return sums < 0 ? -rounded : rounded;
  }
};

template <typename T, typename Vector>
TORCH_ODT_INLINE void store_lanes(const Vector& values, int64_t lanes, T* to) {
  constexpr auto kAll = static_cast<int64_t>(sizeof(values) / sizeof(T));
  if (lanes == kAll) {
    __builtin_memcpy(to, &values, sizeof(values));
    return;
  }
  // Pieces whose sizes compilers know.
  T some[kAll];
  __builtin_memcpy(some, &values, sizeof(values));
  const T* from = some;
  for (int64_t piece = kAll / 2; piece > 0; piece /= 2) {
    if ((lanes & piece) != 0) {
      __builtin_memcpy(to, from, static_cast<size_t>(piece) * sizeof(T));
      from += piece;
      to += piece;
    }
  }
}

// What is drawn for a row's columns by 16 bits; they come one after another, the lower halves' 16 before the upper halves'.
template <int kBytes>
struct HalfDraws {
  using L = Lanes<kBytes>;

  typename L::Bits hashes[16 / L::kCount] = {};

  // Numbers from 0 up to but without 1, for lanes from `column` of the row on, which is `index` of the result; `begins`
  // says whether these are among the first 16 that are asked for.
  TORCH_ODT_INLINE typename L::Floats at(uint32_t key, int64_t index, int64_t column, bool begins) {
    const bool upper = takes_upper_half(column);
    typename L::Bits& bits = hashes[column % 16 / L::kCount];
    if (!upper || begins) {
      bits = L::hashes(key, index - column + half_hash_of(column));
    }
    const typename L::Bits half = upper ? bits >> 16 : bits & 0xffffU;
    return __builtin_convertvector((typename L::Ints)half, typename L::Floats) * kHalfUnit;
  }
};

// What is drawn by 8 bits, with the hashes of the 64 columns that were asked for last.
template <int kBytes>
struct ByteDraws {
  using L = Lanes<kBytes>;
  using Bits = typename L::Bits;

  Bits hashes[kByteHashes / L::kCount] = {};
  int64_t first = -1; // which number they are of

  // Whole numbers below 256, for lanes from `column` of the row on, which is `index` of the result.
  TORCH_ODT_INLINE typename L::Floats at(uint32_t key, int64_t index, int64_t column) {
    const int64_t place = index - column;
    Bits draws;
    if (column % L::kCount != 0) {
      for (int i = 0; i < L::kCount; ++i) {
        draws[i] = byte_draw(key, place, column + i);
      }
    } else {
      const int64_t wanted = place + column / kByteColumns * kByteHashes;
      if (wanted != first) {
        first = wanted;
        for (int64_t i = 0; i < kByteHashes / L::kCount; ++i) {
          hashes[i] = L::hashes(key, first + i * L::kCount);
        }
      }
      const Bits bits = hashes[column % 16 / L::kCount];
      draws = (column / 16 % 2 == 0 ? lower_pairs(bits) : upper_pairs(bits)) >> shifts(column) & 0xffU;
    }
    return __builtin_convertvector((typename L::Ints)draws, typename L::Floats);
  }

 private:
  TORCH_ODT_INLINE static Bits shifts(int64_t column) {
    return ((Bits)L::numbers() & 1U) * 16U + static_cast<uint32_t>(column / 32 % 2 * 8);
  }

  // Of each four hashes the first two, each twice; or the last two.
  TORCH_ODT_INLINE static Bits lower_pairs(Bits bits) {
    if constexpr (L::kCount == 4) {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 0, 0, 1, 1);
    } else if constexpr (L::kCount == 8) {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 0, 0, 1, 1, 4, 4, 5, 5);
    } else {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
    }
  }
  TORCH_ODT_INLINE static Bits upper_pairs(Bits bits) {
    if constexpr (L::kCount == 4) {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 2, 2, 3, 3);
    } else if constexpr (L::kCount == 8) {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 2, 2, 3, 3, 6, 6, 7, 7);
    } else {
      return TORCH_ODT_SHUFFLE(Bits, bits, bits, 2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    }
  }
};

// NITI's rounding, as Lanes has it, of a sum that int32 does not hold, up to what any clamp to int8 keeps apart.
TORCH_ODT_INLINE int32_t shifted(int64_t sum, int64_t shift) {
  constexpr int64_t kMost = 1 << 22;
  const auto magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const uint64_t lost = magnitude & ((uint64_t{1} << shift) - 1);
  const int64_t half = shift / 2;
  const uint64_t random = (lost & ((uint64_t{1} << half) - 1)) << (shift - 2 * half);
  const auto rounded = static_cast<int64_t>((magnitude >> shift) + (lost >> half > random ? 1 : 0));
  const auto most = static_cast<int32_t>(rounded < kMost ? rounded : kMost);
  return sum < 0 ? -most : most;
}

} // namespace torch_odt::kernels::int8
