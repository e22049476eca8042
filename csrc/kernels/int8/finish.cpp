#include "finish.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <type_traits>

#include "../storage.h"
#include "finish_avx2.h"
#include "finish_avx512.h"
#include "finish_updates.h"
#include "lanes.h"

namespace torch_odt::kernels::int8 {

namespace {

// Some columns of a row, the last ones of which may be none.
struct Place {
  int64_t row;
  int64_t column; // in the block
  int64_t lanes;
  int64_t index; // in the output
  uint32_t key; // of what is drawn for the row
};

// What is kept from one place to the next.
template <int kBytes>
struct Kept {
  using L = Lanes<kBytes>;

  typename L::Ints largest = {}; // as bits: without a sign they are ordered as their numbers are
  ByteDraws<kBytes> draws;
  HalfDraws<kBytes> weight_draws;
};

// A block, with what belongs to its columns.
template <typename Sum, int kBytes>
struct State {
  using L = Lanes<kBytes>;

  const Finish how;
  const Block<Sum> block;
  const Columns columns;

  TORCH_ODT_INLINE State(const Finish& finish, const Block<Sum>& of) : how(finish), block(of), columns(finish, of) {}

  TORCH_ODT_INLINE const Sum* sums(const Place& at) const {
    return block.sums + at.row * block.stride + at.column;
  }

  TORCH_ODT_INLINE Sum row_term(const Place& at) const {
    return block.row_terms == nullptr ? 0 : block.row_terms[at.row];
  }

  TORCH_ODT_INLINE typename L::Ints totals(const Place& at) const {
    static_assert(std::is_same_v<Sum, int32_t>);
    using Bits = typename L::Bits;
    const Bits sum = L::template load<Bits>(sums(at)) + L::template load<Bits>(columns.terms + at.column);
    return (typename L::Ints)(sum + static_cast<uint32_t>(row_term(at)));
  }

  TORCH_ODT_INLINE int64_t total(const Place& at, int64_t lane) const {
    return sums(at)[lane] + columns.terms[at.column + lane] + row_term(at);
  }

  TORCH_ODT_INLINE typename L::Floats scaled(const Place& at, Kept<kBytes>& kept) const {
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;
    Floats values;
    if constexpr (std::is_same_v<Sum, int32_t>) {
      values = __builtin_convertvector(totals(at), Floats);
    } else {
      for (int i = 0; i < L::kCount; ++i) {
        values[i] = static_cast<float>(total(at, i));
      }
    }
    if (how.per_channel && how.channels_are_rows) {
      values = L::product(values, Floats{} + how.multipliers[block.first_channel + at.row]);
    } else {
      values = L::product(values, L::template load<Floats>(columns.multipliers + at.column));
    }
    const Ints inside = L::numbers() < static_cast<int32_t>(at.lanes);
    const Ints magnitude = (Ints)values & 0x7fffffff & inside;
    kept.largest = kept.largest < magnitude ? magnitude : kept.largest;
    return values;
  }
};

struct ToSums {
  static constexpr int64_t kLowest = INT32_MIN;
  static constexpr int64_t kHighest = INT32_MAX;
  static constexpr int32_t kInfinity = 0x7f800000; // as bits

  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static void lanes(const State<Sum, kBytes>& state, const Place& at, Kept<kBytes>& kept) {
    int32_t* const to = static_cast<int32_t*>(state.how.output) + at.index;
    if constexpr (std::is_same_v<Sum, int32_t>) {
      store_lanes(state.totals(at), at.lanes, to);
    } else {
      for (int64_t i = 0; i < at.lanes; ++i) {
        const int64_t total = state.total(at, i);
        to[i] = static_cast<int32_t>(total < kLowest ? kLowest : total > kHighest ? kHighest : total);
        if (to[i] != total) {
          kept.largest[0] = kInfinity;
        }
      }
    }
  }
};

struct ToFloats {
  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static void lanes(const State<Sum, kBytes>& state, const Place& at, Kept<kBytes>& kept) {
    store_lanes(state.scaled(at, kept), at.lanes, static_cast<float*>(state.how.output) + at.index);
  }
};

struct ToBFloat16s {
  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static void lanes(const State<Sum, kBytes>& state, const Place& at, Kept<kBytes>& kept) {
    const auto halves = Lanes<kBytes>::to_bfloat16(state.scaled(at, kept));
    store_lanes(halves, at.lanes, static_cast<BFloat16*>(state.how.output) + at.index);
  }
};

struct UpdateFloats {
  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static void lanes(const State<Sum, kBytes>& state, const Place& at, Kept<kBytes>& kept) {
    using Floats = typename Lanes<kBytes>::Floats;
    float* const weights = static_cast<float*>(state.how.output) + at.index;
    const Floats step = state.scaled(at, kept);
    if (at.lanes == Lanes<kBytes>::kCount) {
      store_lanes(Lanes<kBytes>::template load<Floats>(weights) - step, at.lanes, weights);
      return;
    }
    for (int i = 0; i < at.lanes; ++i) {
      weights[i] -= step[i];
    }
  }
};

// To int8, or `kUpdate` int8 in its place.
template <Rounding kRounding, bool kUpdate>
struct ToInt8 {
  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static void lanes(const State<Sum, kBytes>& state, const Place& at, Kept<kBytes>& kept) {
    using L = Lanes<kBytes>;
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;
    const Finish& how = state.how;
    int8_t* const output = static_cast<int8_t*>(how.output) + at.index;
    Floats before = {};
    if constexpr (kUpdate) {
      for (int i = 0; i < at.lanes; ++i) {
        before[i] = static_cast<float>(output[i]);
      }
    }
    const int32_t zero_point = kUpdate ? 0 : how.zero_point;
    const Floats low = Floats{} + static_cast<float>(how.low - zero_point);
    const Floats high = Floats{} + static_cast<float>(how.high - zero_point);
    const Floats rounded = round(state, at, before, kept);
    const Ints value = __builtin_convertvector(L::between(rounded, low, high), Ints) + zero_point;
    store_lanes(L::narrowed(value), at.lanes, output);
    if (how.mask != nullptr) {
      note_unclamped(how, at, L::narrowed((rounded >= low) & (rounded <= high)));
    }
  }

