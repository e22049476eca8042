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
          check_sums(grad_weight_sums_of(sample, threads), sample.grad_weight());
        }
      }
    }
  }
}

} // namespace
} // namespace torch_odt::tests
