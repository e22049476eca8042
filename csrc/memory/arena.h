// The arena: one mapping out of which a plan's blocks are served, each at the address the plan gave it.
//
// A plan is a table of (offset, bytes) per instruction, in the order in which that instruction allocates. What the plan
// has no room for is never served from the arena: it becomes an ordinary allocation and is counted as a miss, so that a
// wrong plan costs memory and never correctness. An allocation may take less than its place, because what some operators
// allocate depends on the data (an index by a mask), and the plan has room for the most.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "counters.h"
#include "mapping.h"

namespace torch_odt::memory {

struct Place {
  int64_t offset; // negative: planned to live outside the arena
  int64_t bytes;
};

// One plan, flattened: the places of instruction i are places[starts[i]] up to places[starts[i + 1]].
struct PlaceTable {
  std::vector<int64_t> starts;
  std::vector<Place> places;
  int64_t end_bytes = 0;
};

enum class MissReason { occupied, size_mismatch, past_record };

struct Miss {
  int64_t instruction;
  int64_t ordinal;
  int64_t expected_bytes; // -1 where the plan has no such allocation
  int64_t got_bytes;
  MissReason reason;
};

struct ArenaStats {
  int64_t reserved_bytes = 0;
  int64_t live_bytes = 0;
  int64_t live_blocks = 0;
  int64_t resident_bytes = 0; // up to the last page that may be resident
  int64_t held_bytes = 0; // from the start on, resident without a gap
  int64_t hits = 0;
  int64_t smaller = 0; // hits that took less than their place
  int64_t occupied = 0;
  int64_t size_mismatch = 0;
  int64_t past_record = 0;
  int64_t dynamic_hits = 0;
  int64_t dynamic_misses = 0;
  int64_t yields = 0;

  ArenaStats& operator+=(const ArenaStats& other);
};

// Thrown by an allocation that does not fit below the limit of dynamic service, where that refuses.
struct ArenaFull {
  int64_t limit_bytes;
};

// Lives as long as its owner or its last block, whichever is later.
class ArenaCore final : public std::enable_shared_from_this<ArenaCore> {
 public:
  static std::shared_ptr<ArenaCore> create(int64_t reserve_bytes);
  ~ArenaCore();
  ArenaCore(const ArenaCore&) = delete;
  ArenaCore& operator=(const ArenaCore&) = delete;

  int64_t load(PlaceTable table);
  void unload(int64_t table_id);
  void select(int64_t table_id);

  // These four concern the calling thread.
  void begin(int64_t instruction);
  void end();
  // With `refuses`, what would lie beyond the limit throws `ArenaFull` instead of lying elsewhere.
  void set_dynamic(bool on, int64_t limit_bytes, bool refuses = false);
  void leave_thread();

  // Makes the first pages resident, so that nobody else can have the memory before a plan comes to use it.
  void hold(int64_t bytes);
  // Gives the other pages back than the first ones; false, and none is, while blocks live in the arena.
  bool release(int64_t keep_bytes = 0);
  // Gives back the pages under no block, and from then on those of each block that is freed: for who goes on with less
  // than was planned. Without `on`, pages stay again.
  void vacate(bool on);
  // Held pages stay.
  void resize(int64_t reserve_bytes);
  void set_yield_limit(int64_t bytes);
  // Gives so many pages back that the process does not pass this arena's limit.
  void give_way(int64_t outside_bytes);

  void free_block(const void* address);

  ArenaStats stats() const;
  std::vector<Miss> misses() const;
  void reset_misses();

 private:
  friend void* arena_serve(int64_t bytes, ArenaCore** owner);
  friend void lock_arenas();
  friend void unlock_arenas();
  friend void update_yield_limit();

  explicit ArenaCore(int64_t reserve_bytes);

  void* serve_planned(int64_t bytes);
  void* serve_dynamic(int64_t bytes, int64_t limit_bytes);
  void* claim(int64_t offset, int64_t bytes);
  bool is_free(int64_t offset, int64_t end) const;
  void note_miss(const Miss& miss);
  void retain();
  std::shared_ptr<ArenaCore> drop();
  void enter();
  void leave();
  void set_resident(int64_t bytes);
  void discard_pages(int64_t keep_bytes);
  void discard_between(int64_t begin, int64_t end);
  void forget_pages_behind_blocks();

  mutable std::mutex mutex_;
  std::unique_ptr<Mapping> mapping_;
  std::map<int64_t, int64_t> live_; // offset -> end
  std::map<int64_t, PlaceTable> tables_;
  const PlaceTable* selected_ = nullptr;
  int64_t selected_id_ = -1;
  int64_t next_table_id_ = 0;
  int64_t active_threads_ = 0;
  int64_t holds_ = 0;
  bool is_vacated_ = false;
  std::shared_ptr<ArenaCore> self_; // set while blocks live or threads are inside
  int64_t yield_limit_bytes_ = kUnlimited;
  ArenaStats stats_;
  std::vector<Miss> misses_;
};

// The place that the plan active on this thread has for an allocation of this size, or null.
void* arena_serve(int64_t bytes, ArenaCore** owner);
// Called before an ordinary allocation, with the ordinary bytes that there will be after it.
void arenas_give_way(int64_t outside_bytes);

int64_t arena_live_blocks();
ArenaStats arena_totals();

void lock_arenas();
void unlock_arenas();

} // namespace torch_odt::memory
