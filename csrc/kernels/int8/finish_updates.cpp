#include "finish_updates.h"

#include <algorithm>

#include "descent.h"
#include "integers.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kRowsAhead = 8; // whose weights are on their way from memory

// Rows of a block lie far apart, so that the processor does not see them coming.
template <typename Sum>
void prefetch(const Finish& how, const Block<Sum>& block, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  for (int64_t row = begin; row < std::min(end, block.rows); ++row) {
    const char* const weights = static_cast<const char*>(how.output) + block.places[row];
    for (int64_t byte = 0; byte < block.columns; byte += kLine) {
      __builtin_prefetch(weights + byte, 1);
    }
  }
}

void note(int64_t* clamped, int64_t count) {
  if (count > 0) {
    __atomic_fetch_add(clamped, count, __ATOMIC_RELAXED);
  }
}

void descend_row(const Finish& how, const float* gradients, int64_t place, int64_t first_column, int64_t columns) {
  auto* const weights = static_cast<int8_t*>(how.output) + place;
  DescentPart part{
      how.rate, how.decay, how.seed, gradients, 0, weights, 0, 1, columns, place - first_column, first_column, 0};
  descend_part(part);
  note(how.clamped, part.clamped);
}

void take_row_off(const Finish& how, int8_t* steps, int64_t place, int64_t columns) {
  note(how.clamped, clip(steps, columns, how.most_step) > how.most_step ? 1 : 0);
  take_off(static_cast<int8_t*>(how.output) + place, steps, columns);
}

} // namespace

template <typename Sum>
float finish_update(const Finish& how, const Block<Sum>& block) {
  alignas(64) float room[kRowsAtOnce * kBlockColumns];
  Finish made = how;
  made.result = how.result == Result::take_off ? Result::int8 : Result::floats;
  made.output = room;
  int64_t places[kRowsAtOnce];
  for (int64_t row = 0; row < kRowsAtOnce; ++row) {
    places[row] = row * kBlockColumns;
  }
  float largest = 0;
  const bool updates = how.result != Result::nothing;
  if (updates) {
    prefetch(how, block, 0, kRowsAhead);
  }
  for (int64_t first = 0; first < block.rows; first += kRowsAtOnce) {
    if (updates) {
      prefetch(how, block, first + kRowsAhead, first + kRowsAhead + kRowsAtOnce);
    }
    Block<Sum> some = block;
    some.sums += first * block.stride;
    some.rows = std::min(kRowsAtOnce, block.rows - first);
    some.places = places;
    some.first_channel += first;
    some.row_terms += block.row_terms == nullptr ? 0 : first;
    largest = std::max(largest, finish(made, some));
    for (int64_t row = 0; row < some.rows; ++row) {
      const int64_t place = block.places[first + row];
      if (how.result == Result::descent) {
        descend_row(how, room + places[row], place, block.first_column, block.columns);
      } else if (how.result == Result::take_off) {
        take_row_off(how, reinterpret_cast<int8_t*>(room) + places[row], place, block.columns);
      }
    }
  }
  return largest;
}

template float finish_update(const Finish&, const Block<int32_t>&);
template float finish_update(const Finish&, const Block<int64_t>&);

} // namespace torch_odt::kernels::int8
