// What the tables do for depthwise convolutions, where each channel is a sum of its own. Rows of an image that lie below
// each other are packed as steps of four bytes, as those of a product's operand are: [16 channels][column][channel][4].
#pragma once

#include <cstdint>

#include "table.h"

namespace torch_odt::kernels::int8 {

// Sums of 16 channels for outputs side by side in a row.
struct DepthwiseRow {
  // For each step of the rows under the kernel, where its first column lies.
  const char* const* steps;
  int64_t row_steps;
  int64_t taps; // in each row
  int64_t outputs;
  int64_t step; // from one output to the next
  int64_t spacing; // from one tap to the next
  const char* weights; // [step of rows][tap][channel][4]
  int32_t* sums;
  int64_t sums_stride; // from one output to the next
};

// The gradient of 16 channels' weights over rows of outputs, as many as a step holds:
// sums[kernel row][tap] += grad_output * pixels, and grad_bias += grad_output.
struct DepthwiseGradient {
  const char* grad_output;
  // For each row of the kernel the rows that it sees from these outputs.
  const char* const* pixels;
  int64_t kernel_rows;
  int64_t taps;
  int64_t outputs;
  int64_t step;
  int64_t spacing;
  int32_t* sums;
  int64_t sums_stride; // from one tap to the next
  int32_t* grad_bias;
};

struct DepthwiseTable {
  // Pixels are packed as left operands with the depth along, weights and gradients as right ones.
  const Table& (*packing)();
  void (*sum_row)(const DepthwiseRow& row);
  void (*sum_gradient)(const DepthwiseGradient& rows);
};

// The table that goes with the one for products of matrices.
const DepthwiseTable& depthwise_table();

const DepthwiseTable& depthwise_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const DepthwiseTable& depthwise_avx2();
const DepthwiseTable& depthwise_avx512_vnni();
#endif

} // namespace torch_odt::kernels::int8
