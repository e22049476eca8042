// Gradient descent of int8 weights: by arithmetic of one number at a time, on every set, and around the ends of vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../kernels/int8/descent.h"
#include "../../kernels/int8/draws.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

using namespace kernels::int8;

constexpr uint64_t kDescentSeed = 0x123456789abcdefU;

struct DescentSample {
  std::vector<float> gradients;
  std::vector<float> rates;
  std::vector<int8_t> weights; // and one behind the last, which must stay as it was
  Descent how;

  DescentSample(int64_t rows, int64_t columns, float rate, float decay)
      : gradients(static_cast<size_t>(rows * columns)),
        rates(static_cast<size_t>(rows)),
        weights(gradients.size() + 1, 99) {
    uint32_t state = 12345;
    const auto next = [&] {
      state = state * 1664525U + 1013904223U;
      return state >> 8;
    };
    for (float& gradient : gradients) {
      gradient = static_cast<float>(next()) * 0x1p-17F - 64;
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      weights[i] = static_cast<int8_t>(static_cast<int>(next() % 255) - 127);
    }
    for (size_t row = 0; row < rates.size(); ++row) {
      rates[row] = rate * static_cast<float>(row % 3 + 1);
    }
    how = {gradients.data(), weights.data(), rows, columns, rates.data(), rate * decay, kDescentSeed};
  }
};

float draw_of(int64_t row_begins, int64_t column) {
  Keys keys(kDescentSeed);
  const uint32_t key = keys.at(row_begins);
  const uint32_t bits = mixed(static_cast<uint32_t>(row_begins + half_hash_of(column)) * kGolden + key);
  return static_cast<float>(takes_upper_half(column) ? bits >> 16 : bits & 0xffffU) * kHalfUnit;
}

TEST(int8_descent_is_that_of_single_numbers) {
  for (const int64_t columns : {1, 7, 15, 16, 17, 31, 32, 33, 49, 64, 79, 130}) {
    for (const int64_t rows : {0, 1, 5, 16, 33}) {
      for (const auto& [rate, decay] : {std::pair{0.3F, 0.0F}, std::pair{1.7F, 0.01F}}) {
        DescentSample sample(rows, columns, rate, decay);
        const std::vector<int8_t> before = sample.weights;
        const Descended found = descend(sample.how, {});
        int64_t clamped = 0;
        for (int64_t index = 0; index < rows * columns; ++index) {
          const auto i = static_cast<size_t>(index);
          const float weight = before[i];
          // Volatile, so that nothing is fused.
          const volatile float decayed = weight * sample.how.shrink;
          const volatile float descended = sample.gradients[i] * sample.rates[static_cast<size_t>(index / columns)];
          const volatile float step = descended + decayed;
          const volatile float after = weight - step;
          const float whole = std::floor(after + draw_of(index - index % columns, index % columns));
          const float inside = std::clamp(whole, -127.0F, 127.0F);
          clamped += whole != inside ? 1 : 0;
          CHECK_EQUAL(int{sample.weights[i]}, static_cast<int>(inside));
        }
        CHECK_EQUAL(found.clamped, clamped);
        CHECK(found.is_finite);
        CHECK(sample.weights.back() == 99);
      }
    }
  }
}

TEST(int8_descent_that_is_not_finite_is_told) {
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (const int64_t column : {0, 31, 32, 46}) {
      DescentSample sample(3, 47, 0.5F, 0.0F);
      sample.gradients[static_cast<size_t>(2 * 47 + column)] = bad;
      CHECK(!descend(sample.how, {}).is_finite);
    }
  }
  DescentSample sample(3, 47, 1e30F, 0.0F);
  const Descended found = descend(sample.how, {});
  CHECK(found.is_finite && found.clamped > 100);
  for (const float bad : {NAN, INFINITY}) {
    for (size_t row = 0; row < 3; ++row) {
      DescentSample other(3, 47, 0.5F, 0.0F);
      other.rates[row] = bad;
      CHECK(!descend(other.how, {}).is_finite);
    }
  }
}

} // namespace
} // namespace torch_odt::tests
