// What becomes of sums: by the arithmetic that finish.h states, written out for one number at a time, on every set.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "../../kernels/int8/draws.h"
#include "../../kernels/int8/finish.h"
#include "../../kernels/storage.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

using namespace kernels::int8;

constexpr int64_t kRows = 5;
constexpr int64_t kStride = 144;

template <typename Sum>
struct Sums {
  std::vector<Sum> values;
  std::vector<int32_t> column_terms;
  std::vector<Sum> row_terms;
  std::vector<float> multipliers;
  std::vector<int64_t> places;
  int64_t first_column = 0;

  explicit Sums(int64_t columns, float multiplier)
      : values(kRows * kStride), column_terms(kBlockColumns), row_terms(kRows), multipliers(kBlockColumns + 8) {
    uint32_t state = 7;
    for (Sum& value : values) {
      state = state * 1664525U + 1013904223U;
      // Of all sizes: from none to what only int32 holds.
      value = static_cast<Sum>(static_cast<int32_t>(state) >> (state >> 8) % 32);
    }
    for (int64_t i = 0; i < kBlockColumns + 8; ++i) {
      multipliers[static_cast<size_t>(i)] = multiplier * static_cast<float>(1 + i % 3);
    }
    for (int64_t i = 0; i < kBlockColumns; ++i) {
      column_terms[static_cast<size_t>(i)] = static_cast<int32_t>(i * 37 - 900);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      row_terms[static_cast<size_t>(row)] = static_cast<Sum>(row * 1000 - 2000);
      places.push_back(row * columns + 19);
    }
  }

  Block<Sum> block(int64_t columns) const {
    const Sum* const rows = row_terms.empty() ? nullptr : row_terms.data();
    const int32_t* const terms = column_terms.empty() ? nullptr : column_terms.data();
    return {values.data(), kStride, kRows, columns, places.data(), first_column, 2, terms, rows};
  }

  Sum total(int64_t row, int64_t column) const {
    using Bits = std::make_unsigned_t<Sum>;
    const auto at = [](const auto& from, int64_t index) {
      return from.empty() ? Bits{0} : static_cast<Bits>(from[static_cast<size_t>(index)]);
    };
    return static_cast<Sum>(at(values, row * kStride + column) + at(column_terms, column) + at(row_terms, row));
  }
};

template <typename Sum>
float multiplier_of(const Finish& how, const Sums<Sum>& sums, int64_t row, int64_t column) {
  const int64_t channel = !how.per_channel ? 0 : 2 + (how.channels_are_rows ? row : column);
  return sums.multipliers[static_cast<size_t>(channel)];
}

// One operation after the other: what is stored in memory that may change is not fused.
float plus(float a, float b) {
  volatile float sum = a + b;
  return sum;
}

template <typename Sum>
float scaled(const Finish& how, const Sums<Sum>& sums, int64_t row, int64_t column) {
  volatile float product = static_cast<float>(sums.total(row, column)) * multiplier_of(how, sums, row, column);
  return product;
}

double shifted(int64_t sum, int64_t shift) {
  const int64_t magnitude = std::abs(sum);
  const int64_t lost = magnitude % (int64_t{1} << shift);
  const int64_t half = shift / 2;
  const int64_t random = lost % (int64_t{1} << half) << (shift - 2 * half);
  const int64_t rounded = (magnitude >> shift) + ((lost >> half) > random ? 1 : 0);
  return static_cast<double>(sum < 0 ? -rounded : rounded);
}

