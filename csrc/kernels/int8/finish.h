// What becomes of exact sums: themselves, fp32, bfloat16, int8 by one of three roundings, or an update of weights.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace torch_odt::kernels::int8 {

enum class Rounding {
  nearest, // to even where two are as near
  stochastic, // up with the probability of the fraction, by a number drawn from the seed and the element's place alone
  pseudo_stochastic, // NITI's: by `shift` bits, of which the lower half is the random number for the upper one
};

enum class Result {
  sums,
  floats,
  bfloat16s, // of multipliers that are finite
  int8,
  float_update,
  int8_update,
  descent, // of int8 weights, by gradients that are never stored, see descent.h
  take_off, // int8 off int8 weights from -127 on, likewise; not by stochastic rounding, which draws by place
  nothing, // but the largest absolute value
};

// The most columns of a block; and of one whose sums are to stay in the first cache with some rows.
inline constexpr int64_t kBlockColumns = 576;
inline constexpr int64_t kCachedColumns = 192;

// What updates of a weight add up, each of several threads some.
struct Noted {
  int64_t clamped = 0; // of descent: weights
  int64_t clipped = 0; // of take_off: pieces of the weight with a step beyond the largest one
  int64_t changed = 0; // of take_off: pieces with a step that is not 0
};

struct Finish {
  Result result = Result::sums;
  void* output = nullptr;
  // What sums are multiplied by: one number, or one for each channel. Powers of two for pseudo-stochastic rounding.
  const float* multipliers = nullptr;
  bool per_channel = false;
  // Channels are rows of blocks, as in the gradient of a weight, and columns otherwise.
  bool channels_are_rows = false;
  // Of int8: what it is rounded by, what is added thereafter, and what it is clamped between.
  Rounding rounding = Rounding::nearest;
  uint64_t seed = 0;
  int64_t shift = 0;
  int32_t zero_point = 0;
  int32_t low = -128;
  int32_t high = 127;
  // One bit an element, set where int8 was not clamped; must be zero before, or null.
  uint8_t* mask = nullptr;
  // Of descent: a rate for each channel, which are rows there.
  const float* rates = nullptr;
  float shrink = 0;
  // Of take_off: the largest step, to which others are clipped.
  int64_t most_step = 127;
  // Of both, what is found on the way.
  Noted* noted = nullptr;
};

// A part of the result, with what belongs to its rows and columns.
template <typename Sum>
struct Block {
  const Sum* sums;
  int64_t stride;
  int64_t rows;
  int64_t columns; // kBlockColumns at most
  const int64_t* places; // where in the output each row of the block begins
  int64_t first_column; // of the row of the output that it is a part of; a multiple of 16, or that of a single column
  int64_t first_channel;
  const int32_t* column_terms; // added to each row, or null
  const Sum* row_terms; // added to each column, or null
};

// A block's numbers for its columns, in arrays that vectors may read to the end: zeros behind the last column.
struct alignas(64) Columns {
  float multipliers[kBlockColumns];
  int32_t terms[kBlockColumns];

  template <typename Sum>
  Columns(const Finish& how, const Block<Sum>& block) {
    const auto columns = static_cast<unsigned long>(block.columns);
    const unsigned long padded = (columns + 15) / 16 * 16;
    __builtin_memset(multipliers, 0, padded * sizeof(float));
    if (how.multipliers != nullptr && !how.per_channel) {
      for (unsigned long i = 0; i < columns; ++i) {
        multipliers[i] = *how.multipliers;
      }
    } else if (how.multipliers != nullptr && !how.channels_are_rows) {
      __builtin_memcpy(multipliers, how.multipliers + block.first_channel, columns * sizeof(float));
    }
    __builtin_memset(terms, 0, padded * sizeof(int32_t));
    if (block.column_terms != nullptr) {
      __builtin_memcpy(terms, block.column_terms, columns * sizeof(int32_t));
    }
  }
};

// Sets bits of a mask from `index` on.
TORCH_ODT_INLINE void note_bits(uint8_t* mask, int64_t index, int64_t count, uint64_t bits) {
  uint8_t* const to = mask + index / 8;
  const int64_t first = index % 8;
  for (int64_t i = 0; i * 8 < first + count; ++i) {
    to[i] = static_cast<uint8_t>(to[i] | (bits << first) >> (8 * i));
  }
}

// Returns the largest absolute value of what sums times multipliers were, before rounding; for `bfloat16s` 0. For
// `sums`, which are int32: 0, or infinity where one does not fit, in whose place is the nearest number that does.
template <typename Sum>
float finish(const Finish& how, const Block<Sum>& block);

} // namespace torch_odt::kernels::int8
