// Rows of floats in int8, int32 in int8 and what stands between layers: by arithmetic of one number at a time, on every
// set, and around the ends of vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../kernels/int8/draws.h"
#include "../../kernels/int8/integers.h"
#include "../../kernels/int8/pointwise.h"
#include "../../kernels/int8/rows.h"
#include "../../kernels/storage.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

using namespace kernels::int8;

constexpr int64_t kColumns[] = {1, 7, 15, 16, 17, 24, 31, 32, 33, 49, 64, 79, 130};
constexpr int64_t kRowCounts[] = {0, 1, 7, 16, 63, 64, 65, 200};

// Numbers from -1 to 1, of which every ninth is 0.
struct Numbers {
  uint32_t state = 12345;

  uint32_t bits() {
    state = state * 1664525U + 1013904223U;
    return state >> 8;
  }
  float next() {
    return bits() % 9 == 0 ? 0.0F : static_cast<float>(bits()) * 0x1p-23F - 1;
  }
};

struct RowsSample {
  std::vector<float> values;
  std::vector<kernels::BFloat16> halves; // the same, where these are what is read
  std::vector<uint8_t> mask;
  std::vector<float> factors; // in 256ths
  Rows rows;

  RowsSample(int64_t count, int64_t columns, bool masked, bool in_bfloat16 = false)
      : values(static_cast<size_t>(count * columns)),
        halves(in_bfloat16 ? values.size() : 0),
        mask(static_cast<size_t>((count * columns + 7) / 8)),
        factors(static_cast<size_t>(columns + kPaddedColumns)) {
    Numbers numbers;
    for (float& value : values) {
      value = numbers.next();
    }
    for (uint8_t& byte : mask) {
      byte = static_cast<uint8_t>(numbers.bits());
    }
    for (float& factor : factors) {
      factor = 130 * kByteSteps * numbers.next();
    }
    for (size_t i = 0; i < halves.size(); ++i) {
      kernels::store(values[i], halves[i]);
      values[i] = kernels::load(halves[i]);
    }
    const void* const read = in_bfloat16 ? static_cast<const void*>(halves.data()) : values.data();
    rows = {read, count, columns, masked ? mask.data() : nullptr, 1, in_bfloat16};
  }

  float at(int64_t index) const {
    const auto i = static_cast<size_t>(index);
    return rows.mask == nullptr || (mask[i / 8] >> (i % 8) & 1) != 0 ? values[i] : 0.0F;
  }
};

// What weights draw.
float half_drawn(uint64_t seed, int64_t row_begins, int64_t column) {
  Keys keys(seed);
  const uint32_t bits = hash(static_cast<uint32_t>(row_begins + half_hash_of(column)), keys.at(row_begins));
  return static_cast<float>(takes_upper_half(column) ? bits >> 16 : bits & 0xffffU) * kHalfUnit;
}

int8_t rounded(float steps, uint64_t seed, int64_t row_begins, int64_t column) {
  Keys keys(seed);
  const uint32_t draw = byte_draw(keys.at(row_begins), row_begins, column);
  const double whole = std::floor((std::nearbyint(static_cast<double>(steps)) + draw) / 256);
  return static_cast<int8_t>(std::clamp(whole, -127.0, 127.0));
}

TEST(int8_rows_are_scanned) {
  for (const int64_t columns : kColumns) {
    for (const int64_t count : {int64_t{1}, int64_t{5}, kRowsOfSum + 3}) {
      for (const int which : {0, 1, 2, 3}) {
        const RowsSample sample(count, columns, which % 2 != 0, which / 2 != 0);
        std::vector<float> largest(static_cast<size_t>(columns));
        std::vector<float> sums(static_cast<size_t>(columns));
        std::vector<char> workspace(static_cast<size_t>(scan_workspace_bytes(sample.rows)));
        scan(sample.rows, {}, largest.data(), sums.data(), workspace.data());
        for (int64_t column = 0; column < columns; ++column) {
          float most = 0;
          double total = 0;
          for (int64_t first = 0; first < count; first += kRowsOfSum) {
            float sum = 0;
            for (int64_t row = first; row < std::min(count, first + kRowsOfSum); ++row) {
              const float value = sample.at(row * columns + column);
              most = std::max(most, std::abs(value));
              sum += value;
            }
            total += sum;
          }
          CHECK_EQUAL(largest[static_cast<size_t>(column)], most);
          CHECK_EQUAL(sums[static_cast<size_t>(column)], static_cast<float>(total));
        }
      }
    }
  }
}

TEST(int8_rows_that_are_not_finite_are_told) {
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (const bool in_bfloat16 : {false, true}) {
      RowsSample sample(3, 17, false, in_bfloat16);
      sample.values[2 * 17 + 16] = bad;
      if (in_bfloat16) {
        kernels::store(bad, sample.halves.back());
      }
      std::vector<float> largest(17);
      std::vector<float> sums(17);
      std::vector<char> workspace(static_cast<size_t>(scan_workspace_bytes(sample.rows)));
      scan(sample.rows, {}, largest.data(), sums.data(), workspace.data());
      CHECK(!std::isfinite(largest[16]) && std::isfinite(largest[15]));
    }
  }
}

