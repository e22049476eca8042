// The gradients of a convolution or linear layer in NITI's arithmetic, see ops_niti.h.

#include "ops_niti.h"

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
constexpr int64_t kLeastGradientBits = -8;
// Of a weight whose gradient is far larger than a cache.
constexpr int64_t kStoredElements = int64_t{1} << 22;

// The output's gradient where the output is between its bounds; the bounds themselves pass nothing.
Tensor between_bounds(
    const Tensor& gradient, const Tensor& output, int64_t output_exponent, std::optional<double> ceiling) {
  const Tensor bounded = channels_last(mantissas_of(output));
  for (int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(gradient.size(i) == bounded.size(i), kNiti, ": output must have the gradient's shape");
  }
  const auto most = static_cast<int32_t>(bound_of(ceiling, output_exponent));
  Tensor result = empty_image(
      {gradient.size(0), gradient.size(1), gradient.size(2), gradient.size(3)}, ScalarType::Char, gradient);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, gradient.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
    kernels::int8::keep_between(
        bytes_of(gradient) + begin, bytes_of(bounded) + begin, end - begin, 0, most, to + begin);
  });
  return result;
}

// What is left of a weight's gradient that was taken off.
struct TakenOff {
  std::vector<int64_t> bias; // sums of the output's gradient
  bool has_changed;
};

// What both gradients are computed from.
struct Layer {
  const Tensor& steps; // the output's gradient, in channels_last
  const Tensor& image;
  const Tensor& weight;
  const std::optional<Tensor>& packed; // of the weight, for the input's gradient
  Geometry geometry;
  int64_t rounding;
  bool training;
  std::vector<SampleRange> parts;

  Pair kernel_size() const {
    return {weight.size(2), weight.size(3)};
  }

  // The weight for the input's gradient, once for all parts and all scales that are tried; none where it is packed on
  // the way.
  std::optional<Tensor> panels() const {
    const Conv2d conv = GradInputArguments{steps, weight, packed, {image.size(2), image.size(3)}, geometry}.conv();
    if (!packed && parts.size() == 1 && kernels::int8::packs_on_the_way(conv, Pass::grad_input)) {
      return std::nullopt;
    }
    return packed_for(conv, Pass::grad_input, weight, packed, threads_for(conv));
  }

  // Writes what `made` makes of the sums, and returns the largest magnitude before rounding.
  float run_input(
      const std::optional<Tensor>& weights,
      Rescaling& made,
      Tensor& result,
      int64_t element_bytes,
      Workspace& workspace) const {
    const Pair size{image.size(2), image.size(3)};
    const int64_t sample_bytes = image.size(1) * size[0] * size[1] * element_bytes;
    auto* const to = static_cast<char*>(result.mutable_data_ptr());
    float largest = 0;
    for (const SampleRange& part : parts) {
      const Tensor samples = mantissas_of(steps, part.begin, part.count());
      const GradInputArguments arguments{samples, weight, weights, size, geometry};
      made.finish.output = to + part.begin * sample_bytes;
      largest = std::max(largest, arguments.run(arguments.conv(), made.finish, workspace));
    }
    return largest;
  }

  Tensor empty_input(ScalarType dtype) const {
    return empty_image({image.size(0), image.size(1), image.size(2), image.size(3)}, dtype, steps);
  }

  Tensor float_input_gradient(int64_t sums_exponent) const {
    Tensor result = empty_input(ScalarType::Float);
    const Numbers unit{std::ldexp(1.0F, static_cast<int>(sums_exponent))};
    Rescaling made = rescaling(kNiti, Result::floats, unit, false);
    Workspace workspace;
    run_input(panels(), made, result, 4, workspace);
    return result;
  }

  Scaled input_gradient(HeldScale& scale, int64_t sums_exponent) const {
    Tensor result = empty_input(kCarrier);
    const std::optional<Tensor> weights = panels();
    Workspace workspace;
    const int64_t exponent = settle(scale, sums_exponent, training, [&](int64_t shift) {
      Rescaling made = rescaling(kNiti, Result::int8, dropping(shift), false);
      set_rounding(kNiti, rounding, 0, made);
      made.finish.low = -kMostMantissa;
      const auto largest = static_cast<double>(run_input(weights, made, result, 1, workspace));
      return std::ldexp(largest, static_cast<int>(shift));
    });
    return {result, exponent};
  }

  Tensor empty_weight(ScalarType dtype = kCarrier) const {
    return empty_image({weight.size(0), weight.size(1), weight.size(2), weight.size(3)}, dtype, steps);
  }

