// Masks that are made and applied on the way: every bit, at every length around the ends of vectors and parts.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/bits.h"
#include "../../kernels/masked.h"
#include "samples.h"

namespace torch_odt::tests {
namespace {

constexpr int64_t kCounts[] = {1, 7, 8, 9, 33, 1023, 1024, 1025, 2500};

template <typename Storage>
std::vector<Storage> awkward_values(int64_t count) {
  const double special[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 1.0, -1.0};
  std::vector<Storage> result(static_cast<size_t>(count));
  uint32_t state = 12345;
  for (auto& value : result) {
    state = state * 1664525 + 1013904223;
    const uint32_t kind = state >> 27;
    value = stored<Storage>(kind < 7 ? special[kind] : static_cast<double>(state >> 8) * 0x1p-22 - 2);
  }
  return result;
}

template <typename Storage>
void check_equal(const Storage& found, const Storage& expected) {
  const bool are_nan = std::isnan(kernels::load(found)) && std::isnan(kernels::load(expected));
  CHECK(are_nan || std::memcmp(&found, &expected, sizeof(Storage)) == 0);
}

bool bit_at(const std::vector<uint8_t>& packed, size_t index) {
  return ((packed[index / 8] >> (index % 8)) & 1) != 0;
}

// Of one more element than is asked for; the last one must stay as it was.
template <typename Storage>
std::vector<Storage> untouched(int64_t count) {
  return std::vector<Storage>(static_cast<size_t>(count) + 1, stored<Storage>(7));
}

// The same bits where the output takes the input's place.
template <typename Storage, typename Value>
void check_in_place(
    const std::vector<Storage>& input,
    const Bounds<Value>& bounds,
    const std::vector<Storage>& clamped,
    const std::vector<uint8_t>& packed) {
  std::vector<Storage> elements = input;
  std::vector<uint8_t> mask(packed.size());
  kernels::clamp_with_mask(
      elements.data(), static_cast<int64_t>(elements.size()), bounds, elements.data(), mask.data());
  CHECK(mask == packed);
  for (size_t i = 0; i < input.size(); ++i) {
    check_equal(elements[i], clamped[i]);
  }
}

template <typename Storage, typename Value, typename Word>
void check_masks() {
  for (const int64_t count : kCounts) {
    for (const double high : {1.0, static_cast<double>(NAN)}) {
      const Context here(std::to_string(count) + " elements, up to " + std::to_string(high));
      const std::vector<Storage> input = awkward_values<Storage>(count);
      const Bounds<Value> bounds{Value{-1}, static_cast<Value>(high)};
      std::vector<Storage> clamped = untouched<Storage>(count);
      std::vector<Storage> scaled = untouched<Storage>(count);
      std::vector<Storage> kept = untouched<Storage>(count);
      std::vector<uint8_t> packed(static_cast<size_t>(kernels::packed_bytes(count)));
      kernels::clamp_with_mask(input.data(), count, bounds, clamped.data(), packed.data());
      kernels::scale_masked(input.data(), packed.data(), count, Value{1.5}, scaled.data());
      std::vector<Word> words(input.size());
      std::vector<Word> kept_words(input.size() + 1, Word{7});
      std::memcpy(words.data(), input.data(), sizeof(Word) * words.size());
      // In two calls, the second of which begins inside a byte.
      const int64_t half = count / 2;
      kernels::keep_masked(words.data(), packed.data(), 0, half, kept_words.data());
      kernels::keep_masked(words.data() + half, packed.data(), half, count - half, kept_words.data() + half);
      std::memcpy(kept.data(), kept_words.data(), sizeof(Word) * words.size());
      CHECK_EQUAL(kept_words.back(), Word{7});
      kernels::keep_masked(words.data(), packed.data(), 0, count, words.data());
      CHECK(std::equal(words.begin(), words.end(), kept_words.begin()));
      check_in_place(input, bounds, clamped, packed);
      for (size_t i = 0; i < input.size(); ++i) {
        const Value value = kernels::load(input[i]);
        const bool passes = !(value <= bounds.low) && !(value >= bounds.high);
        const Value clamp = value < bounds.low ? bounds.low : value > bounds.high ? bounds.high : value;
        CHECK_EQUAL(bit_at(packed, i), passes);
        check_equal(clamped[i], stored<Storage>(static_cast<double>(clamp)));
        check_equal(kept[i], passes ? input[i] : stored<Storage>(0));
        Storage product;
        kernels::store(value * static_cast<Value>(passes ? 1 : 0) * Value{1.5}, product);
        check_equal(scaled[i], product);
      }
      check_equal(clamped.back(), stored<Storage>(7));
      check_equal(scaled.back(), stored<Storage>(7));
      for (size_t i = input.size(); i < 8 * packed.size(); ++i) {
        CHECK(!bit_at(packed, i));
      }
    }
  }
}

TEST(masks_of_float32_are_made_and_applied) {
  check_masks<float, float, uint32_t>();
}

TEST(masks_of_float64_are_made_and_applied) {
  check_masks<double, double, uint64_t>();
}

TEST(masks_of_bfloat16_are_made_and_applied) {
  check_masks<BFloat16, float, uint16_t>();
}

} // namespace
} // namespace torch_odt::tests