TEST(int8_rows_are_rounded) {
  constexpr uint64_t kSeed = 0x123456789abcdefU;
  for (const int64_t columns : kColumns) {
    for (const int which : {0, 1, 2, 3}) {
      const RowsSample sample(5, columns, which % 2 != 0, which / 2 != 0);
      // One byte behind the last must stay as it was.
      std::vector<int8_t> first(sample.values.size() + 1, 99);
      std::vector<int8_t> second = first;
      std::vector<float> others(sample.factors);
      std::reverse(others.begin(), others.begin() + columns);
      const RoundedRows to_second{second.data(), others.data()};
      round_rows(sample.rows, kSeed, {first.data(), sample.factors.data()}, &to_second, {});
      std::vector<int8_t> alone(first.size(), 99);
      round_rows(sample.rows, kSeed, {alone.data(), sample.factors.data()}, nullptr, {});
      CHECK(alone == first);
      for (int64_t index = 0; index < 5 * columns; ++index) {
        const int64_t column = index % columns;
        const int64_t begins = index - column;
        const volatile float product = sample.at(index) * sample.factors[static_cast<size_t>(column)];
        const volatile float other = sample.at(index) * others[static_cast<size_t>(column)];
        CHECK_EQUAL(int{first[static_cast<size_t>(index)]}, int{rounded(product, kSeed, begins, column)});
        CHECK_EQUAL(int{second[static_cast<size_t>(index)]}, int{rounded(other, kSeed, begins, column)});
      }
      CHECK(first.back() == 99 && second.back() == 99);
    }
  }
}

TEST(int8_rows_of_several_pixels_are_as_if_written_out) {
  constexpr int64_t kRepeats = 7;
  constexpr int64_t kSeed = 99;
  for (const int64_t columns : kColumns) {
    for (const int which_way : {0, 1, 2, 3}) {
      const bool masked = which_way % 2 != 0;
      const bool in_bfloat16 = which_way / 2 != 0;
      // Just the values that there are, so that sanitizers tell of more.
      const RowsSample few(2, columns, false, in_bfloat16);
      RowsSample whole(2 * kRepeats, columns, masked);
      for (size_t i = 0; i < whole.values.size(); ++i) {
        const auto width = static_cast<size_t>(columns);
        whole.values[i] = few.values[i / (kRepeats * width) * width + i % width];
      }
      const Rows rows{few.rows.values, 2 * kRepeats, columns, whole.rows.mask, kRepeats, in_bfloat16};
      std::vector<float> largest[2];
      std::vector<float> sums[2];
      std::vector<int8_t> rounded_rows[2];
      for (const size_t which : {size_t{0}, size_t{1}}) {
        const Rows& each = which == 0 ? whole.rows : rows;
        largest[which].resize(static_cast<size_t>(columns));
        sums[which].resize(static_cast<size_t>(columns));
        rounded_rows[which].resize(whole.values.size());
        std::vector<char> workspace(static_cast<size_t>(scan_workspace_bytes(each)));
        scan(each, {}, largest[which].data(), sums[which].data(), workspace.data());
        round_rows(each, kSeed, {rounded_rows[which].data(), whole.factors.data()}, nullptr, {});
      }
      CHECK(largest[0] == largest[1] && sums[0] == sums[1] && rounded_rows[0] == rounded_rows[1]);
    }
  }
}

TEST(int8_rows_count_what_is_clamped) {
  RowsSample sample(3, 33, false);
  for (float& value : sample.values) {
    value *= 300;
  }
  sample.values[5] = 1e30F;
  sample.values[6] = -1e30F;
  std::vector<int8_t> output(sample.values.size());
  const int64_t clamped = round_rows(sample.rows, 3, {output.data()}, nullptr, {});
  int64_t expected = 0;
  for (int64_t index = 0; index < 99; ++index) {
    const float whole = std::floor(sample.at(index) + half_drawn(3, index - index % 33, index % 33));
    expected += std::abs(whole) > 127 ? 1 : 0;
  }
  CHECK_EQUAL(clamped, expected);
  CHECK(output[5] == 127 && output[6] == -127);
}

int32_t shifted(int32_t sum, int64_t shift) {
  const auto magnitude = static_cast<int64_t>(std::abs(static_cast<int64_t>(sum)));
  const int64_t lost = magnitude & ((int64_t{1} << shift) - 1);
  const int64_t half = shift / 2;
  const int64_t random = (lost & ((int64_t{1} << half) - 1)) << (shift - 2 * half);
  const int64_t whole = std::min<int64_t>(127, (magnitude >> shift) + (lost >> half > random ? 1 : 0));
  return static_cast<int32_t>(sum < 0 ? -whole : whole);
}