  template <typename Sum, int kBytes>
  TORCH_ODT_INLINE static typename Lanes<kBytes>::Floats
  round(
      const State<Sum, kBytes>& state,
      const Place& at,
      const typename Lanes<kBytes>::Floats& before,
      Kept<kBytes>& kept) {
    using L = Lanes<kBytes>;
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;
    const Floats scaled = state.scaled(at, kept);
    if constexpr (kRounding == Rounding::pseudo_stochastic) {
      Ints steps;
      if constexpr (std::is_same_v<Sum, int32_t>) {
        steps = L::shifted(state.totals(at), state.how.shift);
      } else {
        for (int i = 0; i < L::kCount; ++i) {
          steps[i] = shifted(state.total(at, i), state.how.shift);
        }
      }
      const Floats whole = __builtin_convertvector(steps, Floats);
      return kUpdate ? before - whole : whole;
    }
    const Floats values = kUpdate ? before - scaled : scaled;
    if constexpr (kRounding == Rounding::nearest) {
      return L::nearest(values);
    }
    const int64_t column = state.block.first_column + at.column;
    if constexpr (kUpdate) {
      return L::floor_of(values + kept.weight_draws.at(at.key, at.index, column, at.column < 16));
    }
    return L::by_chance(values, kept.draws.at(at.key, at.index, column));
  }

  template <typename Narrow>
  TORCH_ODT_INLINE static void note_unclamped(const Finish& how, const Place& at, const Narrow& inside) {
    constexpr int64_t kCount = sizeof(Narrow);
    uint64_t bits = 0;
    for (int64_t first = 0; first < kCount; first += 8) {
      uint64_t bytes = 0;
      __builtin_memcpy(&bytes, reinterpret_cast<const char*>(&inside) + first, std::min<size_t>(8, kCount));
      // Of eight bytes the last bits, side by side.
      bits |= ((bytes & 0x0101010101010101U) * 0x0102040810204080U) >> 56 << first;
    }
    note_bits(how.mask, at.index, at.lanes, bits & ((uint64_t{1} << at.lanes) - 1));
  }
};

template <typename Sum, typename Make>
struct Blocks {
  template <int kBytes>
  struct Body {
    TORCH_ODT_INLINE static void run(const Finish* how, const Block<Sum>* block, float* largest) {
      constexpr int64_t kCount = Lanes<kBytes>::kCount;
      const State<Sum, kBytes> state(*how, *block);
      Kept<kBytes> kept;
      Keys keys(how->seed);
      for (int64_t row = 0; row < state.block.rows; ++row) {
        const int64_t place = state.block.places[row];
        const uint32_t key = keys.at(place - state.block.first_column);
        int64_t column = 0;
        for (; column + kCount <= state.block.columns; column += kCount) {
          Make::lanes(state, Place{row, column, kCount, place + column, key}, kept);
        }
        if (column < state.block.columns) {
          Make::lanes(state, Place{row, column, state.block.columns - column, place + column, key}, kept);
        }
      }
      for (int i = 0; i < kCount; ++i) {
        *largest = std::max(*largest, std::bit_cast<float>(static_cast<int32_t>(kept.largest[i])));
      }
    }
  };
};

template <typename Make, typename Sum>
float run_blocks(const Finish& how, const Block<Sum>& block) {
  float largest = 0;
  run_with_vectors<Blocks<Sum, Make>::template Body>(&how, &block, &largest);
  return largest;
}

template <bool kUpdate, typename Sum>
float run_rounding(const Finish& how, const Block<Sum>& block) {
  switch (how.rounding) {
    case Rounding::nearest:
      return run_blocks<ToInt8<Rounding::nearest, kUpdate>>(how, block);
    case Rounding::stochastic:
      return run_blocks<ToInt8<Rounding::stochastic, kUpdate>>(how, block);
    case Rounding::pseudo_stochastic:
      break;
  }
  return run_blocks<ToInt8<Rounding::pseudo_stochastic, kUpdate>>(how, block);
}

} // namespace

template <typename Sum>
float finish(const Finish& how, const Block<Sum>& block) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (std::is_same_v<Sum, int32_t>) {
    if (isa() >= Isa::avx512 && has_finish_avx512(how, block)) {
      return finish_avx512(how, block);
    }
    if (isa() >= Isa::avx2 && has_finish_avx2(how, block)) {
      return finish_avx2(how, block);
    }
  }
#endif
  switch (how.result) {
    case Result::sums:
      return run_blocks<ToSums>(how, block);
    case Result::floats:
      return run_blocks<ToFloats>(how, block);
    case Result::bfloat16s:
      run_blocks<ToBFloat16s>(how, block);
      return 0;
    case Result::float_update:
      return run_blocks<UpdateFloats>(how, block);
    case Result::int8_update:
      return run_rounding<true>(how, block);
    case Result::descent:
    case Result::take_off:
    case Result::nothing:
      return finish_update(how, block);
    case Result::int8:
      break;
  }
  return run_rounding<false>(how, block);
}

template float finish(const Finish&, const Block<int32_t>&);
template float finish(const Finish&, const Block<int64_t>&);

} // namespace torch_odt::kernels::int8
