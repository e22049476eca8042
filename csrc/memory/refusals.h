// Allocations that are refused: how many there were, and those that a test asks for.
#pragma once

#include <atomic>
#include <cstdint>

#include "counters.h"

namespace torch_odt::memory {

class Refusals {
 public:
  // So many allocations pass, the next one is refused, and all behind it if that lasts. kUnlimited refuses none.
  void refuse_after(int64_t allocations, bool lasts) {
    lasts_.store(lasts, std::memory_order_relaxed);
    left_.store(allocations < 0 ? kUnlimited : allocations, std::memory_order_relaxed);
  }
  // Asked once by every allocation.
  bool refuses_next() {
    int64_t seen = left_.load(std::memory_order_relaxed);
    while (seen != kUnlimited) {
      if (seen == 0 && lasts_.load(std::memory_order_relaxed)) {
        return true;
      }
      // From 0 it goes to kUnlimited: what does not last is over then.
      if (left_.compare_exchange_weak(seen, seen - 1, std::memory_order_relaxed)) {
        return seen == 0;
      }
    }
    return false;
  }
  void note() {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  int64_t count() const {
    return count_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> left_{kUnlimited};
  std::atomic<bool> lasts_{false};
  std::atomic<int64_t> count_{0};
};

} // namespace torch_odt::memory
