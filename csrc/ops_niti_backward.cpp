// The gradients of a convolution or linear layer in NITI's arithmetic, see ops_niti.h.

#include "ops_niti.h"

#include <cstring>
#include <tuple>
#include <utility>

#include <torch/csrc/stable/library.h>

#include "kernels/int8/integers.h"
#include "ops_int8_gradients.h"

namespace {

using namespace torch_odt;
using kernels::int8::Rounding;

// What the int32 sums of a weight's gradient hold whatever the operands are.
constexpr int64_t kMostPixels = 65535;
constexpr int64_t kGrainElements = 1 << 15;

Tensor nothing(ScalarType dtype, const Tensor& like) {
  return empty_flat(0, dtype, like);
}

// The output's gradient where the output is between its bounds; the bounds themselves pass nothing.
Tensor between_bounds(
    const Tensor& gradient, const Tensor& output, int64_t output_exponent, std::optional<double> ceiling) {
  const Tensor bounded = channels_last(mantissas_of(output));
  const double above = static_cast<double>(kMostMantissa + 1);
  const double most = ceiling ? std::min(above, std::ldexp(*ceiling, static_cast<int>(-output_exponent))) : above;
  Tensor result = empty_image(
      {gradient.size(0), gradient.size(1), gradient.size(2), gradient.size(3)}, ScalarType::Char, gradient);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, gradient.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
    kernels::int8::keep_between(
        bytes_of(gradient) + begin, bytes_of(bounded) + begin, end - begin, 0, static_cast<int32_t>(most), to + begin);
  });
  return result;
}

// What both gradients are computed from.
struct Layer {
  const Tensor& steps; // the output's gradient, in channels_last
  const Tensor& image;
  const Tensor& weight;
  Geometry geometry;
  int64_t rounding;
  bool training;
  std::vector<SampleRange> parts;

  Pair kernel_size() const {
    return {weight.size(2), weight.size(3)};
  }

  // Returns the gradient and its exponent.
  std::pair<Tensor, int64_t> input_gradient(HeldScale& scale, int64_t sums_exponent) const {
    const Pair size{image.size(2), image.size(3)};
    const std::optional<Tensor> unpacked;
    const Conv2d conv = GradInputArguments{steps, weight, unpacked, size, geometry}.conv();
    const auto packed = parts.size() > 1
        ? std::optional<Tensor>(packed_for(conv, Pass::grad_input, weight, unpacked, threads_for(conv)))
        : std::nullopt;
    Tensor result = empty_image({conv.batch, conv.in_channels, size[0], size[1]}, kCarrier, steps);
    auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
    const auto attempt = [&](int64_t shift) {
      Rescaling made = rescaling(kNiti, Result::int8, dropping(shift), false);
      set_rounding(kNiti, rounding, 0, made);
      made.finish.low = -kMostMantissa;
      float largest = 0;
      for (const SampleRange& part : parts) {
        const Tensor samples = mantissas_of(steps, part.begin, part.count());
        const GradInputArguments arguments{samples, weight, packed, size, geometry};
        made.finish.output = to + part.begin * conv.in_channels * size[0] * size[1];
        largest = std::max(largest, arguments.run(arguments.conv(), made.finish));
      }
      return std::ldexp(static_cast<double>(largest), static_cast<int>(shift));
    };
    return {result, settle(scale, sums_exponent, training, attempt)};
  }

  // Mantissas of so many bits, and the sums of the output's gradient for the bias.
  std::pair<Tensor, std::vector<int64_t>> weight_gradient(HeldScale& scale, int64_t sums_exponent, int64_t bits) const {
    if (!scale.is_due()) {
      const int64_t most = int64_t{1} << std::max<int64_t>(bits, 0);
      auto found = rounded_weight_gradient(scale.shift(sums_exponent), most);
      scale.note_batch(found.largest > most);
      return {found.gradient, std::move(found.bias)};
    }
    WholeSums sums = whole_sums();
    const double largest = sums.largest();
    const int64_t shift = scale.fitting_shift(largest, bits, sums_exponent);
    scale.note_check(sums_exponent + shift, largest == 0);
    return {shifted(sums, shift), std::move(sums.bias)};
  }

 private:
  struct RoundedGradient {
    Tensor gradient;
    std::vector<int64_t> bias;
    int64_t largest;
  };

  // Exact sums, in 32 bits where those hold them, otherwise in 64.
  struct WholeSums {
    std::optional<Tensor> narrow;
    std::vector<int64_t> wide;
    std::vector<int64_t> bias;

