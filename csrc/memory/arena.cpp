#include "arena.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "arenas.h"

namespace torch_odt::memory {

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kDynamicMinimum = 4096;
// What goes of pages that are merely touched, by what is lacking...
constexpr int64_t kGiveWayTimes = 4;
// ... and where more than one part of so many is lacking, all of them: who lacks so much runs a model beside the plan,
// whose convolutions take workspaces of several times what torch counts.
constexpr int64_t kMuchIsOnePartOf = 16;
// Nobody has so much, and as many times that is still a number.
constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max() / (2 * kMuchIsOnePartOf);
constexpr size_t kMissSample = 32;

// The plan that the calling thread is in. Free of constructors, because every allocation looks at it.
struct ThreadPlan {
  ArenaCore* arena = nullptr;
  const Place* places = nullptr;
  int64_t count = 0;
  int64_t instruction = -1;
  int64_t ordinal = 0;
  ArenaCore* dynamic_arena = nullptr;
  int64_t dynamic_limit_bytes = 0;
  bool dynamic_refuses = false;
};
constinit thread_local ThreadPlan here;

} // namespace

std::shared_ptr<ArenaCore> ArenaCore::create(int64_t reserve_bytes) {
  if (reserve_bytes < 0) {
    throw std::invalid_argument("an arena cannot reserve " + std::to_string(reserve_bytes) + " bytes");
  }
  std::shared_ptr<ArenaCore> arena(new ArenaCore(reserve_bytes));
  const std::lock_guard<std::mutex> guard(registry().mutex);
  registry().arenas.push_back(arena.get());
  return arena;
}

ArenaCore::ArenaCore(int64_t reserve_bytes)
    : mapping_(std::make_unique<Mapping>(reserve_bytes, Mapping::Access::read_write)) {
  stats_.reserved_bytes = mapping_->bytes();
}

ArenaCore::~ArenaCore() {
  const std::lock_guard<std::mutex> guard(registry().mutex);
  std::erase(registry().arenas, this);
  update_yield_limit();
  total_resident.fetch_sub(stats_.resident_bytes, std::memory_order_relaxed);
}

int64_t ArenaCore::load(PlaceTable table) {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const Place& place : table.places) {
    if (place.offset < 0) {
      continue;
    }
    if (place.offset % kAlignment != 0) {
      throw std::invalid_argument(
          "offset " + std::to_string(place.offset) + " is not a multiple of " + std::to_string(kAlignment));
    }
    if (place.bytes <= 0 || place.offset > mapping_->bytes() - place.bytes) {
      throw std::invalid_argument(
          "a block of " + std::to_string(place.bytes) + " bytes at offset " + std::to_string(place.offset) +
          " does not fit an arena of " + std::to_string(mapping_->bytes()) + " bytes");
    }
    table.end_bytes = std::max(table.end_bytes, place.offset + place.bytes);
  }
  const int64_t id = next_table_id_++;
  tables_.emplace(id, std::move(table));
  return id;
}

void ArenaCore::unload(int64_t table_id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!tables_.contains(table_id)) {
    throw std::out_of_range("no table " + std::to_string(table_id) + " is loaded");
  }
  if (table_id == selected_id_) {
    if (active_threads_ > 0) {
      throw std::runtime_error("the selected table cannot be unloaded while the arena is active");
    }
    selected_ = nullptr;
    selected_id_ = -1;
  }
  tables_.erase(table_id);
}

void ArenaCore::select(int64_t table_id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto entry = tables_.find(table_id);
  if (entry == tables_.end()) {
    throw std::out_of_range("no table " + std::to_string(table_id) + " is loaded");
  }
  if (active_threads_ > 0) {
    throw std::runtime_error("another table cannot be selected while the arena is active");
  }
  selected_ = &entry->second;
  selected_id_ = table_id;
}