// The integer before clamping; `before` is what an update takes it from.
template <typename Sum>
double rounded(const Finish& how, const Sums<Sum>& sums, int64_t row, int64_t column, bool update, int8_t before) {
  if (how.rounding == Rounding::pseudo_stochastic) {
    const double step = shifted(sums.total(row, column), how.shift);
    return update ? before - step : step;
  }
  const float value = scaled(how, sums, row, column);
  const float result = update ? plus(before, -value) : value;
  if (std::abs(result) > 100000.0F) {
    return result;
  }
  if (how.rounding == Rounding::nearest) {
    return std::nearbyint(result);
  }
  const int64_t in_row = sums.first_column + column;
  const int64_t place = sums.places[static_cast<size_t>(row)] - sums.first_column;
  const auto bits_of = [&](int64_t hash) {
    return mixed(static_cast<uint32_t>(place + hash) * kGolden + key_of(how.seed, 0));
  };
  if (update) {
    const uint32_t bits = bits_of(in_row / 32 * 16 + in_row % 16);
    const uint32_t half = in_row / 16 % 2 != 0 ? bits >> 16 : bits & 0xffff;
    return std::floor(plus(result, static_cast<float>(half) * 0x1p-16F));
  }
  // Of 64 columns, each four of the first 16 share four hashes with those 16, 32 and 48 further on.
  const int64_t pairs = in_row % 16 / 4 * 4 + in_row / 16 % 2 * 2;
  const uint32_t bits = bits_of(in_row / 64 * 16 + pairs + in_row % 4 / 2);
  const uint32_t draw = bits >> (in_row % 2 * 16 + in_row / 32 % 2 * 8) & 0xff;
  return std::floor((std::nearbyint(static_cast<double>(result) * 256) + draw) / 256);
}

int8_t clamped(const Finish& how, double value) {
  return static_cast<int8_t>(value < how.low ? how.low : value > how.high ? how.high : value);
}

template <typename Sum>
void check_int8(Finish how, const Sums<Sum>& sums, int64_t columns, bool with_mask, int64_t slack = 64) {
  const bool update = how.result == Result::int8_update;
  std::vector<int8_t> output(static_cast<size_t>(kRows * columns + slack + 24));
  for (size_t i = 0; i < output.size(); ++i) {
    output[i] = static_cast<int8_t>(i * 29);
  }
  const std::vector<int8_t> before = output;
  std::vector<uint8_t> mask(output.size() / 8 + 2);
  how.output = output.data();
  how.multipliers = sums.multipliers.data();
  how.mask = with_mask ? mask.data() : nullptr;
  const float largest = finish(how, sums.block(columns));
  std::vector<int8_t> expected = before;
  std::vector<uint8_t> expected_mask(mask.size());
  float expected_largest = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const auto place = static_cast<size_t>(sums.places[static_cast<size_t>(row)] + column);
      const double whole =
          rounded(how, sums, row, column, update, before[place]) + (update ? 0 : how.zero_point);
      expected[place] = clamped(how, whole);
      if (whole >= how.low && whole <= how.high && with_mask) {
        expected_mask[place / 8] = static_cast<uint8_t>(expected_mask[place / 8] | 1 << place % 8);
      }
      expected_largest = std::max(expected_largest, std::abs(scaled(how, sums, row, column)));
    }
  }
  CHECK(output == expected);
  CHECK(mask == expected_mask);
  CHECK_EQUAL(largest, expected_largest);
}

template <typename Sum>
void check_all_int8() {
  for (const int64_t columns : {1, 7, 16, 24, 33, 64, 100, 128, 144}) {
    const Context width("columns " + text_of(columns));
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic, Rounding::pseudo_stochastic}) {
      const Context by("rounding " + text_of(rounding));
      for (const int64_t shift : {0, 1, 6, 9, 22}) {
        Sums<Sum> sums(columns, std::ldexp(1.0F, -static_cast<int>(shift)));
        Sums<Sum> without_row_terms = sums;
        without_row_terms.row_terms.clear();
        without_row_terms.first_column = 16;
        Sums<Sum> single = without_row_terms;
        single.first_column = 37;
        for (int64_t& place : single.places) {
          place += 37;
        }
        for (const bool per_channel : {false, true}) {
          for (const bool rows : {false, true}) {
            if (per_channel && rounding == Rounding::pseudo_stochastic) {
              continue;
            }
            for (const Result result : {Result::int8, Result::int8_update}) {
              Finish how;
              how.result = result;
              how.per_channel = per_channel;
              how.channels_are_rows = rows;
              how.rounding = rounding;
              how.seed = 0x123456789abcdef;
              how.shift = shift;
              check_int8(how, sums, columns, false);
              check_int8(how, without_row_terms, columns, false);
              if (columns == 1) {
                check_int8(how, single, columns, false);
              }
              how.low = -100;
              how.high = 90;
              check_int8(how, sums, columns, false);
              how.zero_point = -7;
              check_int8(how, sums, columns, true);
              check_int8(how, without_row_terms, columns, true);
            }
          }
        }
      }
    }
  }
}

