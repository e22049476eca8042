#include "descent.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

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

// Whether no weight can become infinite or NaN: weights are 127 at most.
bool stays_finite(const Descent& how, const Threads& threads) {
  std::vector<int32_t> largest(static_cast<size_t>(threads.count), 0);
  threads.share(divided(how.rows, kGrainRows), [&](int64_t thread, int64_t begin, int64_t end) {
    const int64_t first = begin * kGrainRows * how.columns;
    const int64_t last = std::min(end * kGrainRows, how.rows) * how.columns;
    run_with_vectors<Largest>(how.gradients + first, last - first, &largest[static_cast<size_t>(thread)]);
  });
  const float most = std::bit_cast<float>(*std::max_element(largest.begin(), largest.end()));
  return std::isfinite(127.0F + std::abs(how.rate) * (most + std::abs(how.decay) * 127.0F));
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
  lanes(const Descent& how, int64_t index, int64_t count, Floats drawn, Ints& clamped) {
    int8_t* const to = how.weights + index;
    const float* const from = how.gradients + index;
    const Narrow weights = kAll ? L::template load<Narrow>(to) : some<Narrow>(to, count);
    const Floats gradients = kAll ? L::template load<Floats>(from) : some<Floats>(from, count);
    const Floats before = widened<kBytes>(weights);
    const Floats slopes = gradients + L::product(before, Floats{} + how.decay);
    const Floats after = before - L::product(slopes, Floats{} + how.rate);
    // Not exact beyond 2^22, where everything is clamped.
    const Floats whole = L::floor_of(after + drawn);
    const Floats inside = L::between(whole, Floats{} - 127.0F, Floats{} + 127.0F);
    clamped -= whole != inside;
    store_lanes(L::narrowed(__builtin_convertvector(inside, Ints)), kAll ? L::kCount : count, to);
  }

  TORCH_ODT_INLINE static void run(DescentPart* of) {
    const DescentPart part = *of;
    const int64_t columns = part.how.columns;
    constexpr int64_t kCount = L::kCount;
    Keys keys(part.how.seed);
    Ints clamped = {};
    for (int64_t row = part.begin; row < part.end; ++row) {
      const int64_t begins = row * columns;
      const uint32_t key = keys.at(begins);
      HalfDraws<kBytes> draws;
      int64_t column = 0;
      for (; column + kCount <= columns; column += kCount) {
        const Floats drawn = draws.at(key, begins + column, column, column < 16);
        lanes<true>(part.how, begins + column, kCount, drawn, clamped);
      }
      if (column < columns) {
        const Floats drawn = draws.at(key, begins + column, column, column < 16);
        lanes<false>(part.how, begins + column, columns - column, drawn, clamped);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      of->clamped += clamped[i];
    }
  }
};

void descend_part(DescentPart& part) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa() >= Isa::avx512) {
    descend_avx512(part);
    return;
  }
#endif
  run_with_vectors<Body>(&part);
}

} // namespace

Descended descend(const Descent& how, const Threads& threads) {
  if (!stays_finite(how, threads)) {
    return {0, false};
  }
  std::atomic<int64_t> clamped = 0;
  threads.share(divided(how.rows, kGrainRows), [&](int64_t, int64_t begin, int64_t end) {
    DescentPart part{how, begin * kGrainRows, std::min(end * kGrainRows, how.rows), 0};
    descend_part(part);
    clamped += part.clamped;
  });
  return {clamped, true};
}

} // namespace torch_odt::kernels::int8
