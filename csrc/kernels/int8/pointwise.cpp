#include "pointwise.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"
#include "widened.h"

namespace torch_odt::kernels::int8 {

namespace {

// Elements whose mask is one word.
constexpr int64_t kWord = 64;

template <int kBytes>
struct Word {
  using L = Lanes<kBytes>;
  using Floats = typename L::Floats;
  using Ints = typename L::Ints;
  using Narrow = typename Vectors<kBytes>::Narrow;

  // One bit for each lane of a comparison.
  TORCH_ODT_INLINE static uint64_t bits_of(Ints compared) {
    uint64_t bits = 0;
    const Narrow inside = L::narrowed(compared);
    for (int64_t first = 0; first < L::kCount; first += 8) {
      uint64_t bytes = 0;
      __builtin_memcpy(
          &bytes, reinterpret_cast<const char*>(&inside) + first, static_cast<unsigned long>(std::min<int64_t>(8, L::kCount)));
      // Of eight bytes the last bits, side by side.
      bits |= ((bytes & 0x0101010101010101U) * 0x0102040810204080U) >> 56 << first;
    }
    return bits;
  }

  TORCH_ODT_INLINE static Floats real(const int8_t* from, const Grid8& grid) {
    return L::product(widened<kBytes>(L::template load<Narrow>(from)) - grid.zero, Floats{} + grid.step);
  }

  // Stores some elements; returns the bits of their mask.
  TORCH_ODT_INLINE static uint64_t store(Floats real, const ToGrid& to, int8_t* output) {
    const Floats whole = L::nearest(real / to.grid.step) + to.grid.zero;
    const Floats between = L::between(whole, Floats{} + to.low, Floats{} + to.high);
    const Narrow values = L::narrowed(__builtin_convertvector(between, Ints));
    __builtin_memcpy(output, &values, sizeof(values));
    return bits_of(whole == between);
  }
};

// The first elements of a last word, as if it were whole.
template <typename T>
TORCH_ODT_INLINE const T* padded(const T* from, int64_t count, T* room) {
  if (count >= kWord) {
    return from;
  }
  std::memset(room, 0, kWord * sizeof(T));
  std::memcpy(room, from, static_cast<size_t>(count) * sizeof(T));
  return room;
}

// Calls function(first element, where to write) for each word, and writes its mask.
template <typename Function>
TORCH_ODT_INLINE void for_words(int64_t count, const ToGrid& to, const Function& function) {
  for (int64_t first = 0; first < count; first += kWord) {
    const int64_t elements = std::min(kWord, count - first);
    int8_t room[kWord];
    int8_t* const output = elements == kWord ? to.output + first : room;
    uint64_t mask = function(first, elements, output);
    if (elements < kWord) {
      std::memcpy(to.output + first, room, static_cast<size_t>(elements));
      mask &= (uint64_t{1} << elements) - 1;
    }
    for (int64_t byte = 0; 8 * byte < elements; ++byte) {
      to.mask[first / 8 + byte] = static_cast<uint8_t>(mask >> (8 * byte));
    }
  }
}

template <int kBytes>
struct Quantize {
  TORCH_ODT_INLINE static void run(const float* input, int64_t count, const ToGrid* of, bool* is_number) {
    using W = Word<kBytes>;
    constexpr int64_t kCount = W::L::kCount;
    const ToGrid to = *of;
    typename W::Ints unordered = {};
    for_words(count, to, [&](int64_t first, int64_t elements, int8_t* output) __attribute__((always_inline)) {
      float room[kWord];
      const float* const from = padded(input + first, elements, room);
      uint64_t mask = 0;
      for (int64_t i = 0; i < kWord; i += kCount) {
        const auto real = W::L::template load<typename W::Floats>(from + i);
        unordered |= real != real;
        mask |= W::store(real, to, output + i) << i;
      }
      return mask;
    });
    for (int i = 0; i < kCount; ++i) {
      *is_number &= unordered[i] == 0;
    }
  }
};

template <int kBytes>
struct Add {
  TORCH_ODT_INLINE static void
  run(const int8_t* left, const Grid8* left_grid, const int8_t* right, const Grid8* right_grid, int64_t count, const ToGrid* of) {
    using W = Word<kBytes>;
    const ToGrid to = *of;
    const Grid8 left_one = *left_grid;
    const Grid8 right_one = *right_grid;
    for_words(count, to, [&](int64_t first, int64_t elements, int8_t* output) __attribute__((always_inline)) {
      int8_t left_room[kWord];
      int8_t right_room[kWord];
      const int8_t* const one = padded(left + first, elements, left_room);
      const int8_t* const other = padded(right + first, elements, right_room);
      uint64_t mask = 0;
      for (int64_t i = 0; i < kWord; i += W::L::kCount) {
        mask |= W::store(W::real(one + i, left_one) + W::real(other + i, right_one), to, output + i) << i;
      }
      return mask;
    });
  }
};

} // namespace

bool quantize(const float* input, int64_t count, const ToGrid& to) {
  bool is_number = true;
  run_with_vectors<Quantize>(input, count, &to, &is_number);
  return is_number;
}

void add(
    const int8_t* left, const Grid8& left_grid, const int8_t* right, const Grid8& right_grid, int64_t count, const ToGrid& to) {
  run_with_vectors<Add>(left, &left_grid, right, &right_grid, count, &to);
}

} // namespace torch_odt::kernels::int8