    const int32_t* numbers() const {
      return static_cast<const int32_t*>(narrow->const_data_ptr());
    }
    double largest() const {
      if (!wide.empty()) {
        return static_cast<double>(kernels::int8::largest_magnitude(wide.data(), static_cast<int64_t>(wide.size())));
      }
      return static_cast<double>(kernels::int8::largest_magnitude(numbers(), narrow->numel()));
    }
  };

  // Samples whose sums int32 holds.
  std::vector<SampleRange> pieces() const {
    const int64_t pixels = std::max<int64_t>(1, steps.size(2) * steps.size(3));
    const int64_t fitting = std::max<int64_t>(1, kMostPixels / pixels);
    std::vector<SampleRange> all;
    for (const SampleRange& part : parts) {
      for (int64_t begin = part.begin; begin < part.end; begin += fitting) {
        all.push_back({begin, std::min(begin + fitting, part.end)});
      }
    }
    return all.empty() ? std::vector<SampleRange>{{0, 0}} : all;
  }

  // Returns the sums of the output's gradient.
  std::vector<int64_t> run(const SampleRange& samples, const Finish& finish) const {
    const Tensor gradient = mantissas_of(steps, samples.begin, samples.count());
    const Tensor input = mantissas_of(image, samples.begin, samples.count());
    const GradWeightArguments arguments{gradient, input, 0, geometry};
    const Conv2d conv = arguments.conv(kernel_size());
    std::vector<int64_t> bias(static_cast<size_t>(conv.out_channels));
    arguments.run(conv, finish, bias.data());
    return bias;
  }

  Tensor empty_weight(ScalarType dtype) const {
    return empty_image({weight.size(0), weight.size(1), weight.size(2), weight.size(3)}, dtype, steps);
  }

  WholeSums whole_sums() const {
    WholeSums found;
    found.narrow = empty_weight(ScalarType::Int);
    Finish finish;
    finish.channels_are_rows = true;
    finish.output = found.narrow->mutable_data_ptr();
    const std::vector<SampleRange> all = pieces();
    for (const SampleRange& piece : all) {
      const std::vector<int64_t> bias = run(piece, finish);
      found.bias.resize(bias.size());
      for (size_t i = 0; i < bias.size(); ++i) {
        found.bias[i] += bias[i];
      }
      if (all.size() > 1) {
        found.wide.resize(static_cast<size_t>(weight.numel()));
        for (size_t i = 0; i < found.wide.size(); ++i) {
          found.wide[i] += found.numbers()[i];
        }
      }
    }
    return found;
  }

  Tensor shifted(const WholeSums& sums, int64_t shift) const {
    Tensor result = empty_weight(kCarrier);
    auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
    const auto how = static_cast<Rounding>(rounding);
    if (!sums.wide.empty()) {
      kernels::int8::shift_to_int8(sums.wide.data(), weight.numel(), shift, how, to);
    } else {
      torch::stable::parallel_for(0, weight.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
        kernels::int8::shift_to_int8(sums.numbers() + begin, end - begin, shift, how, to + begin);
      });
    }
    return result;
  }

  // With a scale that is known, sums are never stored; what is beyond `most` is clipped.
  RoundedGradient rounded_weight_gradient(int64_t shift, int64_t most) const {
    if (pieces().size() > 1) {
      WholeSums sums = whole_sums();
      Tensor gradient = shifted(sums, shift);
      auto* const to = static_cast<int8_t*>(gradient.mutable_data_ptr());
      const int64_t largest = kernels::int8::clip(to, gradient.numel(), most);
      return {gradient, std::move(sums.bias), largest};
    }
    Tensor gradient = empty_weight(kCarrier);
    auto* const to = static_cast<int8_t*>(gradient.mutable_data_ptr());
    std::memset(to, 0, static_cast<size_t>(gradient.numel()));
    // An update takes the gradient off zeros.
    Rescaling made = rescaling(kNiti, Result::int8_update, dropping(shift), true);
    set_rounding(kNiti, rounding, 0, made);
    made.finish.low = -kMostMantissa;
    made.finish.output = to;
    std::vector<int64_t> bias = run({0, steps.size(0)}, made.finish);
    kernels::int8::negate(to, gradient.numel());
    const int64_t largest = kernels::int8::clip(to, gradient.numel(), most);
    return {gradient, std::move(bias), largest};
  }
};