// Rows whose columns begin where those that share draws do, and multipliers that 256 times as much overflows or lacks bits
// of: what vectors of 64 columns take, and leave to others.
TEST(whole_columns_become_int8) {
  for (const int64_t columns : {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 144}) {
    const Context width("columns " + text_of(columns));
    for (const float multiplier : {0x1p-110F, 0x1p-9F, 0.0021F, 0.7F, 300.0F, 0x1p70F}) {
      for (const int64_t first : {0, 32, 64, 192}) {
        Sums<int32_t> sums(columns, multiplier);
        sums.row_terms.clear();
        sums.first_column = first;
        for (int64_t& place : sums.places) {
          place += first;
        }
        for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
          for (const bool per_channel : {false, true}) {
            Finish how;
            how.result = Result::int8;
            how.per_channel = per_channel;
            how.rounding = rounding;
            how.seed = 0xfedcba9876543210;
            check_int8(how, sums, columns, false, first);
            check_int8(how, sums, columns, true, first);
            how.low = -5;
            check_int8(how, sums, columns, true, first);
            how.zero_point = 20;
            check_int8(how, sums, columns, true, first);
          }
        }
      }
    }
  }
}

TEST(int8_sums_become_int8) {
  check_all_int8<int32_t>();
}

TEST(wide_int8_sums_become_int8) {
  check_all_int8<int64_t>();
}

template <typename Sum>
void check_floats() {
  for (const int64_t columns : {1, 15, 16, 17, 32, 100}) {
    Sums<Sum> sums(columns, 0.37F);
    // With what is added to rows and columns, to columns alone, and without either.
    for (const int which : {0, 1, 2, 3}) {
      const bool rows = which == 1;
      if (which == 2) {
        sums.row_terms.clear();
      }
      if (which == 3) {
        sums.column_terms.clear();
      }
      std::vector<float> output(static_cast<size_t>(kRows * columns + 64), 5.0F);
      std::vector<float> updated = output;
      std::vector<kernels::BFloat16> halves(output.size(), kernels::BFloat16{0x1234});
      std::vector<int32_t> plain(output.size());
      Finish how;
      how.per_channel = true;
      how.channels_are_rows = rows;
      how.multipliers = sums.multipliers.data();
      how.output = plain.data();
      finish(how, sums.block(columns));
      how.result = Result::floats;
      how.output = output.data();
      finish(how, sums.block(columns));
      how.result = Result::float_update;
      how.output = updated.data();
      finish(how, sums.block(columns));
      how.result = Result::bfloat16s;
      how.output = halves.data();
      CHECK_EQUAL(finish(how, sums.block(columns)), 0.0F);
      CHECK_EQUAL(halves[static_cast<size_t>(sums.places[kRows - 1] + columns)].bits, 0x1234);
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          const auto place = static_cast<size_t>(sums.places[static_cast<size_t>(row)] + column);
          const float value = scaled(how, sums, row, column);
          CHECK_EQUAL(kernels::load(halves[place]), kernels::rounded<kernels::BFloat16>(value));
          CHECK_EQUAL(plain[place], sums.total(row, column));
          CHECK_EQUAL(output[place], value);
          CHECK_EQUAL(updated[place], plus(5.0F, -value));
        }
      }
    }
  }
}

TEST(int8_sums_become_floats) {
  check_floats<int32_t>();
  check_floats<int64_t>();
}

TEST(int8_sums_that_do_not_fit_are_told) {
  constexpr int64_t kBeyond = int64_t{1} << 31;
  for (const int64_t sum : {kBeyond - 1, kBeyond, -kBeyond, -kBeyond - 1, int64_t{1} << 40}) {
    const Context here("sum " + text_of(sum));
    std::vector<int64_t> sums(16, 3);
    sums[6] = sum;
    std::vector<int32_t> output(7);
    const int64_t place = 0;
    Finish how;
    how.output = output.data();
    const float largest = finish(how, Block<int64_t>{sums.data(), 16, 1, 7, &place, 0, 0, nullptr, nullptr});
    const int64_t nearest = std::min(std::max(sum, -kBeyond), kBeyond - 1);
    CHECK_EQUAL(output[6], nearest);
    CHECK_EQUAL(output[5], 3);
    CHECK_EQUAL(std::isinf(largest), nearest != sum);
  }
}

} // namespace
} // namespace torch_odt::tests
