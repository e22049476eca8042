#include "descent.h"

#include <algorithm>
#include <atomic>

#include "descent_avx512.h"
#include "lanes.h"
#include "memory.h"
#include "widened.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows that a thread takes at a time.
constexpr int64_t kGrainRows = 16;
constexpr int32_t kInfinity = 0x7f800000; // as bits; NaN is above it

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
  lanes(const Descent& how, int64_t index, int64_t count, Floats drawn, Ints& clamped, Ints& largest) {
    int8_t* const to = how.weights + index;
    const float* const from = how.gradients + index;
    const Narrow weights = kAll ? L::template load<Narrow>(to) : some<Narrow>(to, count);
    const Floats gradients = kAll ? L::template load<Floats>(from) : some<Floats>(from, count);
    const Floats before = widened<kBytes>(weights);
    const Floats slopes = gradients + L::product(before, Floats{} + how.decay);
    const Floats after = before - L::product(slopes, Floats{} + how.rate);
    const Ints magnitude = (Ints)after & 0x7fffffff;
    largest = largest < magnitude ? magnitude : largest;
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
    Ints largest = {};
    for (int64_t row = part.begin; row < part.end; ++row) {
      const int64_t begins = row * columns;
      const uint32_t key = keys.at(begins);
      HalfDraws<kBytes> draws;
      int64_t column = 0;
      for (; column + kCount <= columns; column += kCount) {
        const Floats drawn = draws.at(key, begins + column, column, column < 16);
        lanes<true>(part.how, begins + column, kCount, drawn, clamped, largest);
      }
      if (column < columns) {
        const Floats drawn = draws.at(key, begins + column, column, column < 16);
        lanes<false>(part.how, begins + column, columns - column, drawn, clamped, largest);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      of->clamped += clamped[i];
      of->largest = std::max(of->largest, largest[i]);
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
  std::atomic<int64_t> clamped = 0;
  std::atomic<bool> is_finite = true;
  threads.share(divided(how.rows, kGrainRows), [&](int64_t, int64_t begin, int64_t end) {
    DescentPart part{how, begin * kGrainRows, std::min(end * kGrainRows, how.rows), 0, 0};
    descend_part(part);
    clamped += part.clamped;
    if (part.largest >= kInfinity) {
      is_finite = false;
    }
  });
  return {clamped, is_finite};
}

} // namespace torch_odt::kernels::int8