// The sums of each channel over all pixels of a gradient in channels_last.
std::vector<int64_t> channel_sums(const Tensor& steps) {
  const int64_t channels = steps.size(1);
  std::vector<int64_t> sums(static_cast<size_t>(channels));
  const int8_t* from = bytes_of(steps);
  for (int64_t pixel = 0; pixel < steps.size(0) * steps.size(2) * steps.size(3); ++pixel, from += channels) {
    for (int64_t i = 0; i < channels; ++i) {
      sums[static_cast<size_t>(i)] += from[i];
    }
  }
  return sums;
}

Tensor bias_gradient(const std::vector<int64_t>& sums, int64_t rounding, int64_t bits, const Tensor& like) {
  const auto count = static_cast<int64_t>(sums.size());
  const auto largest = static_cast<double>(kernels::int8::largest_magnitude(sums.data(), count));
  const int64_t shift = std::max<int64_t>(0, kernels::int8::bits_of(largest) - bits);
  Tensor result = empty_flat(count, kCarrier, like);
  kernels::int8::shift_to_int8(
      sums.data(), count, shift, static_cast<Rounding>(rounding), static_cast<int8_t*>(result.mutable_data_ptr()));
  return result;
}

int64_t whole_number(const Tensor& number) {
  STD_TORCH_CHECK(
      number.is_cpu() && number.scalar_type() == ScalarType::Long && number.numel() == 1,
      kNiti,
      ": gradient_bits must be an int64 CPU tensor of one number");
  return *static_cast<const int64_t*>(number.const_data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_backward(
    const Tensor& gradient,
    const Tensor& gradient_exponent,
    const std::optional<Tensor>& output,
    const std::optional<Tensor>& output_exponent,
    const Tensor& image,
    const Tensor& image_exponent,
    const Tensor& weight,
    const Tensor& weight_exponent,
    const Tensor& state,
    const Tensor& gradient_bits,
    bool for_input,
    bool for_weight,
    bool for_bias,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const Pair& stride,
    const Pair& padding,
    const Pair& dilation,
    int64_t groups) {
  Tensor steps = channels_last(mantissas_of(gradient));
  if (output && output_exponent) {
    steps = between_bounds(steps, *output, exponent_of(*output_exponent, "output_exponent"), ceiling);
  }
  const Tensor pixels = channels_last(mantissas_of(image));
  const Tensor weights = mantissas_of(weight);
  const Geometry geometry{kNiti, stride, padding, dilation, groups};
  // Checks that all belong to one convolution.
  const Conv2d conv = GradWeightArguments{steps, pixels, 0, geometry}.conv({weights.size(2), weights.size(3)});
  const Layer layer{
      steps, pixels, weights, geometry, rounding, training,
      parts_of(conv.batch, sample_bytes_of(pixels, conv), weight.numel(), part_bytes)};
  const double* const rows = rows_of(state, 2);
  HeldScale of_input(rows);
  HeldScale of_weight(rows + HeldScale::kWidth);
  const int64_t exponent = exponent_of(gradient_exponent, "gradient_exponent");
  const int64_t bits = whole_number(gradient_bits);

  Tensor input_gradient = nothing(kCarrier, image);
  Tensor input_exponent = nothing(ScalarType::Float, image);
  if (for_input) {
    auto [found, found_exponent] =
        layer.input_gradient(of_input, exponent + exponent_of(weight_exponent, "weight_exponent"));
    input_gradient = found;
    input_exponent = one_number(static_cast<float>(found_exponent), image);
  }
  Tensor weight_gradient = nothing(kCarrier, image);
  std::vector<int64_t> sums;
  if (for_weight) {
    auto [found, found_sums] =
        layer.weight_gradient(of_weight, exponent + exponent_of(image_exponent, "image_exponent"), bits);
    weight_gradient = found;
    sums = std::move(found_sums);
  } else if (for_bias) {
    sums = channel_sums(steps);
  }
  Tensor after = empty_contiguous({2, HeldScale::kWidth}, ScalarType::Double, state);
  auto* const to = static_cast<double*>(after.mutable_data_ptr());
  of_input.write(to);
  of_weight.write(to + HeldScale::kWidth);
  return {
      input_gradient,
      input_exponent,
      weight_gradient,
      for_bias ? bias_gradient(sums, rounding, bits, image) : nothing(kCarrier, image),
      after};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "niti_layer_backward(Tensor gradient, Tensor gradient_exponent, Tensor? output, Tensor? output_exponent, "
      "Tensor image, Tensor image_exponent, Tensor weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, "
      "bool for_input, bool for_weight, bool for_bias, float? ceiling, int rounding, int part_bytes, bool training, "
      "int[] stride, int[] padding, int[] dilation, int groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("niti_layer_backward", TORCH_BOX(&layer_backward));
}