void ArenaCore::begin(int64_t instruction) {
  if (here.arena != this) {
    if (here.arena != nullptr) {
      throw std::runtime_error("another arena is active on this thread: call its end() first");
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    if (selected_ == nullptr) {
      throw std::runtime_error("no table is selected: call load() and select() first");
    }
    enter();
    here.arena = this;
    here.instruction = -1;
    here.count = 0;
  }
  // Read without the lock: the selection cannot change while a thread is inside.
  const PlaceTable& table = *selected_;
  const auto instructions = static_cast<int64_t>(table.starts.size()) - 1;
  if (instruction < 0 || instruction >= instructions) {
    end();
    throw std::out_of_range(
        "instruction " + std::to_string(instruction) + " is outside the table of " + std::to_string(instructions));
  }
  const int64_t start = table.starts[static_cast<size_t>(instruction)];
  here.places = table.places.data() + start;
  here.count = table.starts[static_cast<size_t>(instruction) + 1] - start;
  here.instruction = instruction;
  here.ordinal = 0;
}

void ArenaCore::end() {
  if (here.arena == this) {
    here.arena = nullptr;
    leave();
  }
}

void ArenaCore::set_dynamic(bool on, int64_t limit_bytes, bool refuses) {
  if (on && here.dynamic_arena != nullptr && here.dynamic_arena != this) {
    throw std::runtime_error("another arena serves this thread dynamically: call its dynamic(False) first");
  }
  if (on) {
    if (here.dynamic_arena == nullptr) {
      const std::lock_guard<std::mutex> guard(mutex_);
      enter();
    }
    here.dynamic_arena = this;
    here.dynamic_limit_bytes = limit_bytes < 0 ? mapping_->bytes() : std::min(limit_bytes, mapping_->bytes());
    here.dynamic_refuses = refuses;
  } else if (here.dynamic_arena == this) {
    here.dynamic_arena = nullptr;
    leave();
  }
}

void ArenaCore::leave_thread() {
  end();
  set_dynamic(false, -1);
}

// Expects the arena to be locked, as do retain() and drop().
void ArenaCore::enter() {
  ++active_threads_;
  retain();
}

void ArenaCore::leave() {
  std::shared_ptr<ArenaCore> last;
  const std::lock_guard<std::mutex> guard(mutex_);
  --active_threads_;
  last = drop();
}

void ArenaCore::retain() {
  if (holds_++ == 0) {
    self_ = shared_from_this();
  }
}

// The caller lets go of the result after it has unlocked: it may be the last owner.
std::shared_ptr<ArenaCore> ArenaCore::drop() {
  return --holds_ == 0 ? std::move(self_) : nullptr;
}

bool ArenaCore::is_free(int64_t offset, int64_t end) const {
  const auto after = live_.lower_bound(offset);
  if (after != live_.end() && after->first < end) {
    return false;
  }
  return after == live_.begin() || std::prev(after)->second <= offset;
}

void* ArenaCore::claim(int64_t offset, int64_t bytes) {
  const int64_t end = offset + bytes;
  live_.emplace(offset, end);
  stats_.live_bytes += bytes;
  ++stats_.live_blocks;
  total_live_blocks.fetch_add(1, std::memory_order_relaxed);
  if (end > stats_.resident_bytes) {
    set_resident(std::min(round_up(end, page_bytes()), mapping_->bytes()));
  }
  retain();
  return mapping_->base() + offset;
}

void ArenaCore::note_miss(const Miss& miss) {
  switch (miss.reason) {
    case MissReason::occupied:
      ++stats_.occupied;
      break;
    case MissReason::size_mismatch:
      ++stats_.size_mismatch;
      break;
    case MissReason::past_record:
      ++stats_.past_record;
      break;
  }
  if (misses_.size() < kMissSample) {
    misses_.push_back(miss);
  }
}

void* ArenaCore::serve_planned(int64_t bytes) {
  const int64_t ordinal = here.ordinal++;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (ordinal >= here.count) {
    note_miss({here.instruction, ordinal, -1, bytes, MissReason::past_record});
    return nullptr;
  }
  const Place& place = here.places[ordinal];
  if (place.bytes < bytes) {
    note_miss({here.instruction, ordinal, place.bytes, bytes, MissReason::size_mismatch});
    return nullptr;
  }
  if (place.offset < 0) {
    return nullptr;
  }
  if (!is_free(place.offset, place.offset + bytes)) {
    note_miss({here.instruction, ordinal, place.bytes, bytes, MissReason::occupied});
    return nullptr;
  }
  ++stats_.hits;
  stats_.smaller += bytes < place.bytes ? 1 : 0;
  return claim(place.offset, bytes);
}

// Best fit among the holes; only if none fits, above everything, so that the pages touched stay few.
void* ArenaCore::serve_dynamic(int64_t bytes, int64_t limit_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  int64_t best = -1;
  int64_t best_gap = std::numeric_limits<int64_t>::max();
  int64_t cursor = 0;
  for (const auto& [offset, end] : live_) {
    const int64_t gap = std::min(offset, limit_bytes) - cursor;
    if (gap >= bytes && gap < best_gap) {
      best = cursor;
      best_gap = gap;
    }
    cursor = round_up(end, kAlignment);
  }
  if (best < 0 && cursor <= limit_bytes - bytes) {
    best = cursor;
  }
  if (best < 0) {
    ++stats_.dynamic_misses;
    return nullptr;
  }
  ++stats_.dynamic_hits;
  return claim(best, bytes);
}

void ArenaCore::free_block(const void* address) {
  std::shared_ptr<ArenaCore> last;
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto entry = live_.find(static_cast<const char*>(address) - mapping_->base());
  if (entry == live_.end()) {
    return;
  }
  stats_.live_bytes -= entry->second - entry->first;
  --stats_.live_blocks;
  total_live_blocks.fetch_sub(1, std::memory_order_relaxed);
  const auto after = live_.erase(entry);
  if (is_vacated_) {
    discard_between(
        after == live_.begin() ? 0 : std::prev(after)->second, after == live_.end() ? stats_.resident_bytes : after->first);
    forget_pages_behind_blocks();
  }
  last = drop();
}

void ArenaCore::set_resident(int64_t bytes) {
  total_resident.fetch_add(bytes - stats_.resident_bytes, std::memory_order_relaxed);
  stats_.resident_bytes = bytes;
  stats_.held_bytes = std::min(stats_.held_bytes, bytes);
}

void ArenaCore::discard_pages(int64_t keep_bytes) {
  if (keep_bytes < stats_.resident_bytes) {
    mapping_->discard(keep_bytes, stats_.resident_bytes);
    set_resident(keep_bytes);
  }
}

// Whole pages inside a range; those at its ends may be shared with blocks.
void ArenaCore::discard_between(int64_t begin, int64_t end) {
  const int64_t first = round_up(begin, page_bytes());
  const int64_t last = std::min(end, stats_.resident_bytes) / page_bytes() * page_bytes();
  if (first < last) {
    mapping_->discard(first, last);
    stats_.held_bytes = std::min(stats_.held_bytes, first);
  }
}

void ArenaCore::forget_pages_behind_blocks() {
  const int64_t end = live_.empty() ? 0 : round_up(std::prev(live_.end())->second, page_bytes());
  set_resident(std::min(stats_.resident_bytes, end));
}

void ArenaCore::vacate(bool on) {
  const std::lock_guard<std::mutex> guard(mutex_);
  is_vacated_ = on;
  if (!on) {
    return;
  }
  int64_t cursor = 0;
  for (const auto& [offset, end] : live_) {
    discard_between(cursor, offset);
    cursor = end;
  }
  discard_between(cursor, stats_.resident_bytes);
  forget_pages_behind_blocks();
}

void ArenaCore::hold(int64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (bytes < 0 || bytes > mapping_->bytes()) {
    throw std::invalid_argument(
        "an arena of " + std::to_string(mapping_->bytes()) + " bytes cannot hold " + std::to_string(bytes));
  }
  const int64_t end = std::min(round_up(bytes, page_bytes()), mapping_->bytes());
  if (end > stats_.held_bytes) {
    mapping_->populate(stats_.held_bytes, end);
    set_resident(std::max(end, stats_.resident_bytes));
    stats_.held_bytes = end;
  }
}

bool ArenaCore::release(int64_t keep_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (keep_bytes < 0) {
    throw std::invalid_argument("an arena cannot keep " + std::to_string(keep_bytes) + " bytes");
  }
  if (!live_.empty()) {
    return false;
  }
  discard_pages(round_up(std::min(keep_bytes, stats_.resident_bytes), kHugePageBytes));
  return true;
}

void ArenaCore::resize(int64_t reserve_bytes) {
  if (reserve_bytes < 0) {
    throw std::invalid_argument("an arena cannot reserve " + std::to_string(reserve_bytes) + " bytes");
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!live_.empty() || active_threads_ > 0) {
    throw std::runtime_error(
        "the arena cannot be resized while it is active or blocks live in it (" + std::to_string(live_.size()) + ")");
  }
  for (const auto& [id, table] : tables_) {
    if (table.end_bytes > reserve_bytes) {
      throw std::runtime_error(
          "table " + std::to_string(id) + " reaches to byte " + std::to_string(table.end_bytes) +
          ", beyond the new size: unload it first");
    }
  }
  discard_pages(round_up(stats_.held_bytes, kHugePageBytes));
  const bool have_stayed = mapping_->resize(reserve_bytes);
  set_resident(have_stayed ? std::min(stats_.resident_bytes, mapping_->bytes()) : 0);
  stats_.reserved_bytes = mapping_->bytes();
}

void ArenaCore::set_yield_limit(int64_t bytes) {
  const std::lock_guard<std::mutex> registry_guard(registry().mutex);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    yield_limit_bytes_ = bytes < 0 ? kUnlimited : bytes;
  }
  update_yield_limit();
}

