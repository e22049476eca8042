// Products of small matrices of float32, at which libraries spend more time on preparing than on computing, and copy one
// of them whole.
#pragma once

#include <cstdint>

namespace torch_odt::kernels {

// result[row][column] = start[column] + sum over step of left(row, step) * right(step, column).
struct MatrixProduct {
  // left(row, step) is left[row * left_row + step * left_step].
  const float* left;
  int64_t left_row;
  int64_t left_step;
  // right(step, column) is right[step * right_line + column], or right[column * right_line + step] if it is transposed.
  // With `codes` it is their number at that place times the scale of its line, and `right` is not read.
  const float* right;
  const int8_t* codes;
  const float* scales;
  int64_t right_line;
  bool right_is_transposed;
  int64_t steps;
  // One number for each column, or null.
  const float* start;
  float* result;
  int64_t result_row;
};

// A part of the result.
struct MatrixBlock {
  int64_t first_row;
  int64_t last_row;
  int64_t first_column;
  int64_t last_column;
};

// Computes a part of the result. How it is cut into parts changes no bit.
void multiply(const MatrixProduct& product, const MatrixBlock& block);

} // namespace torch_odt::kernels
