// Gradient descent of int8 weights: a step of float32, rounded stochastically, in one pass.
#pragma once

#include <cstdint>

#include "threads.h"

namespace torch_odt::kernels::int8 {

// Each weight w becomes w - rate * (gradient + decay * w), up or down by chance, clamped to -127 and 127. What is drawn is
// what round_rows draws for weights.
struct Descent {
  const float* gradients;
  int8_t* weights;
  int64_t rows;
  int64_t columns;
  float rate;
  float decay;
  uint64_t seed;
};

struct Descended {
  int64_t clamped;
  // False if a result could be NaN or infinite before it is rounded; the weights are as they were then.
  bool is_finite;
};

// Rows [begin, end), as one thread takes them; adds to `clamped`.
struct DescentPart {
  Descent how;
  int64_t begin;
  int64_t end;
  int64_t clamped;
};

Descended descend(const Descent& how, const Threads& threads);

} // namespace torch_odt::kernels::int8
