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
  explicit Pieces(void* from) : begin_(static_cast<char*>(from)) {}

  template <typename T>
  T* take(int64_t count) {
    char* const piece = begin_ == nullptr ? nullptr : begin_ + bytes_;
    bytes_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }

  int64_t bytes() const {
    return bytes_;
  }

 private:
  char* begin_;
  int64_t bytes_ = 0;
};

} // namespace torch_odt::kernels::int8
