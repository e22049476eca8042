#include "finish_updates.h"

#include <algorithm>

#include "descent.h"
#include "integers.h"

namespace torch_odt::kernels::int8 {

namespace {

// What is written between sums and weights, and how many weights are on their way from memory meanwhile.
constexpr int64_t kRoom = 4 * kBlockColumns;
constexpr int64_t kAhead = 8 * kBlockColumns;
constexpr int64_t kMostRows = 256;

// Some rows of a weight, which lie as far apart as any two others that follow each other.
struct WeightRows {
  int8_t* weights;
  int64_t stride;
  int64_t count;
  int64_t columns;
  int64_t place; // where the first one begins
  int64_t first_column;
};

template <typename Sum>
WeightRows rows_of(const Finish& how, const Block<Sum>& block, int64_t first, int64_t count) {
  const int64_t stride = block.rows > 1 ? block.places[1] - block.places[0] : block.columns;
  const int64_t place = block.places[0] + first * stride;
  return {static_cast<int8_t*>(how.output) + place, stride, count, block.columns, place, block.first_column};
}

// Where rows are long the processor does not see pieces of the next ones coming.
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

void add(int64_t& sum, int64_t count) {
  if (count > 0) {
    __atomic_fetch_add(&sum, count, __ATOMIC_RELAXED);
  }
}

void descend_rows(const Finish& how, const float* gradients, const WeightRows& to, int64_t first_channel) {
  DescentPart part{
      how.rates + first_channel, how.shrink, how.seed, gradients, to.columns, to.weights, to.stride, to.count, to.columns,
      to.place - to.first_column, to.first_column, 0};
  descend_part(part);
  add(how.noted->clamped, part.clamped);
}

void take_rows_off(const Finish& how, int8_t* steps, const WeightRows& to) {
  const bool is_dense = to.stride == to.columns;
  const int64_t rows = is_dense ? 1 : to.count;
  const int64_t columns = is_dense ? to.count * to.columns : to.columns;
  add(how.noted->clipped, clip(steps, rows * columns, how.most_step) > how.most_step ? 1 : 0);
  bool has_changed = false;
  for (int64_t row = 0; row < rows; ++row) {
    has_changed |= take_off(to.weights + row * to.stride, steps + row * columns, columns);
  }
  add(how.noted->changed, has_changed ? 1 : 0);
}

} // namespace

template <typename Sum>
float finish_update(const Finish& how, const Block<Sum>& block) {
  alignas(64) float room[kRoom];
  Finish made = how;
  made.result = how.result == Result::take_off ? Result::int8 : Result::floats;
  made.output = room;
  const int64_t at_once = std::min(kRoom / block.columns, kMostRows);
  int64_t places[kMostRows];
  for (int64_t row = 0; row < at_once; ++row) {
    places[row] = row * block.columns;
  }
  const bool updates = how.result != Result::nothing;
  const int64_t ahead = std::max(at_once, kAhead / block.columns);
  if (updates) {
    prefetch(how, block, 0, ahead);
  }
  float largest = 0;
  for (int64_t first = 0; first < block.rows; first += at_once) {
    if (updates) {
      prefetch(how, block, first + ahead, first + ahead + at_once);
    }
    Block<Sum> some = block;
    some.sums += first * block.stride;
    some.rows = std::min(at_once, block.rows - first);
    some.places = places;
    some.first_channel += first;
    some.row_terms += block.row_terms == nullptr ? 0 : first;
    largest = std::max(largest, finish(made, some));
    if (how.result == Result::descent) {
      descend_rows(how, room, rows_of(how, block, first, some.rows), some.first_channel);
    } else if (how.result == Result::take_off) {
      take_rows_off(how, reinterpret_cast<int8_t*>(room), rows_of(how, block, first, some.rows));
    }
  }
  return largest;
}

template float finish_update(const Finish&, const Block<int32_t>&);
template float finish_update(const Finish&, const Block<int64_t>&);

} // namespace torch_odt::kernels::int8
