// The width of vectors changes no bit. One process sees one instruction set, so this prints a digest of everything that
// is compiled for each of them, and csrc/tests/run compares the digests of those that fuse multiply-adds, and of others.

#include <cinttypes>
#include <cstdio>
#include <vector>

#include "../../kernels/batch_norm_statistics.h"
#include "../../kernels/bernoulli.h"
#include "../../kernels/bits.h"
#include "../../kernels/depthwise.h"
#include "../../kernels/isa.h"
#include "../../kernels/matrix_product.h"
#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

// FNV-1a: G. Fowler, L. C. Noll and K.-P. Vo.
struct Digest {
  uint64_t value = 0xcbf29ce484222325;

  template <typename T>
  void add(const std::vector<T>& values) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) {
      value = (value ^ bytes[i]) * 0x100000001b3;
    }
  }
};

template <typename Storage, typename Parameter>
void add_moments(const Sample<Storage, Parameter>& sample, Digest& digest) {
  const kernels::Slices slices(sample.layout);
  const auto places = static_cast<size_t>(slices.number * sample.layout.channels);
  std::vector<Parameter> centre(places);
  std::vector<double> sum(places);
  std::vector<double> square(places);
  const kernels::Moments<Parameter> moments{centre.data(), sum.data(), square.data()};
  kernels::take_moments(sample.input.data(), slices, 0, slices.tasks(), moments);
  digest.add(centre);
  digest.add(sum);
  digest.add(square);
}

template <typename Storage, typename Parameter, typename Activation>
void add_passes(const Sample<Storage, Parameter>& sample, const Activation& activation, Digest& digest) {
  digest.add(normalised(sample, activation));
  digest.add(normalised(sample, activation, sample.gradient.data()));
  BackwardPass<Storage, Parameter> backward(sample.layout);
  kernels::sum_gradients(
      sample.gradient.data(),
      forward_of(sample),
      activation,
      backward.slices,
      0,
      backward.slices.tasks(),
      backward.sums());
  digest.add(backward.sum);
  digest.add(backward.product);
  // Factors out of the sample: those of a whole pass are finished by code that is compiled once.
  backward.slope = sample.scale;
  backward.mean_gradient = sample.mean;
  backward.projection = sample.invstd;
  kernels::input_gradient_rows(
      sample.gradient.data(),
      forward_of(sample),
      activation,
      backward.factors(),
      sample.layout,
      0,
      rows_of(sample.layout),
      backward.grad_input.data());
  digest.add(backward.grad_input);
}

template <typename Storage, typename Parameter>
void add_sum_gradients(
    const Sample<Storage, Parameter>& sample, const Clamp<Storage, Parameter>& clamp, Digest& digest) {
  BackwardPass<Storage, Parameter> backward(sample.layout);
  const std::vector<Storage> output = normalised(sample, clamp, sample.gradient.data());
  std::vector<Storage> passed(sample.input.size());
  kernels::pass_and_sum_gradients(
      sample.gradient.data(),
      sum_of(sample, output, clamp),
      backward.slices,
      0,
      backward.slices.tasks(),
      passed.data(),
      backward.sums());
  digest.add(passed);
  digest.add(backward.sum);
  digest.add(backward.product);
}

void add_draws(Digest& digest) {
  kernels::Twister twister{};
  for (uint32_t i = 0; i < kernels::kTwisterWords; ++i) {
    twister.words[i] = (i + 1) * 2654435761U;
  }
  twister.used = kernels::kTwisterWords;
  constexpr int64_t kCount = 5001;
  std::vector<uint8_t> packed(static_cast<size_t>(kernels::packed_bytes(kCount)));
  kernels::draw_bits(twister, 0.3, kCount, packed.data());
  std::vector<uint8_t> mask(static_cast<size_t>(kCount - 3));
  kernels::unpack_bits(packed.data(), 3, kCount - 3, mask.data());
  digest.add(packed);
  digest.add(mask);
}

std::vector<float> numbers(int64_t count) {
  std::vector<float> result(static_cast<size_t>(count));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = static_cast<float>(static_cast<uint32_t>(i) * 2654435761U) / 4e9F - 0.5F;
  }
  return result;
}

void add_depthwise(Digest& digest) {
  constexpr int64_t kSize = 12;
  for (const int64_t channels : {3, 22, 40}) {
    const kernels::WindowAxis rows{kSize, kSize / 2, 3, 2, 1, 1};
    const kernels::WindowAxis columns{kSize, kSize, 5, 1, 2, 1};
    const kernels::Depthwise conv{rows, columns, channels};
    const std::vector<float> input = numbers(kSize * kSize * channels);
    const std::vector<float> taps = numbers(conv.taps() * channels);
    std::vector<float> output(static_cast<size_t>(rows.output * kSize * channels));
    std::vector<float> grad_input(input.size());
    std::vector<float> grad_taps(taps.size());
    kernels::depthwise_rows(input.data(), taps.data(), taps.data(), conv, 0, rows.output, output.data());
    kernels::depthwise_grad_input_rows(output.data(), taps.data(), conv, 0, kSize, grad_input.data());
    kernels::depthwise_grad_weight_channels(
        output.data(), input.data(), conv, 1, 0, channels, grad_taps.data());
    digest.add(output);
    digest.add(grad_input);
    digest.add(grad_taps);
  }
}

void add_matrix_products(Digest& digest) {
  constexpr int64_t kRows = 21;
  constexpr int64_t kSteps = 150;
  constexpr int64_t kColumns = 61;
  const std::vector<float> left = numbers(kRows * kSteps);
  const std::vector<float> right = numbers(kSteps * kColumns);
  for (const bool is_transposed : {false, true}) {
    std::vector<float> result(static_cast<size_t>(kRows * kColumns));
    const kernels::MatrixProduct product{
        .left = left.data(),
        .left_row = kSteps,
        .left_step = 1,
        .right = right.data(),
        .codes = nullptr,
        .scales = nullptr,
        .right_line = is_transposed ? kSteps : kColumns,
        .right_is_transposed = is_transposed,
        .steps = kSteps,
        .start = right.data(),
        .result = result.data(),
        .result_row = kColumns};
    kernels::multiply(product, {0, kRows, 0, kColumns});
    digest.add(result);
  }
}

bool has_fused_multiply_adds() {
#if defined(__x86_64__)
  return kernels::isa() != kernels::Isa::baseline;
#else
  return true;
#endif
}

TEST(everything_that_is_compiled_for_each_set_has_a_digest) {
  Digest digest;
  std::vector<ChannelLayout> all = layouts();
  for (const ChannelLayout& layout : sliced_layouts()) {
    all.push_back(layout);
  }
  for_each_type([&]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : all) {
      const Sample<Storage, Parameter> sample(layout);
      const Clamp<Storage, Parameter> clamp({0, 6});
      digest.add(sample.scale);
      digest.add(sample.shift);
      add_moments(sample, digest);
      add_passes(sample, clamp, digest);
      add_passes(sample, kernels::Hardswish(), digest);
      add_passes(sample, kernels::Silu(), digest);
      add_sum_gradients(sample, clamp, digest);
    }
  });
  add_draws(digest);
  add_depthwise(digest);
  add_matrix_products(digest);
  const char* const with = has_fused_multiply_adds() ? "with" : "without";
  std::printf("digest of a set %s fused multiply-adds: %016" PRIx64 "\n", with, digest.value);
}

} // namespace
} // namespace torch_odt::tests
