#include "batch_norm_backward.h"

#include <vector>

#include "channel_sums.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

template <typename S, typename P, typename Activation>
struct GradientTerms {
  using Storage = S;
  using Parameter = P;
  // Rows of two tensors are as many streams as processors follow.
  static constexpr int64_t kPositionsAtOnce = 1;
  const Storage* gradient;
  Normalised<Storage, Parameter> normalised;
  Activation activation;

  TORCH_ODT_INLINE void prefetch(int64_t element) const {
    __builtin_prefetch(gradient + element);
    __builtin_prefetch(normalised.input + element);
  }
  TORCH_ODT_INLINE void add(int64_t element, int64_t channel, Parameter& sum, Parameter& product) const {
    const Parameter input = load(normalised.input[element]);
    const Parameter passed = activation.gradient(
        load(gradient[element]), scaled(input, normalised.scale[channel], normalised.shift[channel]));
    sum += passed;
    product += passed * (input - normalised.mean[channel]);
  }
};

template <typename Storage, typename Parameter, typename Activation>
TORCH_ODT_INLINE void sums_body(
    GradientTerms<Storage, Parameter, Activation> terms, Slices slices, int64_t begin, int64_t end, GradientSums sums) {
  for (int64_t task = begin; task < end; ++task) {
    sum_task(terms, slices, task, sums.gradient, sums.product);
  }
}

template <typename Storage, typename Parameter, typename Activation>
TORCH_ODT_INLINE Parameter input_gradient(
    Storage gradient,
    Storage value,
    Parameter mean,
    Parameter scale,
    Parameter shift,
    const Activation& activation,
    Parameter slope,
    Parameter mean_gradient,
    Parameter projection) {
  const Parameter input = load(value);
  const Parameter passed = activation.gradient(load(gradient), scaled(input, scale, shift));
  return (passed - mean_gradient - (input - mean) * projection) * slope;
}

template <typename Storage, typename Parameter, typename Activation>
TORCH_ODT_INLINE void rows_body(
    const Storage* gradient,
    Normalised<Storage, Parameter> normalised,
    Activation activation,
    GradientFactors<Parameter> factors,
    ChannelLayout layout,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  const Parameter* __restrict mean = normalised.mean;
  const Parameter* __restrict scale = normalised.scale;
  const Parameter* __restrict shift = normalised.shift;
  const Parameter* __restrict slope = factors.slope;
  const Parameter* __restrict mean_gradient = factors.mean_gradient;
  const Parameter* __restrict projection = factors.projection;
  const int64_t row_elements = layout.inner == 1 ? layout.channels : layout.inner;
  for (int64_t row = begin; row < end; ++row) {
    // The result may lie where the gradient does; of other overlaps nothing is said, so that the loops need a pragma.
    const Storage* g = gradient + row * row_elements;
    const Storage* __restrict x = normalised.input + row * row_elements;
    Storage* to = grad_input + row * row_elements;
    if (layout.inner == 1) {
#pragma GCC ivdep
      for (int64_t c = 0; c < row_elements; ++c) {
        store(
            input_gradient(
                g[c],
                x[c],
                mean[c],
                scale[c],
                shift[c],
                activation,
                slope[c],
                mean_gradient[c],
                projection[c]),
            to[c]);
      }
    } else {
      const int64_t c = row % layout.channels;
      const Parameter own[] = {mean[c], scale[c], shift[c], slope[c], mean_gradient[c], projection[c]};
#pragma GCC ivdep
      for (int64_t i = 0; i < row_elements; ++i) {
        store(
            input_gradient(g[i], x[i], own[0], own[1], own[2], activation, own[3], own[4], own[5]), to[i]);
      }
    }
  }
}

} // namespace

template <typename Storage, typename Parameter, typename Activation>
void sum_gradients(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const Activation& activation,
    const Slices& slices,
    int64_t begin,
    int64_t end,
    const GradientSums& sums) {
  const GradientTerms<Storage, Parameter, Activation> terms{gradient, normalised, activation};
  run<sums_body<Storage, Parameter, Activation>>(terms, slices, begin, end, sums);
}

template <typename Parameter>
void finish_gradients(
    const GradientSums& sums,
    const Slices& slices,
    const Parameter* invstd,
    const Parameter* weight,
    const GradientFactors<Parameter>& factors,
    Parameter* grad_weight,
    Parameter* grad_bias) {
  const int64_t channels = slices.layout.channels;
  const auto values = static_cast<double>(slices.layout.count());
  std::vector<double> gradients(static_cast<size_t>(channels));
  std::vector<double> products(static_cast<size_t>(channels));
  for (int64_t slice = 0; slice < slices.number; ++slice) {
    for (int64_t c = 0, at = slice * channels; c < channels; ++c, ++at) {
      gradients[c] += sums.gradient[at];
      products[c] += sums.product[at];
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    const double deviation = invstd[c];
    grad_weight[c] = static_cast<Parameter>(products[c] * deviation);
    grad_bias[c] = static_cast<Parameter>(gradients[c]);
    factors.slope[c] = weight == nullptr ? invstd[c] : invstd[c] * weight[c];
    factors.mean_gradient[c] = static_cast<Parameter>(gradients[c] / values);
    factors.projection[c] = static_cast<Parameter>(products[c] * deviation * deviation / values);
  }
}

template <typename Storage, typename Parameter, typename Activation>
void input_gradient_rows(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const Activation& activation,
    const GradientFactors<Parameter>& factors,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  run<rows_body<Storage, Parameter, Activation>>(
      gradient, normalised, activation, factors, layout, begin, end, grad_input);
}

#define TORCH_ODT_INSTANTIATE(Storage, Parameter, ...) \
  template void sum_gradients(                         \
      const Storage*,                                  \
      const Normalised<Storage, Parameter>&,           \
      const __VA_ARGS__&,                              \
      const Slices&,                                   \
      int64_t,                                         \
      int64_t,                                         \
      const GradientSums&);                            \
  template void input_gradient_rows(                   \
      const Storage*,                                  \
      const Normalised<Storage, Parameter>&,           \
      const __VA_ARGS__&,                              \
      const GradientFactors<Parameter>&,               \
      const ChannelLayout&,                            \
      int64_t,                                         \
      int64_t,                                         \
      Storage*);
TORCH_ODT_FOR_ACTIVATIONS(TORCH_ODT_INSTANTIATE)
#undef TORCH_ODT_INSTANTIATE
template void finish_gradients(
    const GradientSums&, const Slices&, const float*, const float*, const GradientFactors<float>&, float*, float*);
template void finish_gradients(
    const GradientSums&, const Slices&, const double*, const double*, const GradientFactors<double>&, double*, double*);

} // namespace torch_odt::kernels
