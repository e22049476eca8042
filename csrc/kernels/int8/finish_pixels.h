// Stochastic rounding to int8 where pixels have few channels and lie side by side: each is a row with draws of its own,
// and vectors hold several.
#pragma once

#include <cstdint>

#include "finish.h"

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kMostPixelChannels = 16;

// Where the draws of elements from a pixel's first one on are, of as many as are whole pixels and whole vectors: which
// hash, counted from the first element's place on and times kGolden, and by how many bits it is shifted.
struct alignas(64) PixelDraws {
  int64_t count;
  uint32_t steps[16 * kMostPixelChannels];
  uint32_t shifts[16 * kMostPixelChannels];

  explicit PixelDraws(int64_t channels);
};

// Whether finish_pixels does what finish() does with a row for each pixel.
bool has_finish_pixels(const Finish& how);

// `count` elements of the output from `place` on, all of whose pixels have the same key; sums can be read up to a
// vector behind the last one.
float finish_pixels(const Finish& how, const PixelDraws& draws, const int32_t* sums, int64_t place, int64_t count);

} // namespace torch_odt::kernels::int8
