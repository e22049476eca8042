// Convolutions of int8 numbers: exactly what plain loops sum up, whatever the shape, the values and the threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../kernels/int8/correlation.h"
#include "../../kernels/int8/descent.h"
#include "../../kernels/int8/integers.h"
#include "../../kernels/int8/padded.h"
#include "../../kernels/int8/patches.h"
#include "../../kernels/storage.h"
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
      for (const int64_t threads : {1, 3, 5}) {
        const Context by("threads " + text_of(threads));
        {
          const Context pass("forward");
          check_sums(sums_of(sample, Pass::forward, threads), sample.forward());
        }
        {
          const Context pass("grad_input");
          check_sums(sums_of(sample, Pass::grad_input, threads), sample.grad_input());
        }
        if (packs_on_the_way(conv, Pass::forward)) {
          const Context pass("forward, packing on the way");
          check_sums(packing_sums_of(sample, Pass::forward, threads), sample.forward());
        }
        if (packs_on_the_way(conv, Pass::grad_input)) {
          const Context pass("grad_input, packing on the way");
          check_sums(packing_sums_of(sample, Pass::grad_input, threads), sample.grad_input());
        }
        {
          const Context pass("grad_weight");
          std::vector<int64_t> grad_bias;
          check_sums(grad_weight_sums_of(sample, threads, grad_bias), sample.grad_weight());
          CHECK(grad_bias == sample.grad_bias());
        }
      }
    }
  }
}

// As many threads as samples, one more and many more: each of those that have no sample leaves nothing behind.
TEST(int8_depthwise_gradients_of_few_samples_are_exact) {
  for (const int64_t batch : {4, 10, 15}) {
    const Int8Sample sample({batch, axis(6, 3, 1, 1), axis(5, 3, 1, 1), 32, 32, 32}, 3, Values::random);
    for (const int64_t threads : {batch / 2, batch, batch + 1, 3 * batch}) {
      const Context here("batch " + text_of(batch) + ", threads " + text_of(threads));
      std::vector<int64_t> grad_bias;
      check_sums(grad_weight_sums_of(sample, threads, grad_bias), sample.grad_weight());
      CHECK(grad_bias == sample.grad_bias());
    }
  }
}

TEST(int8_members_of_threads_do_their_parts) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    const Int8Sample sample(conv, 3, Values::random);
    for (const int64_t threads : {2, 5}) {
      const Context by("threads " + text_of(threads));
      check_sums(sums_by_members(sample, Pass::forward, threads), sample.forward());
      check_sums(sums_by_members(sample, Pass::grad_input, threads), sample.grad_input());
      if (grad_weight_parts_are_independent(conv, kernels::int8::Threads{threads})) {
        std::vector<int64_t> grad_bias;
        check_sums(grad_weight_sums_by_members(sample, threads, grad_bias), sample.grad_weight());
        CHECK(grad_bias == sample.grad_bias());
      }
    }
  }
}

TEST(int8_convolutions_of_extremes_are_exact) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    for (const Values values : {Values::lowest, Values::highest, Values::mixed_extremes}) {
      const Int8Sample sample(conv, values == Values::lowest ? 127 : 0, values);
      check_sums(sums_of(sample, Pass::forward, 1), sample.forward());
      check_sums(sums_of(sample, Pass::grad_input, 1), sample.grad_input());
      std::vector<int64_t> grad_bias;
      check_sums(grad_weight_sums_of(sample, 1, grad_bias), sample.grad_weight());
    }
  }
}

