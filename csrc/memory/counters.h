// Exact byte counts: how much is live, how much was, by category.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torch_odt::memory {

enum class Category : int { parameter, gradient, optimizer, activation, workspace, other };

inline constexpr std::array<const char*, 6> kCategoryNames = {
    "parameter", "gradient", "optimizer", "activation", "workspace", "other"};
inline constexpr int kCategoryCount = static_cast<int>(kCategoryNames.size());

inline constexpr int64_t kUnlimited = -1;

// A live count with its high water mark.
class Gauge {
 public:
  void add(int64_t bytes) {
    raise_peak(live_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  }
  void subtract(int64_t bytes) {
    live_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  // Adds only if the sum stays within the limit. The peak is left to confirm(), because the allocation that this makes
  // room for may still fail.
  bool try_reserve(int64_t bytes, int64_t limit) {
    if (limit == kUnlimited) {
      live_.fetch_add(bytes, std::memory_order_relaxed);
      return true;
    }
    int64_t seen = live_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit - seen) {
        return false;
      }
    } while (!live_.compare_exchange_weak(seen, seen + bytes, std::memory_order_relaxed));
    return true;
  }
  void confirm() {
    raise_peak(live());
  }
  int64_t live() const {
    return live_.load(std::memory_order_relaxed);
  }
  int64_t peak() const {
    return peak_.load(std::memory_order_relaxed);
  }
  void reset_peak() {
    peak_.store(live(), std::memory_order_relaxed);
  }

 private:
  void raise_peak(int64_t value) {
    int64_t seen = peak_.load(std::memory_order_relaxed);
    while (value > seen && !peak_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};
};

struct Counters {
  Gauge allocated;
  Gauge outside;
  std::array<Gauge, kCategoryNames.size()> by_category;
  std::atomic<int64_t> allocation_count{0};
  std::atomic<int64_t> cap_bytes{kUnlimited};

  Gauge& of(Category category) {
    return by_category[static_cast<size_t>(category)];
  }
  void reset_peak() {
    allocated.reset_peak();
    outside.reset_peak();
    for (Gauge& gauge : by_category) {
      gauge.reset_peak();
    }
  }
};

} // namespace torch_odt::memory