  // Writes mantissas of so many bits, and returns the sums of the output's gradient for the bias. Sums of one piece are
  // never stored, also where their scale is looked at: that it holds is found out by rounding them.
  std::vector<int64_t> weight_gradient(
      HeldScale& scale, int64_t sums_exponent, int64_t bits, Tensor& gradient) const {
    const bool in_pieces = pieces().size() > 1;
    const WholeSums sums = in_pieces ? whole_sums() : WholeSums{};
    auto* const to = static_cast<int8_t*>(gradient.mutable_data_ptr());
    Workspace workspace;
    std::vector<int64_t> bias = sums.bias;
    // Writes what is left of the sums, and returns their largest magnitude.
    const auto round = [&](int64_t shift) {
      return in_pieces ? round_sums(sums, shift, to) : round_gradient(shift, to, bias, workspace);
    };
    const int64_t present = scale.shift(sums_exponent);
    const double largest = round(present);
    if (scale.is_due()) {
      const int64_t fitting = scale.fitting_shift(largest, bits, sums_exponent);
      if (fitting != present) {
        round(fitting);
      }
      scale.note_check(sums_exponent + fitting, largest == 0);
    } else {
      const int64_t most = int64_t{1} << std::max<int64_t>(bits, 0);
      scale.note_batch(kernels::int8::clip(to, gradient.numel(), most) > most);
    }
    return bias;
  }

  // Takes what weight_gradient() would write off the weight; returns the sums for the bias. Where the scale is looked at,
  // a small gradient is stored in less time than it is computed twice.
  // `own` are the weight's numbers, in channels_last.
  TakenOff take_weight_gradient_off(HeldScale& scale, int64_t sums_exponent, int64_t bits, int8_t* own) const {
    const bool in_pieces = pieces().size() > 1;
    const bool is_small = in_pieces || weight.numel() < kStoredElements;
    // Whether or not it is looked at: what is allocated must not depend on it.
    Tensor stored = is_small ? empty_weight() : nothing(kCarrier, steps);
    if (in_pieces || (scale.is_due() && is_small)) {
      std::vector<int64_t> bias = weight_gradient(scale, sums_exponent, bits, stored);
      const auto* const found = static_cast<const int8_t*>(stored.const_data_ptr());
      return {std::move(bias), kernels::int8::take_off(own, found, weight.numel())};
    }
    const int64_t present = scale.shift(sums_exponent);
    const bool is_due = scale.is_due();
    std::vector<int64_t> bias;
    Workspace workspace;
    const SampleRange all{0, steps.size(0)};
    int64_t shift = present;
    if (is_due) {
      Rescaling looked_at = rescaling(kNiti, Result::nothing, dropping(present), true);
      const auto seen = static_cast<double>(run(all, looked_at.finish, bias, workspace));
      const double largest = std::ldexp(seen, static_cast<int>(present));
      shift = scale.fitting_shift(largest, bits, sums_exponent);
      scale.note_check(sums_exponent + shift, largest == 0);
    }
    kernels::int8::Noted noted;
    Rescaling made = rescaled_weight(Result::take_off, shift);
    made.finish.most_step = is_due ? kMostMantissa : int64_t{1} << std::max<int64_t>(bits, 0);
    made.finish.noted = &noted;
    made.finish.output = own;
    run(all, made.finish, bias, workspace);
    if (!is_due) {
      scale.note_batch(noted.clipped > 0);
    }
    return {std::move(bias), noted.changed > 0};
  }

 private:
  // Of more pixels than int32 holds the sums of.
  struct WholeSums {
    std::vector<int64_t> weight;
    std::vector<int64_t> bias;
  };

  // Samples whose sums int32 holds.
  std::vector<SampleRange> pieces() const {
    const int64_t pixels = std::max<int64_t>(1, steps.size(2) * steps.size(3));
    const int64_t fitting = std::max<int64_t>(1, kMostPixels / pixels);
    std::vector<SampleRange> all;
    for (const SampleRange& part : parts) {
      for (int64_t begin = part.begin; begin == part.begin || begin < part.end; begin += fitting) {
        all.push_back({begin, std::min(begin + fitting, part.end)});
      }
    }
    return all;
  }

  // Writes the sums of the output's gradient to `bias`.
  float run(
      const SampleRange& samples, const Finish& finish, std::vector<int64_t>& bias, Workspace& workspace) const {
    const Tensor gradient = mantissas_of(steps, samples.begin, samples.count());
    const Tensor input = mantissas_of(image, samples.begin, samples.count());
    const GradWeightArguments arguments{gradient, input, 0, geometry};
    const Conv2d conv = arguments.conv(kernel_size());
    bias.resize(static_cast<size_t>(conv.out_channels));
    return arguments.run(conv, finish, bias.data(), workspace);
  }

