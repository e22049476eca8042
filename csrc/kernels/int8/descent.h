// Gradient descent of int8 weights: a step of float32, rounded stochastically, in one pass.
#pragma once

#include <cstdint>

#include "threads.h"

namespace torch_odt::kernels::int8 {

// Each weight w becomes w - (rate * gradient + shrink * w), up or down by chance, clamped to -127 and 127. What is drawn
// is what round_rows draws for weights.
struct Descent {
  const float* gradients;
  int8_t* weights;
  int64_t rows;
  int64_t columns;
  const float* rates; // of each row
  float shrink;
  uint64_t seed;
};

struct Descended {
  int64_t clamped;
  // False if a result could be NaN or infinite before it is rounded; the weights are as they were then.
  bool is_finite;
};

// Some columns of some rows, as one thread takes them; adds to `clamped`.
struct DescentPart {
  const float* rates;
  float shrink;
  uint64_t seed;
  const float* gradients;
  int64_t gradients_stride;
  int8_t* weights;
  int64_t weights_stride;
  int64_t rows;
  int64_t columns;
  int64_t begins; // the place of the first row, see draws.h
  int64_t first_column; // a multiple of 16, or that of a single column
  int64_t clamped;
};

void descend_part(DescentPart& part);

// Whether no weight can become infinite or NaN where rate times gradient is of this magnitude at most.
bool descent_stays_finite(float largest_step, float shrink);

Descended descend(const Descent& how, const Threads& threads);

} // namespace torch_odt::kernels::int8
