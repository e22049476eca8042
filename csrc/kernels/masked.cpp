#include "masked.h"

#include <algorithm>

#include "bits.h"
#include "isa.h"

namespace torch_odt::kernels {

namespace {

// Elements whose mask is unpacked at once: what that takes stays in the first-level cache.
constexpr int64_t kPart = 1024;

template <typename Storage, typename Value>
TORCH_ODT_INLINE void clamp_body(
    const Storage* input, int64_t count, Bounds<Value> bounds, Storage* output, uint8_t* packed) {
  uint8_t mask[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t length = std::min(kPart, count - first);
    for (int64_t i = 0; i < length; ++i) {
      const Value value = load(input[first + i]);
      const Value raised = value < bounds.low ? bounds.low : value;
      store(raised > bounds.high ? bounds.high : raised, output[first + i]);
    }
    for (int64_t i = 0; i < length; ++i) {
      const Value value = load(input[first + i]);
      mask[i] = static_cast<uint8_t>(!(value <= bounds.low) & !(value >= bounds.high));
    }
    pack_bits(mask, length, packed + first / 8);
  }
}

// Where input and output are one, the compiler has to see it: it would take them for ranges that overlap.
template <typename Storage, typename Value>
TORCH_ODT_INLINE void clamp_in_place_body(
    Storage* elements, int64_t count, Bounds<Value> bounds, uint8_t* packed) {
  clamp_body<Storage, Value>(elements, count, bounds, elements, packed);
}

template <typename Word>
TORCH_ODT_INLINE void keep_body(
    const Word* input, const uint8_t* packed, int64_t first_bit, int64_t count, Word* output) {
  uint8_t mask[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t length = std::min(kPart, count - first);
    unpack_bits(packed, first_bit + first, length, mask);
    for (int64_t i = 0; i < length; ++i) {
      // All bits or none, by subtraction: compilers keep vectors away from a choice.
      const auto kept = static_cast<Word>(Word{0} - Word{mask[i]});
      output[first + i] = input[first + i] & kept;
    }
  }
}

template <typename Word>
TORCH_ODT_INLINE void keep_in_place_body(Word* elements, const uint8_t* packed, int64_t first_bit, int64_t count) {
  keep_body<Word>(elements, packed, first_bit, count, elements);
}

template <typename Storage, typename Value>
TORCH_ODT_INLINE void scale_body(
    const Storage* input, const uint8_t* packed, int64_t count, Value scale, Storage* output) {
  uint8_t mask[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t length = std::min(kPart, count - first);
    unpack_bits(packed, first, length, mask);
    for (int64_t i = 0; i < length; ++i) {
      store(load(input[first + i]) * static_cast<Value>(mask[i]) * scale, output[first + i]);
    }
  }
}

} // namespace

template <typename Storage, typename Value>
void clamp_with_mask(
    const Storage* input, int64_t count, const Bounds<Value>& bounds, Storage* output, uint8_t* packed) {
  if (input == output) {
    run<clamp_in_place_body<Storage, Value>>(output, count, bounds, packed);
  } else {
    run<clamp_body<Storage, Value>>(input, count, bounds, output, packed);
  }
}

template <typename Word>
void keep_masked(const Word* input, const uint8_t* packed, int64_t first_bit, int64_t count, Word* output) {
  if (input == output) {
    run<keep_in_place_body<Word>>(output, packed, first_bit, count);
  } else {
    run<keep_body<Word>>(input, packed, first_bit, count, output);
  }
}

template <typename Storage, typename Value>
void scale_masked(const Storage* input, const uint8_t* packed, int64_t count, Value scale, Storage* output) {
  run<scale_body<Storage, Value>>(input, packed, count, scale, output);
}

#define TORCH_ODT_INSTANTIATE(STORAGE, VALUE)                                                               \
  template void clamp_with_mask(const STORAGE*, int64_t, const Bounds<VALUE>&, STORAGE*, uint8_t*);         \
  template void scale_masked(const STORAGE*, const uint8_t*, int64_t, VALUE, STORAGE*);
TORCH_ODT_INSTANTIATE(float, float)
TORCH_ODT_INSTANTIATE(double, double)
TORCH_ODT_INSTANTIATE(BFloat16, float)
#undef TORCH_ODT_INSTANTIATE

template void keep_masked(const uint16_t*, const uint8_t*, int64_t, int64_t, uint16_t*);
template void keep_masked(const uint32_t*, const uint8_t*, int64_t, int64_t, uint32_t*);
template void keep_masked(const uint64_t*, const uint8_t*, int64_t, int64_t, uint64_t*);

} // namespace torch_odt::kernels