TEST(int8_sums_are_shifted) {
  Numbers numbers;
  for (const int64_t count : kRowCounts) {
    std::vector<int32_t> sums(static_cast<size_t>(count));
    for (int32_t& sum : sums) {
      sum = static_cast<int32_t>(numbers.bits() << 8) >> numbers.bits() % 31;
    }
    for (const int64_t shift : {0, 1, 4, 11, 30}) {
      std::vector<int8_t> output(sums.size() + 1, 99);
      shift_to_int8(sums.data(), count, shift, Rounding::pseudo_stochastic, output.data());
      for (size_t i = 0; i < sums.size(); ++i) {
        CHECK_EQUAL(int32_t{output[i]}, shifted(sums[i], shift));
      }
      shift_to_int8(sums.data(), count, shift, Rounding::nearest, output.data());
      for (size_t i = 0; i < sums.size(); ++i) {
        const float whole = std::nearbyint(std::ldexp(static_cast<float>(sums[i]), -static_cast<int>(shift)));
        CHECK_EQUAL(static_cast<float>(output[i]), std::clamp(whole, -127.0F, 127.0F));
      }
      CHECK(output.back() == 99);
    }
  }
}

TEST(int8_weights_are_updated_and_gradients_kept) {
  Numbers numbers;
  for (const int64_t count : kRowCounts) {
    std::vector<int8_t> weights(static_cast<size_t>(count) + 1, 99);
    std::vector<int8_t> steps(weights.size());
    for (int64_t i = 0; i < count; ++i) {
      weights[static_cast<size_t>(i)] = static_cast<int8_t>(numbers.bits());
      steps[static_cast<size_t>(i)] = static_cast<int8_t>(numbers.bits());
    }
    const std::vector<int8_t> before = weights;
    const std::vector<int8_t> none(weights.size());
    CHECK(!take_off(weights.data(), none.data(), count) && weights == before);
    take_off(weights.data(), steps.data(), count);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      CHECK_EQUAL(int{weights[i]}, std::clamp(before[i] - steps[i], -127, 127));
    }
    CHECK(weights.back() == 99);
    for (const auto& [low, high] : {std::pair{0, 128}, std::pair{0, 50}, std::pair{3, 3}, std::pair{-129, 128}}) {
      std::vector<int8_t> kept(weights.size(), 99);
      keep_between(steps.data(), before.data(), count, low, high, kept.data());
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        CHECK_EQUAL(int{kept[i]}, before[i] > low && before[i] < high ? int{steps[i]} : 0);
      }
      CHECK(kept.back() == 99);
    }
  }
}

// What a number becomes on a grid; whether it was not clamped.
bool on_grid(float real, const ToGrid& to, int8_t& value) {
  const float whole = std::nearbyint(real / to.grid.step) + to.grid.zero;
  value = static_cast<int8_t>(std::clamp(whole, to.low, to.high));
  return whole >= to.low && whole <= to.high;
}

TEST(int8_numbers_are_put_on_grids) {
  Numbers numbers;
  for (const int64_t count : kRowCounts) {
    std::vector<float> real(static_cast<size_t>(count));
    std::vector<int8_t> left(real.size());
    std::vector<int8_t> right(real.size());
    for (size_t i = 0; i < real.size(); ++i) {
      real[i] = 5 * numbers.next();
      left[i] = static_cast<int8_t>(numbers.bits());
      right[i] = static_cast<int8_t>(numbers.bits());
    }
    std::vector<int8_t> output(real.size() + 1, 99);
    std::vector<uint8_t> mask((real.size() + 7) / 8 + 1, 99);
    const ToGrid to{{0.03F, -7}, -100, 90, output.data(), mask.data()};
    const auto bit = [&](size_t i) { return (mask[i / 8] >> (i % 8) & 1) != 0; };
    CHECK(quantize(real.data(), count, to));
    for (size_t i = 0; i < real.size(); ++i) {
      int8_t value = 0;
      const bool inside = on_grid(real[i], to, value);
      CHECK(output[i] == value && bit(i) == inside);
    }
    const Grid8 one{0.02F, 3};
    const Grid8 other{0.011F, -20};
    add(left.data(), one, right.data(), other, count, to);
    for (size_t i = 0; i < real.size(); ++i) {
      const volatile float first = (static_cast<float>(left[i]) - one.zero) * one.step;
      const volatile float second = (static_cast<float>(right[i]) - other.zero) * other.step;
      int8_t value = 0;
      const bool inside = on_grid(first + second, to, value);
      CHECK(output[i] == value && bit(i) == inside);
    }
    CHECK(output.back() == 99 && mask.back() == 99);
    if (count > 0) {
      real.back() = NAN;
      CHECK(!quantize(real.data(), count, to));
    }
  }
}

} // namespace
} // namespace torch_odt::tests