// By a factor of each output channel. Where there are few pixels, sums of some sets are never stored as such.
TEST(int8_gradients_of_weights_become_floats) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    const Int8Sample sample(conv, 3, Values::random);
    std::vector<float> multipliers;
    for (int64_t channel = 0; channel < conv.out_channels; ++channel) {
      multipliers.push_back(0.001F * static_cast<float>(channel + 1));
    }
    const std::vector<int64_t> sums = sample.grad_weight();
    std::vector<float> floats(sums.size(), 77.0F);
    kernels::int8::Finish how;
    how.result = kernels::int8::Result::floats;
    how.output = floats.data();
    how.multipliers = multipliers.data();
    how.per_channel = true;
    how.channels_are_rows = true;
    std::vector<int64_t> grad_bias;
    for (const int64_t threads : {1, 3}) {
      float most = 0;
      const float largest = run_grad_weight(sample, how, threads, grad_bias);
      for (size_t i = 0; i < sums.size(); ++i) {
        const float scaled = static_cast<float>(sums[i]) * multipliers[i * multipliers.size() / sums.size()];
        most = std::max(most, std::abs(scaled));
        if (floats[i] != scaled) {
          CHECK_EQUAL(floats[i], scaled);
          break;
        }
      }
      CHECK_EQUAL(largest, most);
    }
  }
}

// Rows whose packed weights fill the workspace, and whose own depth is cut into chunks.
TEST(int8_long_rows_are_packed_on_the_way) {
  for (const int64_t batch : {1, 9, 16}) {
    const Int8Sample sample({batch, axis(1, 1), axis(1, 1), 25088, 37, 1}, 3, Values::random);
    const Context here("batch " + text_of(batch));
    CHECK(packs_on_the_way(sample.conv, Pass::forward));
    CHECK(packing_workspace_bytes(sample.conv, Pass::forward) <= kernels::int8::kMostWorkspaceBytes);
    check_sums(packing_sums_of(sample, Pass::forward, 1), sample.forward());
    check_sums(packing_sums_of(sample, Pass::forward, 2), sample.forward());
  }
}

// By one factor, or where each channel is a group by its own.
TEST(int8_gradients_of_inputs_become_bfloat16) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    const Int8Sample sample(conv, 3, Values::random);
    std::vector<float> multipliers(static_cast<size_t>(conv.depthwise() ? conv.in_channels : 1));
    for (size_t i = 0; i < multipliers.size(); ++i) {
      multipliers[i] = 0.001F * static_cast<float>(i + 1);
    }
    const std::vector<int64_t> sums = sample.grad_input();
    kernels::int8::Finish how;
    how.result = kernels::int8::Result::bfloat16s;
    how.multipliers = multipliers.data();
    how.per_channel = multipliers.size() > 1;
    for (const int64_t threads : {1, 3}) {
      std::vector<kernels::BFloat16> halves(sums.size() + 1, kernels::BFloat16{0x1234});
      how.output = halves.data();
      run_pass(sample, Pass::grad_input, how, threads);
      for (size_t i = 0; i < sums.size(); ++i) {
        const float scaled = static_cast<float>(sums[i]) * multipliers[i % multipliers.size()];
        const auto expected = kernels::rounded<kernels::BFloat16>(scaled);
        if (kernels::load(halves[i]) != expected) {
          CHECK_EQUAL(kernels::load(halves[i]), expected);
          break;
        }
      }
      CHECK_EQUAL(halves.back().bits, 0x1234);
    }
  }
}

// Gradients that are never stored change a weight as stored ones do.
TEST(int8_weights_descend_by_gradients_that_are_not_stored) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    const Int8Sample sample(conv, 3, Values::random);
    std::vector<float> multipliers, rates;
    for (int64_t channel = 0; channel < conv.out_channels; ++channel) {
      multipliers.push_back(0.001F * static_cast<float>(channel + 1));
      rates.push_back(0.7F / static_cast<float>(channel % 5 + 1));
    }
    std::vector<float> floats(sample.weight.size(), 77.0F);
    kernels::int8::Finish how;
    how.result = kernels::int8::Result::floats;
    how.output = floats.data();
    how.multipliers = multipliers.data();
    how.per_channel = true;
    how.channels_are_rows = true;
    std::vector<int64_t> grad_bias;
    const float largest = run_grad_weight(sample, how, 1, grad_bias);
    const int64_t rows = conv.out_channels, columns = rows == 0 ? 0 : static_cast<int64_t>(sample.weight.size()) / rows;
    std::vector<int8_t> expected = sample.weight;
    const kernels::int8::Descent stored{floats.data(), expected.data(), rows, columns, rates.data(), 0.01F, 12345};
    const int64_t clamped = kernels::int8::descend(stored, {}).clamped;
    for (const int64_t threads : {1, 3}) {
      std::vector<int8_t> weight = sample.weight;
      kernels::int8::Noted noted;
      how.result = kernels::int8::Result::descent;
      how.output = weight.data();
      how.seed = stored.seed;
      how.rates = stored.rates;
      how.shrink = stored.shrink;
      how.noted = &noted;
      CHECK_EQUAL(run_grad_weight(sample, how, threads, grad_bias), largest);
      CHECK(weight == expected);
      CHECK_EQUAL(noted.clamped, clamped);
      CHECK(grad_bias == sample.grad_bias());
    }
  }
}

