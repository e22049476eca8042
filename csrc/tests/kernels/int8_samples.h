// Convolutions of int8 numbers with their exact results, summed in 64 bits by plain loops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/int8/conv2d.h"
#include "../check.h"

namespace torch_odt::tests {

using kernels::WindowAxis;
using kernels::int8::Conv2d;

inline WindowAxis axis(int64_t input, int64_t kernel, int64_t stride = 1, int64_t padding = 0, int64_t dilation = 1) {
  return {input, (input + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1, kernel, stride, padding, dilation};
}

enum class Values { random, lowest, highest, mixed_extremes };

struct Int8Sample {
  Conv2d conv;
  int32_t zero_point;
  std::vector<int8_t> input;
  std::vector<int8_t> weight;
  std::vector<int8_t> grad_output;

  Int8Sample(const Conv2d& of, int32_t input_zero_point, Values values);

  std::vector<int64_t> forward() const;
  std::vector<int64_t> grad_input() const;
  std::vector<int64_t> grad_weight() const;
  std::vector<int64_t> grad_bias() const;

 private:
  // Calls function(input, weight, output) with the places of every product; -1 is a place in the padding.
  template <typename Function>
  void for_each_product(const Function& function) const;
};

std::vector<Conv2d> int8_convolutions();
std::string text_of(const Conv2d& conv);

// Sums that the members of some threads computed, one after another, each its own part.
std::vector<int32_t> sums_by_members(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads);
std::vector<int32_t> grad_weight_sums_by_members(
    const Int8Sample& sample, int64_t threads, std::vector<int64_t>& grad_bias);

// A pass with one thread or as with several, all of which run after one another. Returns what the kernels return.
float run_pass(const Int8Sample& sample, kernels::int8::Pass pass, const kernels::int8::Finish& how, int64_t threads);
float run_packing(
    const Int8Sample& sample, kernels::int8::Pass pass, const kernels::int8::Finish& how, int64_t threads);
float run_grad_weight(
    const Int8Sample& sample, const kernels::int8::Finish& how, int64_t threads, std::vector<int64_t>& grad_bias);

std::vector<int32_t> sums_of(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads);
std::vector<int32_t> packing_sums_of(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads);
std::vector<int32_t> grad_weight_sums_of(const Int8Sample& sample, int64_t threads, std::vector<int64_t>& grad_bias);

} // namespace torch_odt::tests
