#include "finish.h"

#include <algorithm>
#include <bit>
#include <type_traits>

namespace torch_odt::kernels::int8 {

namespace {

// Beyond it int8 is clamped whatever the rest, and below it every integer and half is a float.
constexpr float kHuge = 4194304.0F;

// A value between two clamps cannot become part of a fused multiply-add, which some sets have: all get the same bits.
TORCH_ODT_INLINE float clamped(float value) {
  return std::min(std::max(value, -kHuge), kHuge);
}

TORCH_ODT_INLINE float nearest(float value) {
  constexpr float kShift = 12582912.0F; // 1.5 * 2^23: what is added to it loses its fraction
  return (value + kShift) - kShift;
}

TORCH_ODT_INLINE float floor_of(float value) {
  const float near = nearest(value);
  return near > value ? near - 1.0F : near;
}

// The finaliser of a 32-bit hash with little bias (Wellons' lowbias32).
TORCH_ODT_INLINE uint32_t mixed(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x7feb352dU;
  bits ^= bits >> 15;
  bits *= 0x846ca68bU;
  bits ^= bits >> 16;
  return bits;
}

TORCH_ODT_INLINE uint32_t key_of(uint64_t seed, int64_t place) {
  const auto high = static_cast<uint32_t>(static_cast<uint64_t>(place) >> 32);
  return mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) ^ mixed(high + 0x9e3779b9U)));
}

// From 0 up to but without 1.
TORCH_ODT_INLINE float drawn(uint32_t key, uint32_t index) {
  return static_cast<float>(static_cast<int32_t>(mixed(key + index * 0x9e3779b9U) >> 8)) * 0x1p-24F;
}

// NITI (arXiv 2009.13108), section 3.3: of the bits that a shift loses, the lower half says whether the upper half rounds.
template <typename Sum>
TORCH_ODT_INLINE Sum shifted(Sum sum, int64_t shift) {
  using Bits = std::make_unsigned_t<Sum>;
  const Bits magnitude = sum < 0 ? Bits{0} - static_cast<Bits>(sum) : static_cast<Bits>(sum);
  const Bits lost = magnitude & ((Bits{1} << shift) - 1);
  const int64_t half = shift / 2;
  const Bits upper = lost >> half;
  const Bits random = (lost & ((Bits{1} << half) - 1)) << (shift - 2 * half);
  const Bits rounded = (magnitude >> shift) + (upper > random ? 1 : 0);
  return sum < 0 ? -static_cast<Sum>(rounded) : static_cast<Sum>(rounded);
}

template <typename Sum>
TORCH_ODT_INLINE void add_terms(const Block<Sum>& block, int64_t row, Sum* to) {
  using Bits = std::make_unsigned_t<Sum>;
  const Sum* const sums = block.sums + row * block.stride;
  const Bits term = block.row_terms == nullptr ? 0 : static_cast<Bits>(block.row_terms[row]);
  if (block.column_terms == nullptr) {
    for (int64_t i = 0; i < block.columns; ++i) {
      to[i] = static_cast<Sum>(static_cast<Bits>(sums[i]) + term);
    }
    return;
  }
  for (int64_t i = 0; i < block.columns; ++i) {
    to[i] = static_cast<Sum>(static_cast<Bits>(sums[i]) + static_cast<Bits>(Sum{block.column_terms[i]}) + term);
  }
}

template <typename Sum>
TORCH_ODT_INLINE void scale(const Finish& how, const Block<Sum>& block, int64_t row, const Sum* sums, float* to) {
  if (how.per_channel && !how.channels_are_rows) {
    const float* const multipliers = how.multipliers + block.first_channel;
    for (int64_t i = 0; i < block.columns; ++i) {
      to[i] = static_cast<float>(sums[i]) * multipliers[i];
    }
    return;
  }
  const float multiplier = how.multipliers[how.per_channel ? block.first_channel + row : 0];
  for (int64_t i = 0; i < block.columns; ++i) {
    to[i] = static_cast<float>(sums[i]) * multiplier;
  }
}

// Numbers without a sign are ordered as their bits are, and of integers compilers take the largest by vectors.
TORCH_ODT_INLINE float largest_of(const float* values, int64_t count, float before) {
  auto largest = std::bit_cast<int32_t>(before);
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
  }
  return std::bit_cast<float>(largest);
}