TEST(int8_steps_that_are_not_stored_are_taken_off) {
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    Int8Sample sample(conv, 3, Values::random);
    for (int8_t& weight : sample.weight) {
      weight = std::max<int8_t>(weight, -127);
    }
    const auto count = static_cast<int64_t>(sample.weight.size());
    const float multiplier = 0x1p-7F;
    std::vector<int8_t> steps(sample.weight.size(), 77);
    kernels::int8::Finish how;
    how.result = kernels::int8::Result::int8;
    how.output = steps.data();
    how.multipliers = &multiplier;
    how.channels_are_rows = true;
    how.rounding = kernels::int8::Rounding::pseudo_stochastic;
    how.shift = 7;
    how.low = -127;
    std::vector<int64_t> grad_bias;
    const float largest = run_grad_weight(sample, how, 1, grad_bias);
    for (const int64_t most : {127, 8}) {
      std::vector<int8_t> clipped = steps;
      std::vector<int8_t> expected = sample.weight;
      const bool are_clipped = kernels::int8::clip(clipped.data(), count, most) > most;
      const bool is_changed = kernels::int8::take_off(expected.data(), clipped.data(), count);
      for (const int64_t threads : {1, 3}) {
        std::vector<int8_t> weight = sample.weight;
        kernels::int8::Noted noted;
        how.result = kernels::int8::Result::take_off;
        how.output = weight.data();
        how.most_step = most;
        how.noted = &noted;
        CHECK_EQUAL(run_grad_weight(sample, how, threads, grad_bias), largest);
        CHECK(weight == expected);
        CHECK_EQUAL(noted.clipped > 0, are_clipped);
        CHECK_EQUAL(noted.changed > 0, is_changed);
      }
    }
    how.result = kernels::int8::Result::nothing;
    how.output = nullptr;
    how.noted = nullptr;
    for (const int64_t threads : {1, 3}) {
      CHECK_EQUAL(run_grad_weight(sample, how, threads, grad_bias), largest);
    }
  }
}

TEST(int8_gradients_of_few_channels_go_by_patches) {
  using kernels::int8::goes_by_patches;
  const Conv2d stem = {8, axis(224, 3, 2, 1), axis(224, 3, 2, 1), 3, 32, 1};
  CHECK(goes_by_patches(stem, Pass::grad_input));
  CHECK(!goes_by_patches(stem, Pass::forward));
  CHECK(goes_by_patches({8, axis(224, 7, 2, 3), axis(224, 7, 2, 3), 3, 64, 1}, Pass::grad_input));
  CHECK(goes_by_patches({8, axis(32, 3, 1, 1), axis(32, 3, 1, 1), 3, 64, 1}, Pass::grad_input));
  CHECK(!goes_by_patches({8, axis(56, 3, 2, 1), axis(56, 3, 2, 1), 64, 128, 1}, Pass::grad_input));
  CHECK(!goes_by_patches({8, axis(56, 3, 2, 1), axis(56, 3, 2, 1), 6, 128, 2}, Pass::grad_input));
  CHECK(!goes_by_patches({8, axis(1, 1), axis(1, 1), 3, 64, 1}, Pass::grad_input));
}

