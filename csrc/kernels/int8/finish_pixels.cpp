#include "finish_pixels.h"

#include <algorithm>
#include <bit>

#include "draws.h"
#include "lanes.h"

namespace torch_odt::kernels::int8 {

namespace {

// What finish() is told, in one.
struct Pixels {
  const PixelDraws* draws;
  const int32_t* sums;
  int8_t* output;
  int64_t count;
  float multiplier;
  uint32_t first; // what the hashes begin with
  int32_t zero_point;
  float low;
  float high;
};

template <int kBytes>
struct RoundPixels {
  using L = Lanes<kBytes>;
  using Floats = typename L::Floats;
  using Ints = typename L::Ints;
  using Bits = typename L::Bits;

  TORCH_ODT_INLINE static void run(const Pixels* all, float* largest) {
    const Pixels of = *all;
    Ints most = {}; // as bits: without a sign they are ordered as their numbers are
    for (int64_t begin = 0; begin < of.count; begin += of.draws->count) {
      const int64_t end = std::min(of.draws->count, of.count - begin);
      const uint32_t first = of.first + static_cast<uint32_t>(begin) * kGolden;
      int64_t i = 0;
      for (; i + L::kCount <= end; i += L::kCount) {
        round_lanes(of, begin + i, i, first, L::kCount, most);
      }
      if (i < end) {
        round_lanes(of, begin + i, i, first, end - i, most);
      }
    }
    for (int i = 0; i < L::kCount; ++i) {
      *largest = std::max(*largest, std::bit_cast<float>(static_cast<int32_t>(most[i])));
    }
  }

  TORCH_ODT_INLINE static void
  round_lanes(const Pixels& of, int64_t element, int64_t drawn, uint32_t first, int64_t lanes, Ints& most) {
    const Ints sums = L::template load<Ints>(of.sums + element);
    const Floats values = L::product(__builtin_convertvector(sums, Floats), Floats{} + of.multiplier);
    const Ints inside = L::numbers() < static_cast<int32_t>(lanes);
    const Ints magnitude = (Ints)values & 0x7fffffff & inside;
    most = most < magnitude ? magnitude : most;
    const Bits bits = mixed(L::template load<Bits>(of.draws->steps + drawn) + first);
    const Bits draws = bits >> L::template load<Bits>(of.draws->shifts + drawn) & 0xffU;
    const Floats rounded = L::by_chance(values, __builtin_convertvector((Ints)draws, Floats));
    const Floats between = L::between(rounded, Floats{} + of.low, Floats{} + of.high);
    store_lanes(L::narrowed(__builtin_convertvector(between, Ints) + of.zero_point), lanes, of.output + element);
  }
};

} // namespace

PixelDraws::PixelDraws(int64_t channels) : count(16 * channels) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t channel = i % channels;
    steps[i] = static_cast<uint32_t>(i - channel + byte_hash_of(channel)) * kGolden;
    shifts[i] = static_cast<uint32_t>(byte_shift_of(channel));
  }
}

bool has_finish_pixels(const Finish& how) {
  return how.result == Result::int8 && how.rounding == Rounding::stochastic && !how.per_channel && how.mask == nullptr;
}

float finish_pixels(const Finish& how, const PixelDraws& draws, const int32_t* sums, int64_t place, int64_t count) {
  const Pixels pixels = {
      &draws,
      sums,
      static_cast<int8_t*>(how.output) + place,
      count,
      *how.multipliers,
      static_cast<uint32_t>(place) * kGolden + Keys(how.seed).at(place),
      how.zero_point,
      static_cast<float>(how.low - how.zero_point),
      static_cast<float>(how.high - how.zero_point)};
  float largest = 0;
  run_with_vectors<RoundPixels>(&pixels, &largest);
  return largest;
}

} // namespace torch_odt::kernels::int8
