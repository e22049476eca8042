#include "matrix_product.h"

#include <algorithm>

#include "float_vectors.h"

namespace torch_odt::kernels {

namespace {

// Steps whose lines of a transposed matrix are brought into order at once: with two of the widest vectors 16 KiB, half
// of what a small processor keeps closest.
constexpr int64_t kStepsAtOnce = 128;
// Rows that share them: enough for bringing them into order to count for little, few enough to stay close, too.
constexpr int64_t kRowsAtOnce = 256;

// Sums that are kept in registers: AVX-512 has 32 of them, AVX2 has 16, and one vector is needed for each right-hand side.
template <int kBytes>
constexpr int kMostRows = kBytes == 64 ? 8 : 4;

// Some steps of a product, from the first number of some rows and columns on.
struct Terms {
  const float* left;
  int64_t left_row;
  int64_t left_step;
  const float* right;
  int64_t right_step;
  int64_t steps;
  // Where the first steps start, the same in each row; null is zero.
  const float* start;
  // Later steps are summed up by themselves, and added: sums of few terms are rounded less.
  bool adds;
  float* result;
  int64_t result_row;
};

template <int kBytes, int kVectors, int kRows>
TORCH_ODT_INLINE void add_tile(const Terms& terms, int64_t row) {
  using Vector = FloatVector<kBytes>;
  typename Vector::Type sums[kRows][kVectors];
  const float* const left = terms.left + row * terms.left_row;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] =
          terms.start == nullptr ? typename Vector::Type{} : Vector::load(terms.start + v * Vector::kCount);
    }
  }
  for (int64_t step = 0; step < terms.steps; ++step) {
    typename Vector::Type right[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      right[v] = Vector::load(terms.right + step * terms.right_step + v * Vector::kCount);
    }
    for (int r = 0; r < kRows; ++r) {
      const float factor = left[r * terms.left_row + step * terms.left_step];
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += factor * right[v];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* const to = terms.result + (row + r) * terms.result_row + v * Vector::kCount;
      Vector::store(terms.adds ? Vector::load(to) + sums[r][v] : sums[r][v], to);
    }
  }
}

// All rows of some columns, as many as `kVectors` hold.
template <int kBytes, int kVectors>
TORCH_ODT_INLINE void add_rows(const Terms& terms, int64_t rows) {
  constexpr int kRows = kMostRows<kBytes>;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    add_tile<kBytes, kVectors, kRows>(terms, row);
  }
  if constexpr (kRows > 4) {
    for (; row + 4 <= rows; row += 4) {
      add_tile<kBytes, kVectors, 4>(terms, row);
    }
  }
  for (; row < rows; ++row) {
    add_tile<kBytes, kVectors, 1>(terms, row);
  }
}

using Four = FloatVector<16>;

// Neighbours of a line: numbers, or codes times the line's scale.
TORCH_ODT_INLINE Four::Type four_of(const float* from, const float* /*scales*/, int64_t /*index*/) {
  return Four::load(from);
}
TORCH_ODT_INLINE Four::Type four_of(const int8_t* from, const float* scales, int64_t index) {
  const Four::Type numbers{
      static_cast<float>(from[0]),
      static_cast<float>(from[1]),
      static_cast<float>(from[2]),
      static_cast<float>(from[3])};
  return numbers * scales[index];
}
TORCH_ODT_INLINE float one_of(const float* from, const float* /*scales*/, int64_t /*index*/) {
  return *from;
}
TORCH_ODT_INLINE float one_of(const int8_t* from, const float* scales, int64_t index) {
  return static_cast<float>(*from) * scales[index];
}

// Four lines of four numbers, turned.
template <typename Number>
TORCH_ODT_INLINE void turn_four(
    const Number* from, int64_t line, const float* scales, int64_t index, float* to, int64_t columns) {
  const auto a = four_of(from, scales, index);
  const auto b = four_of(from + line, scales, index + 1);
  const auto c = four_of(from + 2 * line, scales, index + 2);
  const auto d = four_of(from + 3 * line, scales, index + 3);
  const auto ab_low = TORCH_ODT_SHUFFLE(a, b, 0, 4, 1, 5);
  const auto cd_low = TORCH_ODT_SHUFFLE(c, d, 0, 4, 1, 5);
  const auto ab_high = TORCH_ODT_SHUFFLE(a, b, 2, 6, 3, 7);
  const auto cd_high = TORCH_ODT_SHUFFLE(c, d, 2, 6, 3, 7);
  Four::store(TORCH_ODT_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5), to);
  Four::store(TORCH_ODT_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7), to + columns);
  Four::store(TORCH_ODT_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5), to + 2 * columns);
  Four::store(TORCH_ODT_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7), to + 3 * columns);
}