  WholeSums whole_sums() const {
    Tensor narrow = empty_weight(ScalarType::Int);
    Finish finish;
    finish.channels_are_rows = true;
    finish.output = narrow.mutable_data_ptr();
    const auto* const numbers = static_cast<const int32_t*>(narrow.const_data_ptr());
    WholeSums found;
    found.weight.resize(static_cast<size_t>(weight.numel()));
    found.bias.resize(static_cast<size_t>(steps.size(1)));
    std::vector<int64_t> bias;
    Workspace workspace;
    for (const SampleRange& piece : pieces()) {
      check_fits(run(piece, finish, bias, workspace), kNiti);
      for (size_t i = 0; i < bias.size(); ++i) {
        found.bias[i] += bias[i];
      }
      for (size_t i = 0; i < found.weight.size(); ++i) {
        found.weight[i] += numbers[i];
      }
    }
    return found;
  }

  double round_sums(const WholeSums& sums, int64_t shift, int8_t* to) const {
    const auto count = static_cast<int64_t>(sums.weight.size());
    kernels::int8::shift_to_int8(sums.weight.data(), count, shift, static_cast<Rounding>(rounding), to);
    return static_cast<double>(kernels::int8::largest_magnitude(sums.weight.data(), count));
  }

  Rescaling rescaled_weight(Result result, int64_t shift) const {
    Rescaling made = rescaling(kNiti, result, dropping(shift), true);
    set_rounding(kNiti, rounding, 0, made);
    made.finish.low = -kMostMantissa;
    return made;
  }

