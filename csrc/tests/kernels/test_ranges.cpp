// What threads do: ranges of rows or of tasks, in any order, give the bits of one range and touch nothing else.

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../kernels/batch_norm_statistics.h"
#include "backward_pass.h"

namespace torch_odt::tests {
namespace {

using Range = std::pair<int64_t, int64_t>;

// The last ones first, as the operators do it.
std::vector<std::vector<Range>> cuts(int64_t end) {
  std::vector<std::vector<Range>> result;
  for (const int64_t length : {int64_t{1}, int64_t{3}, end / 2 + 1}) {
    std::vector<Range> ranges;
    for (int64_t begin = 0; begin < end; begin += length) {
      ranges.emplace_back(begin, std::min(end, begin + length));
    }
    std::reverse(ranges.begin(), ranges.end());
    result.push_back(std::move(ranges));
  }
  return result;
}

template <typename T>
bool have_the_same_bits(const std::vector<T>& one, const std::vector<T>& other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size() * sizeof(T)) == 0;
}

template <typename T>
bool is_filled(const std::vector<T>& values, int64_t begin, int64_t end, unsigned char byte) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  const auto size = static_cast<int64_t>(sizeof(T));
  return std::all_of(bytes + begin * size, bytes + end * size, [=](unsigned char b) { return b == byte; });
}

// Calls function(begin, end, output) for whole and for cut ranges of rows, and compares.
template <typename Storage, typename Function>
void check_rows(const ChannelLayout& layout, const Function& function) {
  constexpr unsigned char kUntouched = 0xA5;
  const int64_t rows = rows_of(layout);
  const int64_t row_elements = row_elements_of(layout);
  const auto elements = static_cast<size_t>(layout.elements());
  std::vector<Storage> expected(elements);
  function(0, rows, expected.data());
  for (const std::vector<Range>& ranges : cuts(rows)) {
    std::vector<Storage> output(elements);
    std::memset(output.data(), kUntouched, elements * sizeof(Storage));
    const auto [begin, end] = ranges[ranges.size() / 2];
    function(begin, end, output.data());
    CHECK(is_filled(output, 0, begin * row_elements, kUntouched));
    CHECK(is_filled(output, end * row_elements, rows * row_elements, kUntouched));
    for (const auto& [from, to] : ranges) {
      function(from, to, output.data());
    }
    CHECK(have_the_same_bits(output, expected));
  }
}

TEST(rows_in_ranges_have_the_bits_of_one_range) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : layouts()) {
      const Context here(text_of(layout));
      const Sample<Storage, Parameter> sample(layout);
      const Clamp<Storage, Parameter> clamp({0, 6});
      for (const Storage* residual : {static_cast<const Storage*>(nullptr), sample.gradient.data()}) {
        check_rows<Storage>(layout, [&](int64_t begin, int64_t end, Storage* output) {
          kernels::normalise_rows(
              sample.input.data(),
              residual,
              sample.scale.data(),
              sample.shift.data(),
              clamp,
              layout,
              begin,
              end,
              output);
        });
      }
      BackwardPass<Storage, Parameter> backward(layout);
      backward.run(sample, clamp);
      check_rows<Storage>(layout, [&](int64_t begin, int64_t end, Storage* output) {
        kernels::input_gradient_rows(
            sample.gradient.data(),
            forward_of(sample),
            clamp,
            backward.factors(),
            layout,
            begin,
            end,
            output);
      });
    }
  });
}

TEST(tasks_in_ranges_have_the_bits_of_one_range) {
  for_each_type([]<typename Storage, typename Parameter>() {
    for (const ChannelLayout& layout : sliced_layouts()) {
      const Context here(text_of(layout));
      const Sample<Storage, Parameter> sample(layout);
      const kernels::Slices slices(layout);
      const auto places = static_cast<size_t>(slices.number * layout.channels);
      struct Sums {
        std::vector<Parameter> centre;
        std::vector<double> sum;
        std::vector<double> square;
        std::vector<double> gradient;
        std::vector<double> product;
        std::vector<double> passed_gradient;
        std::vector<double> passed_product;
        std::vector<Storage> passed;

        Sums(size_t size, size_t elements)
            : centre(size),
              sum(size),
              square(size),
              gradient(size),
              product(size),
              passed_gradient(size),
              passed_product(size),
              passed(elements) {}
      };
      const Clamp<Storage, Parameter> clamp({0, 6});
      const std::vector<Storage> output = normalised(sample, clamp);
      const auto add = [&](int64_t begin, int64_t end, Sums& sums) {
        kernels::take_moments(
            sample.input.data(),
            slices,
            begin,
            end,
            kernels::Moments<Parameter>{sums.centre.data(), sums.sum.data(), sums.square.data()});
        kernels::sum_gradients(
            sample.gradient.data(),
            forward_of(sample),
            clamp,
            slices,
            begin,
            end,
            kernels::GradientSums{sums.gradient.data(), sums.product.data()});
        kernels::pass_and_sum_gradients(
            sample.gradient.data(),
            sum_of(sample, output, clamp),
            slices,
            begin,
            end,
            sums.passed.data(),
            kernels::GradientSums{sums.passed_gradient.data(), sums.passed_product.data()});
      };
      const auto elements = static_cast<size_t>(layout.elements());
      Sums expected(places, elements);
      add(0, slices.tasks(), expected);
      for (const std::vector<Range>& ranges : cuts(slices.tasks())) {
        Sums found(places, elements);
        for (const auto& [begin, end] : ranges) {
          add(begin, end, found);
        }
        CHECK(have_the_same_bits(found.centre, expected.centre));
        CHECK(have_the_same_bits(found.sum, expected.sum));
        CHECK(have_the_same_bits(found.square, expected.square));
        CHECK(have_the_same_bits(found.gradient, expected.gradient));
        CHECK(have_the_same_bits(found.product, expected.product));
        CHECK(have_the_same_bits(found.passed_gradient, expected.gradient));
        CHECK(have_the_same_bits(found.passed_product, expected.product));
        CHECK(have_the_same_bits(found.passed, expected.passed));
      }
    }
  });
}

} // namespace
} // namespace torch_odt::tests
