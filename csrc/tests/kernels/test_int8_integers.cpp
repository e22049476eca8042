// Integers that become int8, and scales that are held: by arithmetic of one number at a time, around the ends of
// vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../kernels/int8/held_scale.h"
#include "../../kernels/int8/integers.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

using namespace kernels::int8;

constexpr int64_t kIntegerCounts[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 130};

template <typename Number>
std::vector<Number> some_numbers(int64_t count, int64_t most) {
  std::vector<Number> numbers(static_cast<size_t>(count));
  uint32_t state = 4321;
  for (Number& number : numbers) {
    state = state * 1664525U + 1013904223U;
    number = static_cast<Number>(static_cast<int64_t>(state >> 4) % (2 * most + 1) - most);
  }
  return numbers;
}

TEST(int8_shifts_of_32_and_64_bits_agree) {
  for (const int64_t count : kIntegerCounts) {
    for (const int64_t shift : {0, 1, 5, 14, 22, 30}) {
      const auto narrow = some_numbers<int32_t>(count, 1 << 22);
      const std::vector<int64_t> wide(narrow.begin(), narrow.end());
      for (const Rounding rounding : {Rounding::nearest, Rounding::pseudo_stochastic}) {
        std::vector<int8_t> found(narrow.size() + 1, 99);
        std::vector<int8_t> expected(narrow.size() + 1, 99);
        shift_to_int8(narrow.data(), count, shift, rounding, found.data());
        shift_to_int8(wide.data(), count, shift, rounding, expected.data());
        CHECK(found == expected);
      }
      int64_t largest = 0;
      for (const int64_t number : wide) {
        largest = std::max(largest, number < 0 ? -number : number);
      }
      CHECK(largest_magnitude(wide.data(), count) == largest);
    }
  }
}

TEST(floats_become_whole_numbers) {
  for (const int64_t count : kIntegerCounts) {
    const auto numbers = some_numbers<int32_t>(count, 1 << 12);
    std::vector<float> values(numbers.begin(), numbers.end());
    std::vector<int32_t> whole(values.size() + 1, 99);
    whole_numbers(values.data(), count, 0.25F, 0.5F, whole.data());
    float largest = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(whole[i] == static_cast<int32_t>(std::nearbyint(values[i] * 0.125F)));
      largest = std::max(largest, std::fabs(values[i]));
    }
    CHECK(whole.back() == 99 && largest_magnitude(values.data(), count) == largest);
    for (const float odd : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      if (count > 0) {
        values.back() = odd;
        CHECK(!std::isfinite(largest_magnitude(values.data(), count)));
      }
    }
  }
}

TEST(int8_sums_and_clips_are_those_of_single_numbers) {
  for (const int64_t count : kIntegerCounts) {
    const auto coarse = some_numbers<int8_t>(count, 127);
    const auto fine = some_numbers<int8_t>(count, 100);
    for (const int64_t up : {0, 3, 16}) {
      std::vector<int32_t> sums(coarse.size());
      add_shifted(coarse.data(), fine.data(), count, up, sums.data());
      int32_t largest = 0;
      for (size_t i = 0; i < sums.size(); ++i) {
        CHECK(sums[i] == coarse[i] * (1 << up) + fine[i]);
        largest = std::max(largest, sums[i] < 0 ? -sums[i] : sums[i]);
      }
      CHECK(largest_sum(coarse.data(), fine.data(), count, up) == largest);
    }
    std::vector<int8_t> numbers = coarse;
    const int64_t largest = clip(numbers.data(), count, 20);
    int64_t expected = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      expected = std::max<int64_t>(expected, coarse[i] < 0 ? -coarse[i] : coarse[i]);
      CHECK(numbers[i] == std::clamp<int8_t>(coarse[i], -20, 20));
    }
    CHECK(largest == expected);
  }
}

TEST(a_scale_that_holds_is_looked_at_less_and_less_often) {
  double row[HeldScale::kWidth] = {8, 1, 0, 0, 1, 0, 0, 0, 0, 0};
  HeldScale scale(row);
  CHECK(scale.is_due() && scale.shift(-20) == 0);
  CHECK(scale.fitting_shift(1000, 7, -20) == 3);
  scale.note_check(-17, false);
  CHECK(scale.is_known && scale.exponent == -17 && scale.is_due());
  CHECK(scale.shift(-20) == 3 && scale.shift(-10) == 0 && scale.shift(-60) == kLargestShift);
  // One bit more would fit, which is no change; two are.
  CHECK(scale.fitting_shift(500, 7, -20) == 3 && scale.fitting_shift(250, 7, -20) == 1);
  CHECK(scale.fitting_shift(0, 7, -20) == 3);
  int64_t checks = 0;
  for (int batch = 0; batch < 32; ++batch) {
    if (scale.is_due()) {
      scale.note_check(-17, false);
      ++checks;
    } else {
      scale.note_batch(false);
    }
  }
  CHECK(checks == 6 && scale.period == 8 && scale.batches == 33 && scale.changes == 0);
  scale.note_batch(true);
  CHECK(scale.is_due() && scale.period == 1 && scale.clipped_batches == 1);
  scale.note_check(-15, false);
  CHECK(scale.changes == 1 && scale.exponent == -15);
  scale.note_check(0, true);
  CHECK(scale.exponent == -15 && scale.checks == 9);
  scale.write(row);
  CHECK(row[3] == -15 && row[6] == 36);
}

} // namespace
} // namespace torch_odt::tests