// `from` less what sums came to, or the latter where there is nothing to take it from.
template <typename Sum, bool kUpdate>
TORCH_ODT_INLINE void round_row(
    const Finish& how, int64_t place, const Sum* sums, const float* scaled, const int8_t* from, int64_t count, int32_t* to) {
  switch (how.rounding) {
    case Rounding::nearest:
      for (int64_t i = 0; i < count; ++i) {
        const float value = kUpdate ? static_cast<float>(from[i]) - clamped(scaled[i]) : clamped(scaled[i]);
        to[i] = static_cast<int32_t>(nearest(value));
      }
      return;
    case Rounding::stochastic: {
      const uint32_t key = key_of(how.seed, place);
      const auto first = static_cast<uint32_t>(place);
      for (int64_t i = 0; i < count; ++i) {
        const float value = kUpdate ? static_cast<float>(from[i]) - clamped(scaled[i]) : clamped(scaled[i]);
        to[i] = static_cast<int32_t>(floor_of(value + drawn(key, first + static_cast<uint32_t>(i))));
      }
      return;
    }
    case Rounding::pseudo_stochastic:
      for (int64_t i = 0; i < count; ++i) {
        constexpr Sum kMost = 1 << 22;
        const Sum value = shifted(sums[i], how.shift);
        const auto step = static_cast<int32_t>(std::min(std::max(value, -kMost), kMost));
        to[i] = kUpdate ? from[i] - step : step;
      }
  }
}

TORCH_ODT_INLINE void note_unclamped(const Finish& how, int64_t place, const int32_t* values, int64_t count) {
  if (place % 8 == 0 && count % 8 == 0) {
    for (int64_t i = 0; i < count; i += 8) {
      uint32_t bits = 0;
      for (int64_t j = 0; j < 8; ++j) {
        bits |= static_cast<uint32_t>(values[i + j] >= how.low && values[i + j] <= how.high) << j;
      }
      how.mask[(place + i) / 8] = static_cast<uint8_t>(bits);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto bit = static_cast<uint32_t>(values[i] >= how.low && values[i] <= how.high);
    how.mask[(place + i) / 8] = static_cast<uint8_t>(how.mask[(place + i) / 8] | bit << ((place + i) % 8));
  }
}

template <typename Sum>
TORCH_ODT_INLINE void finish_block(const Finish* how_place, const Block<Sum>* block_place, float* largest) {
  const Finish how = *how_place;
  const Block<Sum> block = *block_place;
  Sum sums[kBlockColumns];
  float scaled[kBlockColumns];
  int32_t rounded[kBlockColumns];
  const int64_t count = block.columns;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t place = block.places[row];
    if (how.result == Result::sums) {
      add_terms(block, row, static_cast<Sum*>(how.output) + place);
      continue;
    }
    add_terms(block, row, sums);
    if (how.result == Result::floats) {
      auto* const to = static_cast<float*>(how.output) + place;
      scale(how, block, row, sums, to);
      *largest = largest_of(to, count, *largest);
      continue;
    }
    scale(how, block, row, sums, scaled);
    *largest = largest_of(scaled, count, *largest);
    if (how.result == Result::float_update) {
      auto* const weights = static_cast<float*>(how.output) + place;
      for (int64_t i = 0; i < count; ++i) {
        constexpr float kMost = 3.0e38F;
        weights[i] -= std::min(std::max(scaled[i], -kMost), kMost);
      }
      continue;
    }
    auto* const bytes = static_cast<int8_t*>(how.output) + place;
    if (how.result == Result::int8_update) {
      round_row<Sum, true>(how, place, sums, scaled, bytes, count, rounded);
    } else {
      round_row<Sum, false>(how, place, sums, scaled, bytes, count, rounded);
      for (int64_t i = 0; i < count; ++i) {
        rounded[i] += how.zero_point;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<int8_t>(std::min(std::max(rounded[i], how.low), how.high));
    }
    if (how.mask != nullptr) {
      note_unclamped(how, place, rounded, count);
    }
  }
}

} // namespace

template <typename Sum>
float finish(const Finish& how, const Block<Sum>& block) {
  float largest = 0;
  run<finish_block<Sum>>(&how, &block, &largest);
  return largest;
}

template float finish(const Finish&, const Block<int32_t>&);
template float finish(const Finish&, const Block<int64_t>&);

} // namespace torch_odt::kernels::int8
