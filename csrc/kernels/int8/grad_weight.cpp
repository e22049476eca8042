#include <algorithm>
#include <vector>

#include "block_gradient.h"
#include "conv2d.h"
#include "depthwise.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows of outputs whose sums int32 holds, and pixels that the workspace has room for; others are cut elsewhere.
bool goes_by_lines(const Conv2d& conv, const Threads& threads) {
  return conv.depthwise() && conv.columns.output <= kMostDepth &&
      depthwise_grad_weight_workspace_bytes(conv, threads) <= kMostWorkspaceBytes;
}

bool is_empty(const Conv2d& conv) {
  return conv.out_channels == 0 || conv.in_channels == 0;
}

float share_pixels(
    const Conv2d& conv,
    const GradientCut& cut,
    const Operands& operands,
    int64_t* grad_bias,
    const Finish& how,
    const Threads& threads,
    char* workspace,
    int64_t thread_bytes) {
  std::vector<BlockGradient> parts;
  for (int64_t part = 0; part < cut.pixel_parts; ++part) {
    parts.emplace_back(conv, cut, operands, workspace + part * thread_bytes);
  }
  const int64_t pixels = conv.out_pixels();
  threads.share(cut.pixel_parts, [&](int64_t, int64_t begin, int64_t end) {
    const Multiplying multiplying(*cut.kernels);
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = std::min(pixels, part * cut.part_pixels(pixels));
      parts[static_cast<size_t>(part)].sum_pixels(first, std::min(pixels, first + cut.part_pixels(pixels)));
    }
  });
  BlockGradient& sum = parts.front();
  for (size_t part = 1; part < parts.size(); ++part) {
    sum.add_terms(parts[part]);
  }
  std::copy_n(sum.bias(), conv.out_channels, grad_bias);
  constexpr int64_t kRows = 32;
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  threads.share(divided(conv.out_channels, kRows), [&](int64_t thread, int64_t begin, int64_t end) {
    float& most = largest[static_cast<size_t>(thread)];
    for (int64_t first = begin * kRows; first < std::min(conv.out_channels, end * kRows); first += kRows) {
      const int64_t rows = std::min(kRows, conv.out_channels - first);
      for (size_t part = 1; part < parts.size(); ++part) {
        sum.add_rows_of(parts[part], first, rows);
      }
      most = std::max(most, sum.finish_rows(first, rows, how));
    }
  });
  return *std::max_element(largest.begin(), largest.end());
}

// Without weights there is still a bias.
void sum_bias(const Conv2d& conv, const int8_t* grad_output, int64_t* grad_bias) {
  std::fill_n(grad_bias, conv.out_channels, 0);
  for (int64_t pixel = 0; pixel < conv.out_pixels(); ++pixel) {
    for (int64_t channel = 0; channel < conv.out_channels; ++channel) {
      grad_bias[channel] += grad_output[pixel * conv.out_channels + channel];
    }
  }
}

} // namespace

int64_t grad_weight_workspace_bytes(const Conv2d& conv, const Threads& threads) {
  if (is_empty(conv)) {
    return 0;
  }
  if (goes_by_lines(conv, threads)) {
    return depthwise_grad_weight_workspace_bytes(conv, threads);
  }
  return GradientWorkspace(GradientCut(conv, threads), nullptr).pieces.bytes();
}

bool grad_weight_parts_are_independent(const Conv2d& conv, const Threads& threads) {
  if (is_empty(conv)) {
    return false;
  }
  return goes_by_lines(conv, threads) ? !shares_samples(conv, threads) : GradientCut(conv, threads).pixel_parts == 1;
}

float grad_weight(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* input,
    int32_t zero_point,
    int64_t* grad_bias,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  if (is_empty(conv)) {
    sum_bias(conv, grad_output, grad_bias);
    return 0;
  }
  if (goes_by_lines(conv, threads)) {
    return depthwise_grad_weight(conv, grad_output, input, zero_point, grad_bias, how, threads, workspace);
  }
  const GradientCut cut(conv, threads);
  const Operands operands{grad_output, input, zero_point};
  const int64_t thread_bytes = grad_weight_workspace_bytes(conv, threads);
  if (cut.pixel_parts > 1) {
    return share_pixels(conv, cut, operands, grad_bias, how, threads, static_cast<char*>(workspace), thread_bytes);
  }
  const int64_t blocks = cut.row_blocks * cut.column_blocks;
  std::vector<float> largest(static_cast<size_t>(threads.count), 0.0F);
  threads.share(conv.groups * blocks, [&](int64_t thread, int64_t begin, int64_t end) {
    const Multiplying multiplying(*cut.kernels);
    BlockGradient block(conv, cut, operands, static_cast<char*>(workspace) + thread * thread_bytes);
    float& most = largest[static_cast<size_t>(thread)];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column_block = item % blocks / cut.row_blocks;
      most = std::max(most, block(item / blocks, item % cut.row_blocks, column_block, grad_bias, how));
    }
  });
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
