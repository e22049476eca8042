// What the tables do for depthwise convolutions, where each channel is a sum of its own. Rows of an image that lie below
// each other are packed as steps of four bytes, as those of a product's operand are: [16 channels][column][channel][4].
#pragma once

#include <cstdint>

#include "table.h"

namespace torch_odt::kernels::int8 {

// Sums for outputs side by side in rows that see the same steps.
struct DepthwiseRows {
  // For each step of the rows under the kernel, where its first column lies.
  const char* const* steps;
  int64_t row_steps;
  int64_t taps; // in each row
  int64_t lines;
  int64_t outputs; // of a line
  int64_t step; // from one output to the next
  int64_t spacing; // from one tap to the next
  int64_t blocks; // of 16 channels
  int64_t steps_block_bytes;
  const char* weights; // [line][step of rows][tap][channel][4]
  int64_t weights_block_bytes;
  int64_t weights_line_bytes;
  int32_t* sums; // [line][output][channel]
  int64_t sums_stride; // from one output to the next
};

// The gradient of weights over rows of outputs, as many as a step holds: sums[kernel row][tap] += grad_output * pixels,
// and grad_bias += grad_output, unless it is null because packing has added that up.
struct DepthwiseGradient {
  const char* grad_output;
  int64_t grad_output_block_bytes;
  // For each row of the kernel the rows that it sees from these outputs.
  const char* const* pixels;
  int64_t pixels_block_bytes;
  int64_t kernel_rows;
  int64_t taps;
  int64_t outputs;
  int64_t step;
  int64_t spacing;
  int64_t blocks;
  int32_t* sums;
  int64_t sums_stride; // from one tap to the next
  int32_t* grad_bias;
};

// The same sums straight from the image, where one step holds all rows under the kernel: of one step for each output, or
// of three taps side by side, one or two columns from one output to the next.
struct DepthwiseColumns {
  // The first channels of each step's four pixels.
  const int8_t* const* pixels;
  int64_t column_pixels; // from one column to the next
  int64_t taps;
  int64_t step;
  int64_t lines;
  int64_t outputs;
  int64_t channels;
  const char* weights; // as in DepthwiseRows, of any number of lines
  int64_t weights_block_bytes;
  int64_t weights_line_bytes;
  const int32_t* terms; // added to the sums of each channel, for whole blocks
  int64_t terms_stride; // from one line to the next
  int32_t* sums;
  int64_t sums_stride; // from one output to the next
  const int64_t* line_sums; // where each line begins
};

// The same gradient straight from both images, for kernels of three by three and one or two pixels from one output to
// the next: each column of pixels has those that four rows of outputs see.
struct DepthwiseColumnsGradient {
  const int8_t* const* grad_outputs; // [output][4]
  const int8_t* const* pixels; // [column][3 + 3 * step]
  int64_t step;
  int64_t outputs;
  int64_t channels;
  int32_t* sums; // [kernel row][tap][channel], whole 64 channels in the order of lanes
  int64_t sums_stride;
  int32_t* grad_bias; // in the same order
};

struct DepthwiseTable {
  // Pixels are packed as left operands with the depth along, weights and gradients as right ones.
  const Table& (*packing)();
  void (*sum_rows)(const DepthwiseRows& rows);
  void (*sum_gradient)(const DepthwiseGradient& rows);
  // Null where a set has no such functions.
  void (*sum_columns)(const DepthwiseColumns& columns) = nullptr;
  void (*sum_columns_gradient)(const DepthwiseColumnsGradient& columns) = nullptr;
};

// Calls sum(part, steps, weights, sums) for every line of every block: those of the rows alone.
template <auto sum>
TORCH_ODT_INLINE void sum_lines(const DepthwiseRows& of) {
  for (int64_t block = 0; block < of.blocks; ++block) {
    for (int64_t line = 0; line < of.lines; ++line) {
      sum(of,
          block * of.steps_block_bytes,
          of.weights + block * of.weights_block_bytes + line * of.weights_line_bytes,
          of.sums + line * of.outputs * of.sums_stride + block * kPanelColumns);
    }
  }
}

// The table that goes with the one for products of matrices.
const DepthwiseTable& depthwise_table();

const DepthwiseTable& depthwise_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const DepthwiseTable& depthwise_avx2();
const DepthwiseTable& depthwise_avx512_vnni();
void depthwise_sum_columns_avx512_vnni(const DepthwiseColumns& columns);
void depthwise_sum_columns_gradient_avx512_vnni(const DepthwiseColumnsGradient& columns);
#endif

} // namespace torch_odt::kernels::int8
