// Memory of the caller's, handed out in pieces.
#pragma once

#include <cstdint>

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline int64_t divided(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

// From a null pointer on it counts what would be taken.
class Pieces {
 public:
  explicit Pieces(void* from) : at_(static_cast<char*>(from)), begin_(at_) {}

  template <typename T>
  T* take(int64_t count) {
    char* const piece = at_;
    at_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }

  int64_t bytes() const {
    return at_ - begin_;
  }

 private:
  char* at_;
  char* begin_;
};

} // namespace torch_odt::kernels::int8
