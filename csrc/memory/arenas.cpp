#include "arenas.h"

#include <algorithm>
#include <limits>

namespace torch_odt::memory {

namespace {

constexpr int64_t kNoYieldLimit = std::numeric_limits<int64_t>::max();

// What every ordinary allocation looks at before it asks the registry anything.
std::atomic<int64_t> smallest_yield_limit{kNoYieldLimit};

} // namespace

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

ArenaStats& ArenaStats::operator+=(const ArenaStats& other) {
  reserved_bytes += other.reserved_bytes;
  live_bytes += other.live_bytes;
  live_blocks += other.live_blocks;
  resident_bytes += other.resident_bytes;
  held_bytes += other.held_bytes;
  hits += other.hits;
  smaller += other.smaller;
  occupied += other.occupied;
  size_mismatch += other.size_mismatch;
  past_record += other.past_record;
  dynamic_hits += other.dynamic_hits;
  dynamic_misses += other.dynamic_misses;
  yields += other.yields;
  return *this;
}

void update_yield_limit() {
  int64_t smallest = kNoYieldLimit;
  for (const ArenaCore* arena : registry().arenas) {
    if (arena->yield_limit_bytes_ != kUnlimited) {
      smallest = std::min(smallest, arena->yield_limit_bytes_);
    }
  }
  smallest_yield_limit.store(smallest, std::memory_order_relaxed);
}

void arenas_give_way(int64_t outside_bytes) {
  const int64_t limit = smallest_yield_limit.load(std::memory_order_relaxed);
  if (limit == kNoYieldLimit || outside_bytes <= limit - total_resident.load(std::memory_order_relaxed)) {
    return;
  }
  const std::lock_guard<std::mutex> guard(registry().mutex);
  for (ArenaCore* arena : registry().arenas) {
    arena->give_way(outside_bytes);
  }
}

int64_t arena_live_blocks() {
  return total_live_blocks.load(std::memory_order_relaxed);
}

ArenaStats arena_totals() {
  ArenaStats totals;
  const std::lock_guard<std::mutex> guard(registry().mutex);
  for (const ArenaCore* arena : registry().arenas) {
    totals += arena->stats();
  }
  return totals;
}

void lock_arenas() {
  registry().mutex.lock();
  for (ArenaCore* arena : registry().arenas) {
    arena->mutex_.lock();
  }
}

void unlock_arenas() {
  for (ArenaCore* arena : registry().arenas) {
    arena->mutex_.unlock();
  }
  registry().mutex.unlock();
}

} // namespace torch_odt::memory
