#include "descent.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "descent_avx512.h"
#include "lanes.h"
#include "memory.h"
#include "widened.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows that a thread takes at a time.
constexpr int64_t kGrainRows = 16;

// The largest absolute value as bits, which are ordered as their numbers are; NaN is above all of them.
template <int kBytes>
struct Largest {
  using L = Lanes<kBytes>;
  using Ints = typename L::Ints;

  TORCH_ODT_INLINE static void run(const float* values, int64_t count, int32_t* result) {
    Ints largest = {};
    int64_t i = 0;
    for (; i + L::kCount <= count; i += L::kCount) {
      const Ints magnitude = L::template load<Ints>(values + i) & 0x7fffffff;
      largest = largest < magnitude ? magnitude : largest;
    }
    for (int lane = 0; lane < L::kCount; ++lane) {
      *result = std::max(*result, largest[lane]);
    }
    for (; i < count; ++i) {
      *result = std::max(*result, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
    }
  }
};

bool stays_finite(const Descent& how, const Threads& threads) {
  std::atomic<bool> is_finite = true;
  threads.share(divided(how.rows, kGrainRows), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin * kGrainRows; row < std::min(end * kGrainRows, how.rows); ++row) {
      int32_t largest = 0;
      run_with_vectors<Largest>(how.gradients + row * how.columns, how.columns, &largest);
      const float step = std::bit_cast<float>(largest) * std::abs(how.rates[row]);
      if (!descent_stays_finite(step, how.shrink)) {
        is_finite = false;
      }
    }
  });
  return is_finite;
}

template <int kBytes>
struct Body {
  using L = Lanes<kBytes>;
  using Floats = typename L::Floats;
  using Ints = typename L::Ints;
  using Narrow = typename Vectors<kBytes>::Narrow;

  // Some lanes of memory as a whole vector, with zeros behind them.
  template <typename Vector, typename T>
  TORCH_ODT_INLINE static Vector some(const T* from, int64_t lanes) {
    Vector result = {};
    __builtin_memcpy(&result, from, static_cast<unsigned long>(lanes) * sizeof(T));
    return result;
  }

  template <bool kAll>
  TORCH_ODT_INLINE static void
  lanes(const DescentPart& how, float rate, int8_t* to, const float* from, int64_t count, Floats drawn, Ints& clamped) {
    const Narrow weights = kAll ? L::template load<Narrow>(to) : some<Narrow>(to, count);
    const Floats gradients = kAll ? L::template load<Floats>(from) : some<Floats>(from, count);
    const Floats before = widened<kBytes>(weights);
    const Floats taken = L::product(gradients, Floats{} + rate) + L::product(before, Floats{} + how.shrink);
    const Floats after = before - taken;
    // Not exact beyond 2^22, where everything is clamped.
    const Floats whole = L::floor_of(after + drawn);
    const Floats inside = L::between(whole, Floats{} - 127.0F, Floats{} + 127.0F);
    clamped -= whole != inside;
    store_lanes(L::narrowed(__builtin_convertvector(inside, Ints)), kAll ? L::kCount : count, to);
  }

  TORCH_ODT_INLINE static void run(DescentPart* of) {
    const DescentPart part = *of;
    constexpr int64_t kCount = L::kCount;
    Keys keys(part.seed);
    Ints clamped = {};
    for (int64_t row = 0; row < part.rows; ++row) {
      const int64_t begins = part.begins + row * part.weights_stride;
      int8_t* const to = part.weights + row * part.weights_stride;
      const float* const from = part.gradients + row * part.gradients_stride;
      const float rate = part.rates[row];
      const uint32_t key = keys.at(begins);
      HalfDraws<kBytes> draws;
      const auto draw = [&](int64_t at) __attribute__((always_inline)) {
        const int64_t column = part.first_column + at;
        return draws.at(key, begins + column, column, at < 16);
      };
      int64_t at = 0;
      for (; at + kCount <= part.columns; at += kCount) {
        lanes<true>(part, rate, to + at, from + at, kCount, draw(at), clamped);
      }
      if (at < part.columns) {
        lanes<false>(part, rate, to + at, from + at, part.columns - at, draw(at), clamped);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      of->clamped += clamped[i];
    }
  }
};

} // namespace

bool descent_stays_finite(float largest_step, float shrink) {
  constexpr float kMostWeight = 127;
  return std::isfinite(kMostWeight + largest_step + std::abs(shrink) * kMostWeight);
}

void descend_part(DescentPart& part) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa() >= Isa::avx512) {
    descend_avx512(part);
    return;
  }
#endif
  run_with_vectors<Body>(&part);
}

Descended descend(const Descent& how, const Threads& threads) {
  if (!stays_finite(how, threads)) {
    return {0, false};
  }
  std::atomic<int64_t> clamped = 0;
  threads.share(divided(how.rows, kGrainRows), [&](int64_t, int64_t begin, int64_t end) {
    const int64_t first = begin * kGrainRows;
    const int64_t place = first * how.columns;
    const int64_t rows = std::min(end * kGrainRows, how.rows) - first;
    DescentPart part{
        how.rates + first, how.shrink, how.seed, how.gradients + place, how.columns, how.weights + place, how.columns,
        rows, how.columns, place, 0, 0};
    descend_part(part);
    clamped += part.clamped;
  });
  return {clamped, true};
}

} // namespace torch_odt::kernels::int8
