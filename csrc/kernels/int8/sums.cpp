#include "sums.h"

#include <algorithm>

#include "../isa.h"

namespace torch_odt::kernels::int8 {

namespace {

TORCH_ODT_INLINE void sum_values(const int8_t* values, int64_t count, int32_t* result) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += values[i];
  }
  *result = sum;
}

// As many rows at a time as their sums fit into 16 bits.
constexpr int64_t kRowsAtOnce = 255;

// Vectors of each size: bytes, and as many words.
template <int kBytes>
struct Widths;
#define TORCH_ODT_WIDTHS(bytes)                                     \
  template <>                                                       \
  struct Widths<bytes> {                                            \
    typedef int8_t Narrow __attribute__((vector_size((bytes) / 2))); \
    typedef int16_t Words __attribute__((vector_size(bytes)));      \
  };
TORCH_ODT_WIDTHS(16)
TORCH_ODT_WIDTHS(32)
TORCH_ODT_WIDTHS(64)
#undef TORCH_ODT_WIDTHS

// As many columns as are whole vectors of words, from the first on; returns how many.
template <int kBytes>
TORCH_ODT_INLINE int64_t
add_columns(const int8_t* const* rows, int64_t count, int64_t first, int64_t columns, int32_t* sums) {
  constexpr int64_t kCount = kBytes / 2;
  int64_t column = first;
  for (; column + kCount <= columns; column += kCount) {
    typename Widths<kBytes>::Words some = {};
    for (int64_t row = 0; row < count; ++row) {
      typename Widths<kBytes>::Narrow values;
      __builtin_memcpy(&values, rows[row] + column, sizeof(values));
      some += __builtin_convertvector(values, typename Widths<kBytes>::Words);
    }
    for (int i = 0; i < kCount; ++i) {
      sums[column + i] += some[i];
    }
  }
  return column;
}

template <int kBytes>
struct AddRows {
  TORCH_ODT_INLINE static void run(const int8_t* const* rows, int64_t count, int64_t columns, int32_t* sums) {
    for (; count > 0; count -= kRowsAtOnce, rows += kRowsAtOnce) {
      const int64_t now = std::min(count, kRowsAtOnce);
      int64_t column = add_columns<kBytes>(rows, now, 0, columns, sums);
      column = add_columns<16>(rows, now, column, columns, sums);
      for (; column < columns; ++column) {
        for (int64_t row = 0; row < now; ++row) {
          sums[column] += rows[row][column];
        }
      }
    }
  }
};

} // namespace

int32_t sum_of(const int8_t* values, int64_t count) {
  int32_t result;
  run<sum_values>(values, count, &result);
  return result;
}

void add_rows(const int8_t* const* rows, int64_t count, int64_t columns, int32_t* sums) {
  run_with_vectors<AddRows>(rows, count, columns, sums);
}

} // namespace torch_odt::kernels::int8
