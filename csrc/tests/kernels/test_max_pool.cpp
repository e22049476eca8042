// Max-pooling, against the plain loops of its definition: every bit, however rows are cut, and nothing beside them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/max_pool.h"
#include "samples.h"

namespace torch_odt::tests {
namespace {

using kernels::Pool;
using kernels::WindowAxis;

WindowAxis axis_of(int64_t input, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t reach = input + 2 * padding - dilation * (kernel - 1) - 1;
  return {input, reach / stride + 1, kernel, stride, padding, dilation};
}

std::vector<Pool> pools() {
  std::vector<Pool> result;
  for (const int64_t channels : {1, 2, 9, 129}) {
    result.push_back({axis_of(9, 3, 2, 1, 1), axis_of(11, 3, 2, 1, 1), channels});
    result.push_back({axis_of(6, 2, 2, 0, 1), axis_of(7, 3, 1, 1, 2), channels});
    result.push_back({axis_of(5, 1, 3, 0, 1), axis_of(140, 4, 1, 2, 1), channels});
    result.push_back({axis_of(17, 16, 1, 8, 1), axis_of(18, 16, 3, 8, 1), channels});
    // Windows that do not overlap.
    result.push_back({axis_of(9, 2, 2, 1, 1), axis_of(12, 3, 4, 1, 1), channels});
    result.push_back({axis_of(7, 2, 3, 0, 1), axis_of(9, 2, 3, 0, 2), channels});
  }
  return result;
}

constexpr int64_t kPlanes = 2;

std::string name_of(const Pool& pool) {
  return "windows of " + std::to_string(pool.rows.kernel) + " x " + std::to_string(pool.columns.kernel) + ", " +
      std::to_string(pool.channels) + " channels";
}

template <typename Storage>
std::vector<Storage> tied_values(int64_t count) {
  std::vector<Storage> result(static_cast<size_t>(count));
  uint32_t state = 12345;
  for (auto& value : result) {
    state = state * 1664525 + 1013904223;
    const uint32_t kind = state >> 24;
    value = stored<Storage>(kind < 8 ? std::nan("") : kind < 16 ? -INFINITY : static_cast<double>(kind % 5) / 3 - 0.5);
  }
  return result;
}

template <typename Storage>
bool is_taken(Storage candidate, Storage largest) {
  const auto value = kernels::load(candidate);
  return value > kernels::load(largest) || std::isnan(value);
}

template <typename Storage>
struct Pooled {
  std::vector<Storage> output;
  std::vector<uint8_t> offsets;
  std::vector<Storage> gradient;
};

int64_t input_elements(const Pool& pool) {
  return kPlanes * pool.rows.input * pool.columns.input * pool.channels;
}

int64_t output_elements(const Pool& pool) {
  return kPlanes * pool.rows.output * pool.columns.output * pool.channels;
}

// Calls function(element of the output, element of the input, number in the window) for all that lie inside.
template <typename Function>
void for_elements(const Pool& pool, const Function& function) {
  for (int64_t i = 0; i < output_elements(pool); ++i) {
    const int64_t c = i % pool.channels;
    const int64_t column = i / pool.channels % pool.columns.output;
    const int64_t row = i / pool.channels / pool.columns.output % pool.rows.output;
    const int64_t plane = i / pool.channels / pool.columns.output / pool.rows.output;
    for (int64_t k = 0; k < pool.window_elements(); ++k) {
      const int64_t y = row * pool.rows.stride - pool.rows.padding + k / pool.columns.kernel * pool.rows.dilation;
      const int64_t x =
          column * pool.columns.stride - pool.columns.padding + k % pool.columns.kernel * pool.columns.dilation;
      if (y >= 0 && y < pool.rows.input && x >= 0 && x < pool.columns.input) {
        function(i, ((plane * pool.rows.input + y) * pool.columns.input + x) * pool.channels + c, k);
      }
    }
  }
}

template <typename Storage>
Pooled<Storage> pooled_by_definition(
    const Pool& pool, const std::vector<Storage>& input, const std::vector<Storage>& grad_output) {
  Pooled<Storage> result;
  std::vector<int64_t> origin(grad_output.size(), -1);
  result.output.assign(grad_output.size(), stored<Storage>(-INFINITY));
  result.offsets.resize(grad_output.size());
  result.gradient.assign(input.size(), stored<Storage>(0));
  for_elements(pool, [&](int64_t at, int64_t from, int64_t k) {
    const auto i = static_cast<size_t>(at);
    const Storage candidate = input[static_cast<size_t>(from)];
    if (origin[i] < 0 || is_taken(candidate, result.output[i])) {
      origin[i] = from;
      result.output[i] = candidate;
      result.offsets[i] = static_cast<uint8_t>(k);
    }
  });
  for (size_t i = 0; i < grad_output.size(); ++i) {
    Storage& place = result.gradient[static_cast<size_t>(origin[i])];
    kernels::store(kernels::load(place) + kernels::load(grad_output[i]), place);
  }
  return result;
}

template <typename Storage>
Pooled<Storage> pooled_in_parts(
    const Pool& pool, const std::vector<Storage>& input, const std::vector<Storage>& grad_output, int64_t rows) {
  Pooled<Storage> result;
  result.output.resize(grad_output.size());
  result.offsets.resize(grad_output.size());
  result.gradient.assign(input.size(), Storage{});
  for (int64_t begin = 0; begin < kPlanes * pool.rows.output; begin += rows) {
    const int64_t end = std::min(kPlanes * pool.rows.output, begin + rows);
    kernels::max_pool_rows(input.data(), pool, begin, end, result.output.data(), result.offsets.data());
  }
  for (int64_t begin = 0; begin < kPlanes * pool.rows.input; begin += rows) {
    const int64_t end = std::min(kPlanes * pool.rows.input, begin + rows);
    kernels::max_pool_backward_rows(
        grad_output.data(), result.offsets.data(), pool, begin, end, result.gradient.data());
  }
  return result;
}

template <typename Storage>
void check_bits(const std::vector<Storage>& found, const std::vector<Storage>& expected) {
  CHECK_EQUAL(found.size(), expected.size());
  size_t different = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    // NaNs may differ in bits that tell nothing.
    const bool are_nan = std::isnan(kernels::load(found[i])) && std::isnan(kernels::load(expected[i]));
    different += are_nan || std::memcmp(&found[i], &expected[i], sizeof(Storage)) == 0 ? 0 : 1;
  }
  CHECK_EQUAL(different, size_t{0});
}

template <typename Storage>
void check_pools() {
  for (const Pool& pool : pools()) {
    const std::vector<Storage> input = tied_values<Storage>(input_elements(pool));
    const std::vector<Storage> grad_output = tied_values<Storage>(output_elements(pool));
    const Pooled<Storage> expected = pooled_by_definition(pool, input, grad_output);
    for (const int64_t rows : {1, 4, 1000}) {
      const Context here(name_of(pool) + ", rows by " + std::to_string(rows));
      const Pooled<Storage> found = pooled_in_parts(pool, input, grad_output, rows);
      check_bits(found.output, expected.output);
      CHECK(found.offsets == expected.offsets);
      check_bits(found.gradient, expected.gradient);
    }
  }
}

TEST(pooling_float32_has_the_bits_of_its_definition) {
  check_pools<float>();
}

TEST(pooling_float64_has_the_bits_of_its_definition) {
  check_pools<double>();
}

TEST(pooling_bfloat16_has_the_bits_of_its_definition) {
  check_pools<BFloat16>();
}

// As the same numbers in float32; gradients where windows do not overlap.
TEST(pooling_int8_is_pooling_its_numbers) {
  for (const Pool& pool : pools()) {
    const Context here(name_of(pool));
    const auto some = [](int64_t count, int64_t factor) {
      std::vector<float> numbers;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t kind = i * factor % 31;
        numbers.push_back(static_cast<float>(kind < 9 ? -128 : kind < 11 ? 127 : 8 * kind - 124));
      }
      return numbers;
    };
    const auto in_bytes = [](const std::vector<float>& numbers) {
      std::vector<int8_t> bytes;
      for (const float number : numbers) {
        bytes.push_back(static_cast<int8_t>(number));
      }
      return bytes;
    };
    const std::vector<float> input = some(input_elements(pool), 7);
    const std::vector<float> grad_output = some(output_elements(pool), 5);
    for (const int64_t rows : {1, 1000}) {
      const Pooled<float> expected = pooled_in_parts(pool, input, grad_output, rows);
      const Pooled<int8_t> found = pooled_in_parts(pool, in_bytes(input), in_bytes(grad_output), rows);
      CHECK(found.output == in_bytes(expected.output));
      CHECK(found.offsets == expected.offsets);
      CHECK(pool.windows_overlap() || found.gradient == in_bytes(expected.gradient));
    }
  }
}