TEST(int8_rows_of_padded_images_overlap_where_a_set_needs_no_packing) {
  using kernels::int8::correlation_of;
  const auto goes = [](const Conv2d& conv, Pass pass) {
    const kernels::int8::Correlation part = correlation_of(conv, pass, 0);
    return kernels::int8::goes_padded(part.kernels(), part.rows, part.columns, part.source_depth);
  };
  const Conv2d conv = {8, axis(56, 3, 1, 1), axis(56, 3, 1, 1), 64, 64, 1};
  const bool can = kernels::int8::table().left_in_segments;
  CHECK_EQUAL(goes(conv, Pass::forward), can);
  CHECK_EQUAL(goes(conv, Pass::grad_input), can);
  CHECK(!goes({8, axis(56, 3, 2, 1), axis(56, 3, 2, 1), 64, 64, 1}, Pass::forward));
  CHECK(!goes({8, axis(56, 1), axis(56, 1), 64, 64, 1}, Pass::forward));
  CHECK(!goes({8, axis(7, 3, 1, 1), axis(7, 3, 1, 1), 64, 64, 1}, Pass::forward));
  CHECK(!goes({8, axis(56, 3, 1, 1), axis(56, 3, 1, 1), 48, 64, 1}, Pass::forward));
}

// How a pass is cut shows nowhere: it has the bits of sums that are finished pixel by pixel.
template <typename Output>
void check_finished(const Int8Sample& sample, Pass pass, kernels::int8::Finish how, bool with_mask) {
  using kernels::int8::Block;
  const Conv2d& conv = sample.conv;
  const bool forward = pass == Pass::forward;
  const std::vector<int64_t> wide = forward ? sample.forward() : sample.grad_input();
  const std::vector<int32_t> sums = [&] {
    std::vector<int32_t> result(wide.begin(), wide.end());
    result.resize(result.size() + 64); // what vectors read behind the end
    return result;
  }();
  const int64_t channels = forward ? conv.out_channels : conv.in_channels;
  const int64_t columns = conv.depthwise() ? channels : channels / conv.groups;
  std::vector<Output> expected(wide.size(), Output{77});
  std::vector<uint8_t> expected_mask(wide.size() / 8 + 1);
  const auto finish_into = [&](std::vector<Output>& output, std::vector<uint8_t>& mask) {
    kernels::int8::Finish result = how;
    result.output = output.data();
    result.mask = with_mask ? mask.data() : nullptr;
    return result;
  };
  float most = 0;
  for (int64_t place = 0; place < static_cast<int64_t>(wide.size()); place += columns) {
    const Block<int32_t> row = {
        sums.data() + place, columns, 1, columns, &place, 0, place % channels, nullptr, nullptr};
    most = std::max(most, finish(finish_into(expected, expected_mask), row));
  }
  for (const int64_t threads : {1, 2}) {
    std::vector<Output> output(wide.size(), Output{77});
    std::vector<uint8_t> mask(expected_mask.size());
    const float largest = run_pass(sample, pass, finish_into(output, mask), threads);
    CHECK(output == expected);
    CHECK(mask == expected_mask);
    CHECK_EQUAL(largest, most);
  }
}

