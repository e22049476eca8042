// Convolutions of int8 numbers: exactly what plain loops sum up, whatever the shape, the values and the threads.

#include <vector>

#include "int8_samples.h"

namespace torch_odt::tests {
namespace {

using kernels::int8::Pass;

void check_sums(const std::vector<int32_t>& sums, const std::vector<int64_t>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (sums[i] != expected[i]) {
      CHECK_EQUAL(sums[i], expected[i]);
      return;
    }
  }
  CHECK_EQUAL(sums.size(), expected.size());
}

TEST(int8_convolutions_and_their_gradients_are_exact) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    for (const int32_t zero_point : {0, -128, 5}) {
      const Int8Sample sample(conv, zero_point, Values::random);
      const Context with("zero point " + text_of(zero_point));
      for (const int64_t threads : {1, 3}) {
        const Context by("threads " + text_of(threads));
        {
          const Context pass("forward");
          check_sums(sums_of(sample, Pass::forward, threads), sample.forward());
        }
        {
          const Context pass("grad_input");
          check_sums(sums_of(sample, Pass::grad_input, threads), sample.grad_input());
        }
        {
          const Context pass("grad_weight");
          std::vector<int64_t> grad_bias;
          check_sums(grad_weight_sums_of(sample, threads, grad_bias), sample.grad_weight());
          CHECK(grad_bias == sample.grad_bias());
        }
      }
    }
  }
}

TEST(int8_convolutions_of_extremes_are_exact) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    for (const Values values : {Values::lowest, Values::highest, Values::mixed_extremes}) {
      const Int8Sample sample(conv, values == Values::lowest ? 127 : 0, values);
      check_sums(sums_of(sample, Pass::forward, 1), sample.forward());
      check_sums(sums_of(sample, Pass::grad_input, 1), sample.grad_input());
      std::vector<int64_t> grad_bias;
      check_sums(grad_weight_sums_of(sample, 1, grad_bias), sample.grad_weight());
    }
  }
}

TEST(workspaces_are_small) {
  using kernels::int8::grad_weight_workspace_bytes;
  using kernels::int8::workspace_bytes;
  const std::vector<Conv2d> large = {
      {8, axis(224, 3, 2, 1), axis(224, 3, 2, 1), 3, 64, 1},
      {8, axis(56, 3, 1, 1), axis(56, 3, 1, 1), 64, 64, 1},
      {8, axis(7, 3, 1, 1), axis(7, 3, 1, 1), 512, 512, 1},
      {8, axis(7, 1), axis(7, 1), 2048, 512, 1},
      {8, axis(7, 1), axis(7, 1), 512, 2048, 1},
      {512, axis(1, 1), axis(1, 1), 4096, 4096, 1},
      {8, axis(112, 3, 1, 1), axis(112, 3, 1, 1), 96, 96, 96},
  };
  for (const Conv2d& conv : large) {
    const Context here(text_of(conv));
    constexpr int64_t kMost = 2000000;
    CHECK(workspace_bytes(conv, Pass::forward) < kMost);
    CHECK(workspace_bytes(conv, Pass::grad_input) < kMost);
    CHECK(grad_weight_workspace_bytes(conv, {}) < kMost);
  }
}

} // namespace
} // namespace torch_odt::tests
