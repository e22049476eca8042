// Vectors of float32 of any size, for bodies that are written with them; see run_with_vectors.
#pragma once

#include <cstdint>

#include "isa.h"

namespace torch_odt::kernels {

// Written out for each size: GCC forgets what a vector's size is where it is a template's argument.
template <int kBytes>
struct FloatVector;
#define TORCH_ODT_FLOAT_VECTOR(bytes)                          \
  template <>                                                  \
  struct FloatVector<bytes> {                                  \
    typedef float Type __attribute__((vector_size(bytes)));    \
    static constexpr int64_t kCount = (bytes) / 4;             \
    TORCH_ODT_INLINE static Type load(const float* from) {     \
      Type result;                                             \
      __builtin_memcpy(&result, from, sizeof(result));         \
      return result;                                           \
    }                                                          \
    TORCH_ODT_INLINE static void store(Type value, float* to) { \
      __builtin_memcpy(to, &value, sizeof(value));             \
    }                                                          \
  };
TORCH_ODT_FLOAT_VECTOR(4)
TORCH_ODT_FLOAT_VECTOR(16)
TORCH_ODT_FLOAT_VECTOR(32)
TORCH_ODT_FLOAT_VECTOR(64)
#undef TORCH_ODT_FLOAT_VECTOR

// Numbers of two vectors of four, those of the second being 4 to 7.
#if defined(__clang__) || __GNUC__ >= 12
#define TORCH_ODT_SHUFFLE(one, other, a, b, c, d) __builtin_shufflevector(one, other, a, b, c, d)
#else
typedef int32_t FourPlaces __attribute__((vector_size(16)));
#define TORCH_ODT_SHUFFLE(one, other, a, b, c, d) __builtin_shuffle(one, other, FourPlaces{a, b, c, d})
#endif

// Half the bytes of a vector, down to one number.
template <int kBytes>
constexpr int kNarrower = kBytes == 16 ? 4 : kBytes / 2;

} // namespace torch_odt::kernels