TEST(int8_passes_are_finished_as_pixels_are) {
  using kernels::int8::Finish;
  using kernels::int8::Result;
  using kernels::int8::Rounding;
  for (const Conv2d& conv : int8_convolutions()) {
    const Context here(text_of(conv));
    const Int8Sample sample(conv, 3, Values::random);
    std::vector<float> multipliers;
    for (int64_t channel = 0; channel < std::max(conv.in_channels, conv.out_channels); ++channel) {
      multipliers.push_back(0.001F * static_cast<float>(channel % 7 + 1));
    }
    for (const Pass pass : {Pass::forward, Pass::grad_input}) {
      const Context by(pass == Pass::forward ? "forward" : "grad_input");
      Finish how;
      check_finished<int32_t>(sample, pass, how, false);
      how.multipliers = multipliers.data();
      how.seed = 0x123456789abcdef;
      for (const bool per_channel : {false, true}) {
        how.per_channel = per_channel;
        how.result = Result::floats;
        check_finished<float>(sample, pass, how, false);
        how.result = Result::int8;
        for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
          how.rounding = rounding;
          check_finished<int8_t>(sample, pass, how, false);
          Finish clamped = how;
          clamped.zero_point = -7;
          clamped.low = -100;
          clamped.high = 90;
          check_finished<int8_t>(sample, pass, clamped, true);
        }
      }
      const float multiplier = 1.0F / 64;
      Finish shifted = how;
      shifted.rounding = Rounding::pseudo_stochastic;
      shifted.shift = 6;
      shifted.per_channel = false;
      shifted.multipliers = &multiplier;
      check_finished<int8_t>(sample, pass, shifted, false);
    }
  }
}

// More terms than int32 can sum over, or than are multiplied at a time; and taps that are too many or too far apart for the workspace.
std::vector<Conv2d> long_sums() {
  return {
      {3, axis(1, 1), axis(1, 1), 70000, 5, 1},
      {3, axis(1, 1), axis(1, 1), 5, 70000, 1},
      {40, axis(1, 1), axis(1, 1), 25088, 18, 1},
      {2, axis(1, 1), axis(1, 1), 150, 26000, 2},
      {1, axis(4, 3, 1, 1), axis(3, 3, 1, 1), 7500, 3, 1},
      {1, axis(5, 3, 2, 1), axis(4, 3, 2, 1), 3, 20000, 1},
      {1, axis(300, 300, 1, 1), axis(260, 260, 1, 1), 3, 3, 3},
      {1, axis(3, 301, 1, 150), axis(2, 261, 1, 130), 20, 20, 20},
      {1, axis(1, 1), axis(70010, 70000), 2, 2, 2},
      {1, axis(9, 1), axis(20, 3, 1, 30000, 30000), 18, 18, 18},
      {1, axis(1, 1), axis(70000, 3, 1, 1), 3, 3, 3},
      {1, axis(9, 31, 1, 15), axis(4, 31, 1, 15), 100, 100, 100},
  };
}

// Sums as int32, which are the nearest where they do not fit, and as floats.
template <typename Run>
void check_long(const std::vector<int64_t>& expected, const Run& run) {
  constexpr int64_t kLowest = INT32_MIN;
  constexpr int64_t kHighest = INT32_MAX;
  std::vector<int32_t> sums(expected.size(), 77);
  std::vector<float> floats(expected.size(), 77.0F);
  const float multiplier = 0.25F;
  kernels::int8::Finish how;
  how.output = sums.data();
  const float of_sums = run(how);
  how.result = kernels::int8::Result::floats;
  how.multipliers = &multiplier;
  how.output = floats.data();
  const float largest = run(how);
  bool fits = true;
  float most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t nearest = std::clamp(expected[i], kLowest, kHighest);
    const float scaled = static_cast<float>(expected[i]) * multiplier;
    fits = fits && nearest == expected[i];
    most = std::max(most, std::abs(scaled));
    if (sums[i] != nearest || floats[i] != scaled) {
      CHECK_EQUAL(sums[i], nearest);
      CHECK_EQUAL(floats[i], scaled);
      return;
    }
  }
  CHECK_EQUAL(std::isinf(of_sums), !fits);
  CHECK_EQUAL(largest, most);
}