// Lines of a transposed matrix, side by side: to[step * kColumns + column] = from[column * line + step].
template <int64_t kColumns, typename Number>
TORCH_ODT_INLINE void turn_lines(const Number* from, int64_t line, const float* scales, int64_t steps, float* to) {
  int64_t step = 0;
  if constexpr (kColumns % 4 == 0) {
    for (; step + 4 <= steps; step += 4) {
      for (int64_t column = 0; column < kColumns; column += 4) {
        turn_four(from + column * line + step, line, scales, column, to + step * kColumns + column, kColumns);
      }
    }
  }
  for (; step < steps; ++step) {
    for (int64_t column = 0; column < kColumns; ++column) {
      to[step * kColumns + column] = one_of(from + column * line + step, scales, column);
    }
  }
}

template <int64_t kColumns>
TORCH_ODT_INLINE void decode_lines(
    const int8_t* codes, int64_t line, const float* scales, int64_t steps, float* to) {
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t column = 0; column < kColumns; ++column) {
      to[step * kColumns + column] = one_of(codes + step * line + column, scales, step);
    }
  }
}

// The right-hand side of some steps and columns: where it lies, or as numbers of `in_order`.
template <int64_t kColumns>
TORCH_ODT_INLINE const float* right_of(
    const MatrixProduct& product, int64_t step, int64_t steps, int64_t column, float* in_order) {
  const int64_t line = product.right_line;
  const int64_t across = column * line + step;
  const int64_t along = step * line + column;
  if (product.codes == nullptr && !product.right_is_transposed) {
    return product.right + along;
  }
  if (product.codes == nullptr) {
    turn_lines<kColumns>(product.right + across, line, nullptr, steps, in_order);
  } else if (product.right_is_transposed) {
    turn_lines<kColumns>(product.codes + across, line, product.scales + column, steps, in_order);
  } else {
    decode_lines<kColumns>(product.codes + along, line, product.scales + step, steps, in_order);
  }
  return in_order;
}

// All rows of as many columns as `kVectors` hold, some steps at a time: their lines stay close until no row needs them.
template <int kBytes, int kVectors>
TORCH_ODT_INLINE void multiply_columns(const MatrixProduct& product, const MatrixBlock& block, int64_t column) {
  constexpr int64_t kColumns = kVectors * FloatVector<kBytes>::kCount;
  alignas(64) float in_order[kStepsAtOnce * kColumns];
  const float* const left = product.left + block.first_row * product.left_row;
  float* const result = product.result + block.first_row * product.result_row + column;
  const bool is_in_place = product.codes == nullptr && !product.right_is_transposed;
  Terms terms{
      .left = left,
      .left_row = product.left_row,
      .left_step = product.left_step,
      .right = in_order,
      .right_step = is_in_place ? product.right_line : kColumns,
      .steps = 0,
      .start = product.start == nullptr ? nullptr : product.start + column,
      .adds = false,
      .result = result,
      .result_row = product.result_row};
  // Without steps the result is where it starts.
  int64_t step = 0;
  do {
    terms.steps = std::min(kStepsAtOnce, product.steps - step);
    terms.left = left + step * product.left_step;
    if (terms.steps > 0) {
      terms.right = right_of<kColumns>(product, step, terms.steps, column, in_order);
    }
    add_rows<kBytes, kVectors>(terms, block.last_row - block.first_row);
    terms.start = nullptr;
    terms.adds = true;
    step += terms.steps;
  } while (step < product.steps);
}

template <int kBytes>
TORCH_ODT_INLINE void multiply_from(const MatrixProduct& product, const MatrixBlock& block, int64_t column) {
  constexpr int64_t kCount = FloatVector<kBytes>::kCount;
  for (; column + 2 * kCount <= block.last_column; column += 2 * kCount) {
    multiply_columns<kBytes, 2>(product, block, column);
  }
  for (; column + kCount <= block.last_column; column += kCount) {
    multiply_columns<kBytes, 1>(product, block, column);
  }
  if constexpr (kBytes > 4) {
    if (column < block.last_column) {
      multiply_from<kNarrower<kBytes>>(product, block, column);
    }
  }
}

template <int kBytes>
struct Multiply {
  TORCH_ODT_INLINE static void run(const MatrixProduct* product, const MatrixBlock* block) {
    for (int64_t row = block->first_row; row < block->last_row; row += kRowsAtOnce) {
      const int64_t last = std::min(row + kRowsAtOnce, block->last_row);
      const MatrixBlock part{row, last, block->first_column, block->last_column};
      multiply_from<kBytes>(*product, part, part.first_column);
    }
  }
};

} // namespace

void multiply(const MatrixProduct& product, const MatrixBlock& block) {
  run_with_vectors<Multiply>(&product, &block);
}

} // namespace torch_odt::kernels
