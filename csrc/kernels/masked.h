// Passes over memory that make a mask of bits, or apply one. Bits lie as `pack_bits` leaves them.
#pragma once

#include <cstdint>

#include "activations.h"
#include "storage.h"

namespace torch_odt::kernels {

// output = input clamped to the bounds; a bit tells whether its gradient passes: not at a bound and beyond it. NaNs stay
// NaN, and their gradients pass. A bound that is NaN is none. The output may be the input.
template <typename Storage, typename Value>
void clamp_with_mask(
    const Storage* input, int64_t count, const Bounds<Value>& bounds, Storage* output, uint8_t* packed);

// output = input where the bit is set, from bit `first_bit` on, and +0 elsewhere. Words are what elements take, whatever
// they mean. The output may be the input.
template <typename Word>
void keep_masked(const Word* input, const uint8_t* packed, int64_t first_bit, int64_t count, Word* output);

// output = (input * bit) * scale, in that order: an infinity without its bit is NaN, as in ATen's dropout.
template <typename Storage, typename Value>
void scale_masked(const Storage* input, const uint8_t* packed, int64_t count, Value scale, Storage* output);

} // namespace torch_odt::kernels