  double round_gradient(int64_t shift, int8_t* to, std::vector<int64_t>& bias, Workspace& workspace) const {
    Rescaling made = rescaled_weight(Result::int8, shift);
    made.finish.output = to;
    const float largest = run({0, steps.size(0)}, made.finish, bias, workspace);
    return std::ldexp(static_cast<double>(largest), static_cast<int>(shift));
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

int64_t bits_in(const Tensor& gradient_bits) {
  STD_TORCH_CHECK(
      gradient_bits.is_cpu() && gradient_bits.scalar_type() == ScalarType::Long && gradient_bits.numel() == 1,
      kNiti,
      ": gradient_bits must be an int64 CPU tensor of one number");
  const int64_t bits = *static_cast<const int64_t*>(gradient_bits.const_data_ptr());
  STD_TORCH_CHECK(
      bits >= kLeastGradientBits && bits <= kMantissaBits,
      kNiti,
      ": gradient_bits must be from ",
      kLeastGradientBits,
      " to ",
      kMantissaBits);
  return bits;
}

// What becomes of the weight's gradient.
enum class WeightGradient { unwanted, returned, taken_off };

struct PassedBack {
  Tensor input;
  Tensor exponent;
  Tensor weight;
  Tensor bias;
  Tensor state;
  bool has_changed; // the weight
};

// `own` are the weight's numbers, where its gradient is to be taken off.
PassedBack pass_back(
    const Tensor& gradient,
    const std::optional<Tensor>& gradient_exponent,
    const std::optional<Tensor>& output,
    const std::optional<Tensor>& output_exponent,
    const Tensor& image,
    const Tensor& image_exponent,
    const Tensor& weight,
    const Tensor& weight_exponent,
    const Tensor& state,
    const Tensor& gradient_bits,
    bool input_is_float,
    bool for_input,
    WeightGradient for_weight,
    int8_t* own,
    bool for_bias,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const std::optional<Tensor>& packed,
    const Sizes& windows) {
  const Scaled taken = gradient_exponent ? Scaled{gradient, exponent_of(*gradient_exponent, "gradient_exponent")}
                                         : quantized(gradient, rounding, "the gradient of a convolution's output");
  check_rounding(rounding, kNiti);
  Tensor steps = channels_last(mantissas_of(taken.mantissas));
  const Tensor pixels = channels_last(mantissas_of(image));
  const Tensor weights = mantissas_of(weight);
  const Geometry geometry{kNiti, windows};
  const GradWeightArguments arguments{steps, pixels, 0, geometry};
  const Conv2d conv = arguments.conv({weights.size(2), weights.size(3)});
  arguments.check_weight(conv, weights);
  if (output && output_exponent) {
    steps = between_bounds(steps, *output, exponent_of(*output_exponent, "output_exponent"), ceiling);
  }
  const Layer layer{
      steps, pixels, weights, packed, geometry, rounding, training,
      parts_of(conv.batch, sample_bytes_of(pixels, conv, input_is_float ? 4 : 1), weight.numel(), part_bytes)};
  const double* const rows = rows_of(state, 2);
  HeldScale of_input(rows);
  HeldScale of_weight(rows + HeldScale::kWidth);
  const int64_t bits = bits_in(gradient_bits);

  Tensor input_gradient = nothing(kCarrier, image);
  Tensor input_exponent = nothing(ScalarType::Float, image);
  const int64_t sums_exponent = taken.exponent + exponent_of(weight_exponent, "weight_exponent");
  if (for_input && input_is_float) {
    input_gradient = layer.float_input_gradient(sums_exponent);
  } else if (for_input) {
    const Scaled found = layer.input_gradient(of_input, sums_exponent);
    input_gradient = found.mantissas;
    input_exponent = one_number(static_cast<float>(found.exponent), image);
  }
  Tensor weight_gradient = nothing(kCarrier, image);
  std::vector<int64_t> sums;
  bool has_changed = false;
  if (for_weight != WeightGradient::unwanted) {
    const int64_t exponent = taken.exponent + exponent_of(image_exponent, "image_exponent");
    if (for_weight == WeightGradient::taken_off) {
      TakenOff taken_off = layer.take_weight_gradient_off(of_weight, exponent, bits, own);
      sums = std::move(taken_off.bias);
      has_changed = taken_off.has_changed;
    } else {
      weight_gradient = layer.empty_weight();
      sums = layer.weight_gradient(of_weight, exponent, bits, weight_gradient);
    }
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
      after,
      has_changed};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_backward(
    const Tensor& gradient,
    const std::optional<Tensor>& gradient_exponent,
    const std::optional<Tensor>& output,
    const std::optional<Tensor>& output_exponent,
    const Tensor& image,
    const Tensor& image_exponent,
    const Tensor& weight,
    const Tensor& weight_exponent,
    const Tensor& state,
    const Tensor& gradient_bits,
    bool input_is_float,
    bool for_input,
    bool for_weight,
    bool for_bias,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const std::optional<Tensor>& packed,
    const Sizes& windows) {
  const PassedBack found = pass_back(
      gradient, gradient_exponent, output, output_exponent, image, image_exponent, weight, weight_exponent, state,
      gradient_bits, input_is_float, for_input, for_weight ? WeightGradient::returned : WeightGradient::unwanted,
      nullptr, for_bias, ceiling, rounding, part_bytes, training, packed, windows);
  return {found.input, found.exponent, found.weight, found.bias, found.state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_take_off_(
    const Tensor& gradient,
    const std::optional<Tensor>& gradient_exponent,
    const std::optional<Tensor>& output,
    const std::optional<Tensor>& output_exponent,
    const Tensor& image,
    const Tensor& image_exponent,
    Tensor weight,
    const Tensor& weight_exponent,
    const Tensor& state,
    const Tensor& gradient_bits,
    bool input_is_float,
    bool for_input,
    bool for_bias,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const std::optional<Tensor>& packed,
    const Sizes& windows) {
  // First, since it may give the weight memory of its own.
  auto* const own = static_cast<int8_t*>(weight.mutable_data_ptr());
  check_update("niti_layer_take_off_", mantissas_of(weight));
  const PassedBack found = pass_back(
      gradient, gradient_exponent, output, output_exponent, image, image_exponent, weight, weight_exponent, state,
      gradient_bits, input_is_float, for_input, WeightGradient::taken_off, own, for_bias, ceiling, rounding, part_bytes,
      training, packed, windows);
  Tensor changed = empty_flat(1, ScalarType::Bool, image);
  *static_cast<bool*>(changed.mutable_data_ptr()) = found.has_changed;
  return {found.input, found.exponent, found.bias, found.state, changed};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "niti_layer_backward(Tensor gradient, Tensor? gradient_exponent, Tensor? output, Tensor? output_exponent, "
      "Tensor image, Tensor image_exponent, Tensor weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, "
      "bool input_is_float, bool for_input, bool for_weight, bool for_bias, float? ceiling, int rounding, "
      "int part_bytes, bool training, Tensor? packed, int[] windows) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "niti_layer_take_off_(Tensor gradient, Tensor? gradient_exponent, Tensor? output, Tensor? output_exponent, "
      "Tensor image, Tensor image_exponent, Tensor(a!) weight, Tensor weight_exponent, Tensor state, "
      "Tensor gradient_bits, bool input_is_float, bool for_input, bool for_bias, float? ceiling, int rounding, "
      "int part_bytes, bool training, Tensor? packed, int[] windows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("niti_layer_backward", TORCH_BOX(&layer_backward));
  m.impl("niti_layer_take_off_", TORCH_BOX(&layer_take_off_));
}
