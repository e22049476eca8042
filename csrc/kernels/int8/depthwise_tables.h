// What the tables do for depthwise convolutions, where each channel is a sum of its own: steps are four pixels.
#pragma once

#include <cstdint>

namespace torch_odt::kernels::int8 {

// Sums for outputs side by side in a row: in each kernel row, four pixels at a time (a window) are multiplied by the
// weights of the outputs that they take part in. Outputs come in groups, whose windows are the same: of two where taps
// lie side by side, so that neighbours share pixels, and of one elsewhere.
struct DepthwiseRow {
  // Where each pixel's channels begin, for every kernel row: pixels_stride pointers, those in the padding included.
  const int8_t* const* pixels;
  int64_t pixels_stride;
  int64_t kernel_rows;
  int64_t windows;
  int64_t outputs;
  int64_t group;
  int64_t step; // from one output to the next
  int64_t spacing; // from one tap to the next
  int64_t first_channel;
  int64_t channels;
  // [kernel row][window][output of the group][channel][4 taps]
  const int8_t* weights;
  int64_t weights_stride; // bytes from one output of the group to the next
  // [output][channel], from the first channel on: whole groups, and channels filled up to 16.
  int32_t* sums;
  int64_t sums_stride;
};

// The sums of one kernel row's gradient over a row of outputs: sums[tap][channel] += grad_output * input.
struct DepthwiseGradient {
  // Where each pixel's channels begin; those behind the last output point at zeros.
  const int8_t* const* grad_output;
  const int8_t* const* pixels;
  int64_t outputs; // a multiple of four
  int64_t taps;
  int64_t step;
  int64_t spacing;
  int64_t channels;
  // Filled up to 16 channels.
  int32_t* sums;
  int64_t sums_stride;
};

struct DepthwiseTable {
  // Pixels are multiplied as unsigned, each greater by this.
  int32_t pixel_offset;
  void (*sum_row)(const DepthwiseRow& row);
  void (*sum_gradient)(const DepthwiseGradient& row);
};

// The table that goes with the one for products of matrices.
const DepthwiseTable& depthwise_table();

const DepthwiseTable& depthwise_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const DepthwiseTable& depthwise_avx2();
const DepthwiseTable& depthwise_avx512_vnni();
#endif

} // namespace torch_odt::kernels::int8