void ArenaCore::give_way(int64_t outside_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const bool is_idle = live_.empty() && active_threads_ == 0 && stats_.resident_bytes > 0;
  const int64_t others = total_resident.load(std::memory_order_relaxed) - stats_.resident_bytes;
  const int64_t lacking = std::min(outside_bytes, kMostBytes) - (yield_limit_bytes_ - others - stats_.resident_bytes);
  if (is_idle && yield_limit_bytes_ != kUnlimited && lacking > 0) {
    // Each page that goes has to be cleared again in the next step. Held pages may be gone for good, so that no more of
    // them go than must; of those that are merely touched some more, because libraries that run meanwhile take more
    // than torch counts. Whole huge pages, that the next small allocation need not ask again.
    const bool is_much = lacking * kMuchIsOnePartOf > stats_.resident_bytes;
    const int64_t merely_touched = is_much ? stats_.resident_bytes : lacking * kGiveWayTimes;
    const int64_t going = stats_.held_bytes > 0 ? lacking : merely_touched;
    const int64_t left = std::max<int64_t>(0, stats_.resident_bytes - going);
    discard_pages(left / kHugePageBytes * kHugePageBytes);
    ++stats_.yields;
  }
}

ArenaStats ArenaCore::stats() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return stats_;
}

std::vector<Miss> ArenaCore::misses() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return misses_;
}

void ArenaCore::reset_misses() {
  const std::lock_guard<std::mutex> guard(mutex_);
  misses_.clear();
  stats_.hits = stats_.smaller = stats_.occupied = stats_.size_mismatch = stats_.past_record = 0;
  stats_.dynamic_hits = stats_.dynamic_misses = 0;
}

void* arena_serve(int64_t bytes, ArenaCore** owner) {
  void* address = nullptr;
  if (here.dynamic_arena != nullptr) {
    if (bytes >= kDynamicMinimum) {
      address = here.dynamic_arena->serve_dynamic(bytes, here.dynamic_limit_bytes);
      if (address == nullptr && here.dynamic_refuses) {
        throw ArenaFull(here.dynamic_limit_bytes);
      }
      *owner = here.dynamic_arena;
    }
  } else if (here.arena != nullptr) {
    address = here.arena->serve_planned(bytes);
    *owner = here.arena;
  }
  if (address == nullptr) {
    *owner = nullptr;
  }
  return address;
}

} // namespace torch_odt::memory