TEST(bits_are_those_of_the_largest_elements) {
  for (const Pool& pool : pools()) {
    const std::vector<float> input = tied_values<float>(input_elements(pool));
    std::vector<uint8_t> bits(static_cast<size_t>((input_elements(pool) + 7) / 8));
    for (size_t i = 0; i < bits.size(); ++i) {
      bits[i] = static_cast<uint8_t>(i * 101 >> 2);
    }
    const Pooled<float> pooled =
        pooled_by_definition(pool, input, std::vector<float>(static_cast<size_t>(output_elements(pool))));
    std::vector<uint8_t> expected((pooled.offsets.size() + 7) / 8);
    for_elements(pool, [&](int64_t at, int64_t from, int64_t k) {
      const auto i = static_cast<size_t>(at);
      if (pooled.offsets[i] == k && (bits[static_cast<size_t>(from / 8)] >> (from % 8) & 1U) != 0) {
        expected[i / 8] = static_cast<uint8_t>(expected[i / 8] | 1U << (i % 8));
      }
    });
    const int64_t pixels = output_elements(pool) / pool.channels;
    for (const int64_t part : {int64_t{8}, int64_t{24}, (pixels + 7) / 8 * 8}) {
      std::vector<uint8_t> found(expected.size(), 0xaa);
      for (int64_t begin = 0; begin < pixels; begin += part) {
        kernels::pooled_bits(
            bits.data(), pooled.offsets.data(), pool, begin, std::min(pixels, begin + part), found.data());
      }
      CHECK(found == expected);
    }
  }
}

// The address sanitizer sees what lies beside the gradient.
TEST(no_offset_leads_out_of_the_gradient) {
  for (const Pool& pool : pools()) {
    std::vector<uint8_t> offsets(static_cast<size_t>(output_elements(pool)));
    for (size_t i = 0; i < offsets.size(); ++i) {
      offsets[i] = static_cast<uint8_t>(i * 37);
    }
    const std::vector<float> grad_output(offsets.size(), 1.0f);
    std::vector<float> gradient(static_cast<size_t>(input_elements(pool)));
    kernels::max_pool_backward_rows(
        grad_output.data(), offsets.data(), pool, 0, kPlanes * pool.rows.input, gradient.data());
  }
}

} // namespace
} // namespace torch_odt::tests
