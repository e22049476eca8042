// Products of matrices, against sums in double: any sizes, either matrix in either order, however the work is cut, and
// nothing beside what is written.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/matrix_product.h"
#include "samples.h"

namespace torch_odt::tests {
namespace {

using kernels::MatrixBlock;
using kernels::MatrixProduct;

constexpr float kUntouched = 12345.0F;
// Between the lines of each matrix.
constexpr int64_t kGap = 3;

struct Lengths {
  int64_t rows;
  int64_t steps;
  int64_t columns;
};

// Fewer and more than are computed at once of each, none among them.
const Lengths kLengths[] = {
    {1, 1, 1},
    {3, 5, 7},
    {4, 128, 16},
    {9, 130, 33},
    {13, 17, 70},
    {260, 3, 24},
    {20, 300, 47},
    {5, 0, 18},
    {8, 64, 32}};

float product_number(int64_t place) {
  return static_cast<float>(static_cast<uint32_t>(place) * 2654435761U) / 4e9F - 0.5F;
}

struct Multiplied {
  Lengths size;
  bool left_is_transposed;
  bool right_is_transposed;
  std::vector<float> left;
  std::vector<float> right;
  std::vector<float> start;

  Multiplied(const Lengths& of, bool left_transposed, bool right_transposed)
      : size(of), left_is_transposed(left_transposed), right_is_transposed(right_transposed) {
    const auto fill = [](std::vector<float>& numbers, int64_t count, int64_t seed) {
      for (int64_t i = 0; i < count; ++i) {
        numbers.push_back(product_number(seed + i));
      }
    };
    fill(left, std::max(size.rows, size.steps) * left_line(), 1);
    fill(right, std::max(size.columns, size.steps) * right_line(), 100003);
    fill(start, size.columns, 700001);
  }

  int64_t left_line() const {
    return (left_is_transposed ? size.rows : size.steps) + kGap;
  }
  int64_t right_line() const {
    return (right_is_transposed ? size.steps : size.columns) + kGap;
  }
  int64_t result_line() const {
    return size.columns + kGap;
  }

  MatrixProduct product(float* result, bool with_start = true) const {
    return {
        .left = left.data(),
        .left_row = left_is_transposed ? 1 : left_line(),
        .left_step = left_is_transposed ? left_line() : 1,
        .right = right.data(),
        .codes = nullptr,
        .scales = nullptr,
        .right_line = right_line(),
        .right_is_transposed = right_is_transposed,
        .steps = size.steps,
        .start = with_start ? start.data() : nullptr,
        .result = result,
        .result_row = result_line()};
  }

  double exact(const MatrixProduct& product, int64_t row, int64_t column) const {
    double sum = product.start == nullptr ? 0.0 : start[static_cast<size_t>(column)];
    for (int64_t step = 0; step < size.steps; ++step) {
      const int64_t at =
          right_is_transposed ? column * product.right_line + step : step * product.right_line + column;
      sum += static_cast<double>(product.left[row * product.left_row + step * product.left_step]) * product.right[at];
    }
    return sum;
  }

  std::vector<float> room() const {
    return std::vector<float>(static_cast<size_t>(size.rows * result_line()), kUntouched);
  }
};

template <typename Function>
void for_each_product(const Function& function) {
  for (const Lengths& size : kLengths) {
    for (const bool left : {false, true}) {
      for (const bool right : {false, true}) {
        const Context context(
            std::to_string(size.rows) + " x " + std::to_string(size.steps) + " x " + std::to_string(size.columns) +
            (left ? ", left transposed" : "") + (right ? ", right transposed" : ""));
        function(Multiplied(size, left, right));
      }
    }
  }
}

TEST(matrix_products_are_sums_and_nothing_else_is_written) {
  for_each_product([](const Multiplied& sample) {
    for (const bool with_start : {true, false}) {
      std::vector<float> result = sample.room();
      const MatrixProduct product = sample.product(result.data(), with_start);
      kernels::multiply(product, {0, sample.size.rows, 0, sample.size.columns});
      double furthest = 0;
      bool is_untouched = true;
      for (int64_t row = 0; row < sample.size.rows; ++row) {
        for (int64_t column = 0; column < sample.result_line(); ++column) {
          const float found = result[static_cast<size_t>(row * sample.result_line() + column)];
          if (column < sample.size.columns) {
            furthest = std::max(furthest, std::abs(found - sample.exact(product, row, column)));
          } else {
            is_untouched = is_untouched && found == kUntouched;
          }
        }
      }
      CHECK_NEAR(furthest, 0.0, 1e-4);
      CHECK(is_untouched);
    }
  });
}

TEST(codes_are_multiplied_as_the_numbers_that_they_stand_for) {
  for_each_product([](Multiplied sample) {
    const int64_t lines = sample.right_is_transposed ? sample.size.columns : sample.size.steps;
    std::vector<int8_t> codes(sample.right.size());
    std::vector<float> scales(static_cast<size_t>(lines));
    for (size_t line = 0; line < scales.size(); ++line) {
      scales[line] = product_number(static_cast<int64_t>(line)) / 100;
      for (size_t i = 0; i < static_cast<size_t>(sample.right_line()); ++i) {
        const size_t at = line * static_cast<size_t>(sample.right_line()) + i;
        codes[at] = static_cast<int8_t>(static_cast<uint32_t>(at) * 2654435761U >> 24);
        sample.right[at] = static_cast<float>(codes[at]) * scales[line];
      }
    }
    std::vector<float> of_numbers = sample.room();
    std::vector<float> of_codes = sample.room();
    MatrixProduct product = sample.product(of_numbers.data());
    const MatrixBlock all{0, sample.size.rows, 0, sample.size.columns};
    kernels::multiply(product, all);
    product.result = of_codes.data();
    product.right = nullptr;
    product.codes = codes.data();
    product.scales = scales.data();
    kernels::multiply(product, all);
    CHECK(of_numbers == of_codes);
  });
}

TEST(a_product_without_steps_is_where_it_starts) {
  const std::vector<float> start(40, 2.0F);
  std::vector<float> result(3 * start.size(), kUntouched);
  for (const bool is_transposed : {false, true}) {
    const MatrixProduct product{
        .left = nullptr,
        .left_row = 0,
        .left_step = 1,
        .right = nullptr,
        .codes = nullptr,
        .scales = nullptr,
        .right_line = 0,
        .right_is_transposed = is_transposed,
        .steps = 0,
        .start = start.data(),
        .result = result.data(),
        .result_row = 40};
    kernels::multiply(product, {0, 3, 0, 40});
    CHECK(std::all_of(result.begin(), result.end(), [](float each) { return each == 2.0F; }));
  }
}

TEST(parts_of_matrix_products_have_the_bits_of_the_whole) {
  for_each_product([](const Multiplied& sample) {
    std::vector<float> whole = sample.room();
    std::vector<float> parts = sample.room();
    kernels::multiply(sample.product(whole.data()), {0, sample.size.rows, 0, sample.size.columns});
    const MatrixProduct product = sample.product(parts.data());
    for (int64_t row = 0; row < sample.size.rows; row += 7) {
      for (int64_t column = 0; column < sample.size.columns; column += 11) {
        const MatrixBlock block{
            row, std::min(row + 7, sample.size.rows), column, std::min(column + 11, sample.size.columns)};
        kernels::multiply(product, block);
      }
    }
    CHECK(whole == parts);
  });
}

} // namespace
} // namespace torch_odt::tests
