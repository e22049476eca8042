// Rows of numbers in int8, rounded stochastically: gradients, in fp32 or bfloat16, whose rows are pixels and whose
// columns are channels, and weights after an update.
#pragma once

#include <cstdint>

#include "../isa.h"
#include "../storage.h"
#include "threads.h"

namespace torch_odt::kernels::int8 {

struct Rows {
  const void* values; // fp32, or bfloat16 as below
  int64_t count;
  int64_t columns;
  // One bit an element, as pack_bits leaves them: where it is not set, the element counts as 0. Null for none.
  const uint8_t* mask = nullptr;
  // How many rows each row of values is there for, one after another: pixels whose gradient is the same, as behind a
  // pool of all of them.
  int64_t repeats = 1;
  bool in_bfloat16 = false; // not of weights

  // Where a row's values begin.
  TORCH_ODT_INLINE int64_t first_value(int64_t row) const {
    return (repeats == 1 ? row : row / repeats) * columns;
  }
};

// Calls body<Storage>() with the type of the values.
template <typename Body>
void with_storage(const Rows& rows, const Body& body) {
  if (rows.in_bfloat16) {
    body.template operator()<BFloat16>();
  } else {
    body.template operator()<float>();
  }
}

// Rows whose sums are added up in float, one after another; then such sums are added up in double, one after another.
inline constexpr int64_t kRowsOfSum = 256;

// The largest absolute value and the sum of each column. A largest one that is not finite says that the column holds
// something that is not.
int64_t scan_workspace_bytes(const Rows& rows);
void scan(const Rows& rows, const Threads& threads, float* largest, float* sums, void* workspace);

inline constexpr int64_t kPaddedColumns = 16;

// What becomes of rows: gradients times the factor of their column, or weights as they are, up or down by chance, clamped
// to -127 and 127. Weights draw 16 bits and gradients 8, see draws.h.
struct RoundedRows {
  int8_t* output;
  // kByteSteps times what the values are multiplied by, of products whose magnitude int32 holds; with readable numbers
  // behind the last up to a multiple of kPaddedColumns. Null for weights.
  const float* factors = nullptr;
};

// Rounds rows to one or two results, both by the same draws. Returns how many weights were clamped; of gradients nothing.
int64_t round_rows(
    const Rows& rows, uint64_t seed, const RoundedRows& first, const RoundedRows* second, const Threads& threads);

// Rows [begin, end), as one thread rounds them; adds to `clamped` where they are weights.
struct RowsPart {
  Rows rows;
  int64_t begin;
  int64_t end;
  uint64_t seed;
  RoundedRows first;
  RoundedRows second;
  int64_t clamped;
};

// Rows [begin, end), as one thread scans them, and where their columns' numbers go.
struct ScannedRows {
  Rows rows;
  int64_t begin;
  int64_t end;
  float* largest;
  float* sums;
};

} // namespace torch_odt::kernels::int8
