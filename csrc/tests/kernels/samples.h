// Inputs for the kernels: awkward layouts, and tensors of each storage type with the parameters that belong to them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "../../kernels/activations.h"
#include "../../kernels/batch_norm.h"
#include "../../kernels/channel_layout.h"
#include "../../kernels/storage.h"
#include "../check.h"

namespace torch_odt::tests {

using kernels::BFloat16;
using kernels::Bounds;
using kernels::ChannelLayout;
using kernels::Clamp;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How far rounding to a type moves a number, as a share of the number.
template <typename T>
inline constexpr double kRounding =
    std::is_same_v<T, BFloat16> ? 0x1p-8 : std::is_same_v<T, float> ? 0x1p-24 : 0x1p-53;

template <typename Storage>
Storage stored(double value) {
  using Parameter = std::conditional_t<std::is_same_v<Storage, double>, double, float>;
  Storage place;
  kernels::store(static_cast<Parameter>(value), place);
  return place;
}

// Around the widths of vectors and of unrolled loops, and on both sides of them.
std::vector<ChannelLayout> layouts();
// Large enough for several slices; the positions do not divide evenly among them.
std::vector<ChannelLayout> sliced_layouts();

std::string text_of(const ChannelLayout& layout);

inline int64_t channel_of(const ChannelLayout& layout, int64_t element) {
  return element / layout.inner % layout.channels;
}

// For what a row is see normalise_rows.
inline int64_t rows_of(const ChannelLayout& layout) {
  return layout.inner == 1 ? layout.outer : layout.outer * layout.channels;
}

inline int64_t row_elements_of(const ChannelLayout& layout) {
  return layout.inner == 1 ? layout.channels : layout.inner;
}

template <typename S, typename P>
struct Sample {
  using Storage = S;
  using Parameter = P;

  ChannelLayout layout;
  std::vector<Storage> input;
  std::vector<Storage> gradient;
  std::vector<Parameter> mean;
  std::vector<Parameter> invstd;
  std::vector<Parameter> weight;
  std::vector<Parameter> bias;
  std::vector<Parameter> scale;
  std::vector<Parameter> shift;

  explicit Sample(const ChannelLayout& of);
};

// The sample normalised, with a residual added if there is one, behind an activation function, as it is stored.
template <typename Storage, typename Parameter, typename Activation>
std::vector<Storage> normalised(
    const Sample<Storage, Parameter>& sample, const Activation& activation, const Storage* residual = nullptr) {
  std::vector<Storage> output(sample.input.size());
  kernels::normalise_rows(
      sample.input.data(),
      residual,
      sample.scale.data(),
      sample.shift.data(),
      activation,
      sample.layout,
      0,
      rows_of(sample.layout),
      output.data());
  return output;
}

// Calls function<Storage, Parameter>() for every pair of types that there are kernels for.
template <typename Function>
void for_each_type(const Function& function) {
  {
    const Context here("float");
    function.template operator()<float, float>();
  }
  {
    const Context here("double");
    function.template operator()<double, double>();
  }
  const Context here("bfloat16");
  function.template operator()<BFloat16, float>();
}

// Nothing, ReLU, ReLU6, and a clamp from below and above zero.
template <typename Parameter>
std::vector<Bounds<Parameter>> all_bounds() {
  constexpr Parameter kNone = std::numeric_limits<Parameter>::infinity();
  return {{-kNone, kNone}, {0, kNone}, {0, 6}, {-1, 1}};
}

template <typename Parameter>
std::string text_of(const Bounds<Parameter>& bounds) {
  return "between " + text_of(bounds.low) + " and " + text_of(bounds.high);
}

} // namespace torch_odt::tests
