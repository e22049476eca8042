#include "batch_norm_backward.h"

#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "channel_sums.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

// The largest number that is stored as the bound or less; the bound is a value of the storage's type.
template <typename Storage, typename Parameter>
Parameter last_stored_within(Parameter bound) {
  if constexpr (std::is_same_v<Storage, Parameter>) {
    return bound;
  } else {
    // A step up is stored as the bound again, or as 0 where that is -0: what follows it has the next bits.
    Storage next;
    store(std::nextafter(bound, std::numeric_limits<Parameter>::infinity()), next);
    next.bits = static_cast<uint16_t>(bound < 0 ? next.bits - 1 : next.bits + 1);
    const Parameter middle = bound + (load(next) - bound) / 2;
    return rounded<Storage>(middle) <= bound ? middle : std::nextafter(middle, bound);
  }
}

// Where a gradient ends: at a bound and beyond it, once the output is stored. An infinite bound is none, not even for
// an infinite output, and NaNs are passed; comparing with a NaN says both.
template <typename Storage, typename Parameter>
Bounds<Parameter> borders(const Bounds<Parameter>& bounds) {
  constexpr Parameter kNone = std::numeric_limits<Parameter>::quiet_NaN();
  return {
      std::isinf(bounds.low) ? kNone : last_stored_within<Storage>(bounds.low),
      std::isinf(bounds.high) ? kNone : -last_stored_within<Storage>(-bounds.high)};
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE Parameter
clamped_gradient(Storage gradient, Parameter input, Parameter scale, Parameter shift, const Bounds<Parameter>& border) {
  const Parameter output = input * scale + shift;
  // Out of bits and not of branches, which keep compilers from using vectors. An infinite gradient becomes 0 too.
  using Bits = std::conditional_t<sizeof(Parameter) == 4, uint32_t, uint64_t>;
  const Bits ends = Bits{output <= border.low} | Bits{output >= border.high};
  return std::bit_cast<Parameter>(std::bit_cast<Bits>(load(gradient)) & (ends - 1));
}

template <typename S, typename P>
struct GradientTerms {
  using Storage = S;
  using Parameter = P;
  // Rows of two tensors are as many streams as processors follow.
  static constexpr int64_t kPositionsAtOnce = 1;
  const Storage* gradient;
  Normalised<Storage, Parameter> normalised;

  TORCH_ODT_INLINE void prefetch(int64_t element) const {
    __builtin_prefetch(gradient + element);
    __builtin_prefetch(normalised.input + element);
  }
  TORCH_ODT_INLINE void add(int64_t element, int64_t channel, Parameter& sum, Parameter& product) const {
    const Parameter input = load(normalised.input[element]);
    const Parameter passed = clamped_gradient(
        gradient[element], input, normalised.scale[channel], normalised.shift[channel], normalised.bounds);
    sum += passed;
    product += passed * (input - normalised.mean[channel]);
  }
};

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void sums_body(
    GradientTerms<Storage, Parameter> terms, Slices slices, int64_t begin, int64_t end, GradientSums sums) {
  for (int64_t task = begin; task < end; ++task) {
    sum_task(terms, slices, task, sums.gradient, sums.product);
  }
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE Parameter input_gradient(
    Storage gradient,
    Storage value,
    Parameter mean,
    Parameter scale,
    Parameter shift,
    const Bounds<Parameter>& border,
    Parameter slope,
    Parameter mean_gradient,
    Parameter projection) {
  const Parameter input = load(value);
  const Parameter passed = clamped_gradient(gradient, input, scale, shift, border);
  return (passed - mean_gradient - (input - mean) * projection) * slope;
}

template <typename Storage, typename Parameter>
TORCH_ODT_INLINE void rows_body(
    const Storage* gradient,
    Normalised<Storage, Parameter> normalised,
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
    const Storage* __restrict g = gradient + row * row_elements;
    const Storage* __restrict x = normalised.input + row * row_elements;
    Storage* __restrict to = grad_input + row * row_elements;
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
                normalised.bounds,
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
            input_gradient(g[i], x[i], own[0], own[1], own[2], normalised.bounds, own[3], own[4], own[5]), to[i]);
      }
    }
  }
}

} // namespace

template <typename Storage, typename Parameter>
void sum_gradients(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const Slices& slices,
    int64_t begin,
    int64_t end,
    const GradientSums& sums) {
  GradientTerms<Storage, Parameter> terms{gradient, normalised};
  terms.normalised.bounds = borders<Storage>(normalised.bounds);
  run<sums_body<Storage, Parameter>>(terms, slices, begin, end, sums);
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

template <typename Storage, typename Parameter>
void input_gradient_rows(
    const Storage* gradient,
    const Normalised<Storage, Parameter>& normalised,
    const GradientFactors<Parameter>& factors,
    const ChannelLayout& layout,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  Normalised<Storage, Parameter> bordered = normalised;
  bordered.bounds = borders<Storage>(normalised.bounds);
  run<rows_body<Storage, Parameter>>(gradient, bordered, factors, layout, begin, end, grad_input);
}

#define TORCH_ODT_INSTANTIATE(Storage, Parameter)             \
  template void sum_gradients(                                \
      const Storage*,                                         \
      const Normalised<Storage, Parameter>&,                  \
      const Slices&,                                          \
      int64_t,                                                \
      int64_t,                                                \
      const GradientSums&);                                   \
  template void input_gradient_rows(                          \
      const Storage*,                                         \
      const Normalised<Storage, Parameter>&,                  \
      const GradientFactors<Parameter>&,                      \
      const ChannelLayout&,                                   \
      int64_t,                                                \
      int64_t,                                                \
      Storage*);
TORCH_ODT_INSTANTIATE(float, float)
TORCH_ODT_INSTANTIATE(double, double)
TORCH_ODT_INSTANTIATE(BFloat16, float)
#undef TORCH_ODT_INSTANTIATE
template void finish_gradients(
    const GradientSums&, const Slices&, const float*, const float*, const GradientFactors<float>&, float*, float*);
template void finish_gradients(
    const GradientSums&, const Slices&, const double*, const double*, const GradientFactors<double>&, double*, double*);

} // namespace torch_odt::kernels
