// Convolutions and linear layers in NITI's arithmetic, see ops_niti.h.

#include <tuple>

#include <torch/csrc/stable/library.h>

#include "ops_int8_outputs.h"
#include "ops_niti.h"

namespace {

using namespace torch_odt;

// int32 has to hold the sums with it.
constexpr double kMostBias = 1073741824.0;

// A bias in units of the sums.
std::optional<std::vector<int32_t>> whole_bias(
    const std::optional<Tensor>& bias, const std::optional<Tensor>& exponent, int64_t channels, int64_t sums_exponent) {
  if (!bias || !exponent) {
    return std::nullopt;
  }
  STD_TORCH_CHECK(
      are_mantissas(*bias) && bias->is_contiguous() && bias->numel() == channels,
      kNiti,
      ": bias must be contiguous mantissas, one for each output channel");
  const auto apart = static_cast<int>(exponent_of(*exponent, "bias_exponent") - sums_exponent);
  const auto* const mantissas = static_cast<const int8_t*>(bias->const_data_ptr());
  std::vector<int32_t> whole(static_cast<size_t>(channels));
  for (size_t i = 0; i < whole.size(); ++i) {
    const double units = std::nearbyint(std::ldexp(static_cast<double>(mantissas[i]), apart));
    whole[i] = static_cast<int32_t>(std::clamp(units, -kMostBias, kMostBias));
  }
  return whole;
}

// One layer's forward pass over the parts of its batch.
struct ForwardLayer {
  const Tensor& image;
  const Tensor& weight;
  const std::optional<Tensor>& packed; // once for all parts, and all scales that are tried; none where it is on the way
  const Geometry& geometry;
  const std::vector<SampleRange>& parts;
  const int32_t* bias;

  // Writes what `made` makes of the sums, and returns the largest magnitude before rounding.
  float run(Rescaling& made, char* to, int64_t sample_output_bytes, Workspace& workspace) const {
    float largest = 0;
    for (const SampleRange& part : parts) {
      const Tensor samples = mantissas_of(image, part.begin, part.count());
      const ForwardArguments arguments{samples, weight, packed, 0, geometry};
      made.finish.output = to + part.begin * sample_output_bytes;
      largest = std::max(largest, arguments.run(arguments.conv(), bias, made.finish, workspace));
    }
    return largest;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer(
    const Tensor& input,
    const std::optional<Tensor>& exponent,
    const Tensor& weight,
    const Tensor& weight_exponent,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& bias_exponent,
    const Tensor& state,
    const Tensor& backward_state,
    const Tensor& gradient_bits,
    bool to_float,
    bool relu,
    std::optional<double> ceiling,
    int64_t rounding,
    int64_t part_bytes,
    bool training,
    const std::optional<Tensor>& packed,
    const Sizes& windows) {
  static_cast<void>(backward_state);
  static_cast<void>(gradient_bits);
  check_rounding(rounding, kNiti);
  const Scaled taken = exponent ? Scaled{input, exponent_of(*exponent, "exponent")}
                                : quantized(input, 0, "the input of a convolution");
  const Tensor image = channels_last(mantissas_of(taken.mantissas));
  const Tensor weights = mantissas_of(weight);
  const Geometry geometry{kNiti, windows};
  const std::optional<Tensor> unpacked;
  const Conv2d conv = ForwardArguments{image, weights, unpacked, 0, geometry}.conv();
  const int64_t sums_exponent = taken.exponent + exponent_of(weight_exponent, "weight_exponent");
  const auto added = whole_bias(bias, bias_exponent, conv.out_channels, sums_exponent);
  const int64_t element_bytes = to_float ? 4 : 1;
  const auto parts =
      parts_of(conv.batch, sample_bytes_of(image, conv, element_bytes), weight.numel(), part_bytes);
  const bool packs = !packed && parts.size() == 1 && kernels::int8::packs_on_the_way(conv, Pass::forward);
  const std::optional<Tensor> panels =
      packs ? std::nullopt : std::optional(packed_for(conv, Pass::forward, weights, packed, threads_for(conv)));
  const ForwardLayer passes{image, weights, panels, geometry, parts, added ? added->data() : nullptr};
  Tensor output = empty_image(
      {conv.batch, conv.out_channels, conv.rows.output, conv.columns.output},
      to_float ? ScalarType::Float : kCarrier,
      input);
  auto* const to = static_cast<char*>(output.mutable_data_ptr());
  const int64_t sample_output_bytes = conv.out_channels * conv.rows.output * conv.columns.output * element_bytes;

  HeldScale scale(rows_of(state, 1));
  Workspace workspace;
  int64_t found = 0;
  if (to_float) {
    const Numbers unit{std::ldexp(1.0F, static_cast<int>(sums_exponent))};
    Rescaling made = rescaling(kNiti, Result::floats, unit, false);
    passes.run(made, to, sample_output_bytes, workspace);
  } else {
    found = settle(scale, sums_exponent, training, [&](int64_t shift) {
      Rescaling made = rescaling(kNiti, Result::int8, dropping(shift), false);
      set_rounding(kNiti, rounding, 0, made);
      const int64_t most = relu ? std::min(kMostMantissa, bound_of(ceiling, sums_exponent + shift)) : kMostMantissa;
      set_range(kNiti, 0, relu ? 0 : -kMostMantissa, most, made.finish);
      return std::ldexp(
          static_cast<double>(passes.run(made, to, sample_output_bytes, workspace)), static_cast<int>(shift));
    });
  }
  Tensor after = empty_flat(HeldScale::kWidth, ScalarType::Double, state);
  scale.write(static_cast<double*>(after.mutable_data_ptr()));
  return {
      output,
      one_number(static_cast<float>(found), input),
      exponent ? nothing(kCarrier, input) : taken.mantissas,
      exponent ? nothing(ScalarType::Float, input) : one_number(static_cast<float>(taken.exponent), input),
      after};
}


} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "niti_layer(Tensor input, Tensor? exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, "
      "Tensor? bias_exponent, Tensor state, Tensor backward_state, Tensor gradient_bits, bool to_float, bool relu, "
      "float? ceiling, int rounding, int part_bytes, bool training, Tensor? packed, "
      "int[] windows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("niti_layer", TORCH_BOX(&layer));
}