TEST(long_int8_sums_are_exact) {
  for (const Conv2d& conv : long_sums()) {
    const Context here(text_of(conv));
    for (const Values values : {Values::random, Values::lowest, Values::highest}) {
      const Int8Sample sample(conv, values == Values::highest ? -128 : values == Values::lowest ? 127 : 5, values);
      const int64_t threads = values == Values::random ? 3 : 1;
      const auto pass = [&](Pass which) {
        return [&, which](const kernels::int8::Finish& how) { return run_pass(sample, which, how, threads); };
      };
      check_long(sample.forward(), pass(Pass::forward));
      // A large kernel over a large image is long to compute: each position takes part in every tap.
      if (conv.in_pixels() * conv.in_channels * conv.taps() * conv.out_depth() < 100000000) {
        check_long(sample.grad_input(), pass(Pass::grad_input));
      }
      std::vector<int64_t> grad_bias;
      check_long(sample.grad_weight(), [&](kernels::int8::Finish how) {
        how.channels_are_rows = true;
        return run_grad_weight(sample, how, threads, grad_bias);
      });
      CHECK(grad_bias == sample.grad_bias());
    }
  }
}

TEST(int8_workspaces_are_small) {
  using kernels::int8::grad_weight_workspace_bytes;
  using kernels::int8::kMostWorkspaceBytes;
  using kernels::int8::workspace_bytes;
  std::vector<Conv2d> large = {
      {8, axis(224, 3, 2, 1), axis(224, 3, 2, 1), 3, 64, 1},
      {8, axis(56, 3, 1, 1), axis(56, 3, 1, 1), 64, 64, 1},
      {8, axis(7, 3, 1, 1), axis(7, 3, 1, 1), 512, 512, 1},
      {8, axis(7, 1), axis(7, 1), 2048, 512, 1},
      {8, axis(64, 1), axis(64, 1), 16, 8000, 1},
      {8, axis(64, 1), axis(64, 1), 1, 9170, 1},
      {8, axis(64, 1), axis(64, 1), 2000, 1, 1},
      {20, axis(64, 1), axis(64, 1), 128, 1000, 1},
      {8, axis(7, 1), axis(7, 1), 512, 2048, 1},
      {512, axis(1, 1), axis(1, 1), 4096, 4096, 1},
      {8, axis(112, 3, 1, 1), axis(112, 3, 1, 1), 96, 96, 96},
      {8, axis(1, 1), axis(1, 1), 25088, 50000, 1},
      {8, axis(1, 1), axis(1, 1), 4000000, 1000, 1},
      {200000, axis(1, 1), axis(1, 1), 1000, 4000000, 1},
      {8, axis(14, 3, 1, 1), axis(14, 3, 1, 1), 8192, 8192, 1},
      {8, axis(224, 101, 7, 50), axis(224, 101, 5, 50), 3, 2000, 1},
      {8, axis(2000, 101, 1, 50), axis(2000, 101, 1, 50), 15, 20, 5},
      {8, axis(56, 31, 1, 15), axis(56, 31, 1, 15), 4096, 4096, 4096},
      {8, axis(400, 400), axis(400, 400), 512, 512, 512},
      {8, axis(5, 3, 1, 1), axis(100000, 3, 1, 1), 512, 512, 512},
      {8, axis(1, 1), axis(1000000, 9000, 3), 16, 16, 16},
      {8, axis(3, 3, 1, 1), axis(3, 3, 1, 1), 1000000, 1000000, 1000000},
      {8, axis(9, 3, 1, 500000, 500000), axis(9, 3, 1, 500000, 500000), 64, 64, 64},
      {8, axis(9, 3, 500000, 500000), axis(9, 3, 1, 500000, 500000), 64, 64, 64},
      {8, axis(1, 1), axis(9, 3, 500000, 500000), 64, 64, 1},
  };
  for (const std::vector<Conv2d>& others : {long_sums(), int8_convolutions()}) {
    large.insert(large.end(), others.begin(), others.end());
  }
  for (const Conv2d& conv : large) {
    const Context here(text_of(conv));
    CHECK(workspace_bytes(conv, Pass::forward) <= kMostWorkspaceBytes);
    CHECK(workspace_bytes(conv, Pass::grad_input) <= kMostWorkspaceBytes);
    for (const int64_t threads : {1, 2, 64}) {
      CHECK(grad_weight_workspace_bytes(conv, {threads}) <= kMostWorkspaceBytes);
    }
  }
}

} // namespace
} // namespace torch_odt::tests
