// A vector's elements, or those of two, in another order: as each compiler has it.
#pragma once

#if defined(__clang__)
#define TORCH_ODT_SHUFFLE(Vector, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TORCH_ODT_SHUFFLE(Vector, a, b, ...) __builtin_shuffle(a, b, Vector{__VA_ARGS__})
#endif
