#include "batch_norm_residual_backward.h"

#include "channel_sums.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

template <typename S, typename P>
struct PassedTerms {
  using Storage = S;
  using Parameter = P;
  // Rows of four tensors are more streams than processors follow.
  static constexpr int64_t kPositionsAtOnce = 1;
  const Storage* gradient;
  ClampedSum<Storage, Parameter> sum;
  Storage* passed;

  TORCH_ODT_INLINE void prefetch(int64_t element) const {
    __builtin_prefetch(gradient + element);
    __builtin_prefetch(sum.output + element);
    __builtin_prefetch(sum.input + element);
  }
  TORCH_ODT_INLINE void add(int64_t element, int64_t channel, Parameter& total, Parameter& product) const {
    const Parameter value = sum.clamp.gradient(load(gradient[element]), load(sum.output[element]));
    store(value, passed[element]);
    total += value;
    product += value * (load(sum.input[element]) - sum.mean[channel]);
  }
};

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void sums_body(
    PassedTerms<Storage, Parameter> terms, Slices slices, int64_t begin, int64_t end, GradientSums sums) {
  for (int64_t task = begin; task < end; ++task) {
    sum_task(terms, slices, task, sums.gradient, sums.product);
  }
}

} // namespace

template <typename Storage, typename Parameter>
void pass_and_sum_gradients(
    const Storage* gradient,
    const ClampedSum<Storage, Parameter>& sum,
    const Slices& slices,
    int64_t begin,
    int64_t end,
    Storage* passed,
    const GradientSums& sums) {
  const PassedTerms<Storage, Parameter> terms{gradient, sum, passed};
  run<sums_body<Storage, Parameter>>(terms, slices, begin, end, sums);
}

#define TORCH_ODT_INSTANTIATE(Storage, Parameter) \
  template void pass_and_sum_gradients(           \
      const Storage*,                             \
      const ClampedSum<Storage, Parameter>&,      \
      const Slices&,                              \
      int64_t,                                    \
      int64_t,                                    \
      Storage*,                                   \
      const GradientSums&);
TORCH_ODT_INSTANTIATE(float, float)
TORCH_ODT_INSTANTIATE(double, double)
TORCH_ODT_INSTANTIATE(BFloat16, float)
#undef TORCH_ODT_INSTANTIATE

} // namespace torch_odt::kernels
