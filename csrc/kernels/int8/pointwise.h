// Numbers rounded to a grid of int8, element by element: what stands between layers.
#pragma once

#include <cstdint>

namespace torch_odt::kernels::int8 {

// The numbers that int8 stands for are step * (value - zero).
struct Grid8 {
  float step;
  float zero;
};

// A grid and the bounds on it, values of int8; one bit an element is set where nothing was clamped.
struct ToGrid {
  Grid8 grid;
  float low;
  float high;
  int8_t* output;
  uint8_t* mask;
};

// Elements from 0 to `count`; masks are written from a whole byte on, with zeros behind the last element. Numbers are
// rounded to the nearest, to even where two are as near. Returns whether none of the input is NaN.
bool quantize(const float* input, int64_t count, const ToGrid& to);

// The sum of two grids' numbers.
void add(
    const int8_t* left, const Grid8& left_grid, const int8_t* right, const Grid8& right_grid, int64_t count, const ToGrid& to);

} // namespace torch_odt::kernels::int8
