// A plan in an arena: replayed at its addresses, and what does not match it is left to the ordinary heap and counted.

#include <cstring>
#include <limits>
#include <stdexcept>

#include "arenas.h"

namespace torch_odt::tests {
namespace {

using memory::Miss;
using memory::MissReason;

TEST(a_plan_is_replayed_at_its_addresses) {
  const auto arena = arena_with({{{8 * kKiB, kKiB}, {0, 4 * kKiB}}, {{16 * kKiB, 100}}});
  char* first_of_all = nullptr;
  for (int step = 0; step < 3; ++step) {
    arena->begin(0);
    char* const first = serve(arena.get(), kKiB);
    char* const second = serve(arena.get(), 4 * kKiB);
    arena->begin(1);
    char* const third = serve(arena.get(), 100);
    arena->end();
    CHECK(first != nullptr && second != nullptr && third != nullptr);
    CHECK_EQUAL(first - second, 8 * kKiB);
    CHECK_EQUAL(third - second, 16 * kKiB);
    first_of_all = step == 0 ? first : first_of_all;
    CHECK(first == first_of_all);
    std::memset(second, step, 4 * kKiB);
    CHECK_EQUAL(arena->stats().live_blocks, 3);
    CHECK_EQUAL(arena->stats().live_bytes, 5 * kKiB + 100);
    CHECK_EQUAL(memory::arena_live_blocks(), 3);
    for (char* const block : {first, second, third}) {
      arena->free_block(block);
    }
    CHECK_EQUAL(arena->stats().live_bytes, 0);
    CHECK_EQUAL(memory::arena_live_blocks(), 0);
  }
  CHECK_EQUAL(arena->stats().hits, 9);
  CHECK(arena->misses().empty());
}

TEST(an_allocation_may_take_less_than_its_place) {
  const auto arena = arena_with({{{0, 4 * kKiB}, {kKiB, kKiB}}});
  arena->begin(0);
  char* const block = serve(arena.get(), 10);
  // What the first one left free is free indeed.
  char* const next = serve(arena.get(), kKiB);
  arena->end();
  CHECK(block != nullptr && next == block + kKiB);
  CHECK_EQUAL(arena->stats().smaller, 1);
  CHECK_EQUAL(arena->stats().hits, 2);
  arena->free_block(block);
  arena->free_block(next);
}

void check_miss(const Miss& miss, int64_t ordinal, int64_t expected, int64_t got, MissReason reason) {
  CHECK_EQUAL(miss.ordinal, ordinal);
  CHECK_EQUAL(miss.expected_bytes, expected);
  CHECK_EQUAL(miss.got_bytes, got);
  CHECK_EQUAL(miss.reason, reason);
}

TEST(what_does_not_match_is_not_served_and_shifts_nothing) {
  const auto arena = arena_with({{{0, kKiB}, {-1, kKiB}, {512, kKiB}, {4 * kKiB, kKiB}}});
  arena->begin(0);
  CHECK(serve(arena.get(), kKiB + 1) == nullptr);
  CHECK(serve(arena.get(), kKiB) == nullptr);
  char* const third = serve(arena.get(), kKiB);
  char* const fourth = serve(arena.get(), kKiB);
  CHECK(serve(arena.get(), 1) == nullptr);
  CHECK(third != nullptr && fourth == third + 4 * kKiB - 512);

  // Blocks that overlap from below and from above, and one that merely touches.
  arena->begin(0);
  CHECK(serve(arena.get(), kKiB) == nullptr);
  arena->begin(0);
  char* const touching = serve(arena.get(), 512);
  CHECK(touching == third - 512);
  arena->free_block(touching);
  arena->end();

  const std::vector<Miss> misses = arena->misses();
  CHECK_EQUAL(misses.size(), 3u);
  check_miss(misses[0], 0, kKiB, kKiB + 1, MissReason::size_mismatch);
  check_miss(misses[1], 4, -1, 1, MissReason::past_record);
  check_miss(misses[2], 0, kKiB, kKiB, MissReason::occupied);
  CHECK_EQUAL(arena->stats().size_mismatch, 1);
  CHECK_EQUAL(arena->stats().past_record, 1);
  CHECK_EQUAL(arena->stats().occupied, 1);
  arena->reset_misses();
  CHECK(arena->misses().empty());
  CHECK_EQUAL(arena->stats().occupied, 0);
  arena->free_block(third);
  arena->free_block(fourth);
}

TEST(without_an_active_plan_nothing_is_served) {
  const auto arena = arena_with({{{0, kKiB}}});
  CHECK(serve(arena.get(), kKiB) == nullptr);
  arena->begin(0);
  arena->end();
  CHECK(serve(arena.get(), kKiB) == nullptr);
}

TEST(tables_that_do_not_fit_are_refused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto arena = ArenaCore::create(64 * kKiB);
  const int64_t bytes = arena->stats().reserved_bytes;
  for (const Place& place :
       {Place{32, 64}, Place{0, 0}, Place{0, -1}, Place{0, bytes + 1}, Place{bytes, 1}, Place{64, kMost},
        Place{kMost - 63, 64}}) {
    CHECK_THROWS(std::invalid_argument, arena->load(table_of({{place}})));
  }
  arena->load(table_of({{{0, bytes}, {bytes - 64, 64}, {-1, 0}}}));
  CHECK_THROWS(std::invalid_argument, ArenaCore::create(-1));
  CHECK_THROWS(std::runtime_error, ArenaCore::create(kMost));
}

TEST(calls_out_of_turn_are_refused) {
  const auto arena = ArenaCore::create(64 * kKiB);
  CHECK_THROWS(std::runtime_error, arena->begin(0));
  CHECK_THROWS(std::out_of_range, arena->select(0));
  const int64_t table = arena->load(table_of({{{0, kKiB}}}));
  const int64_t other_table = arena->load(table_of({{}}));
  arena->select(table);
  for (const int64_t instruction : {-1, 1}) {
    CHECK_THROWS(std::out_of_range, arena->begin(instruction));
  }

  arena->begin(0);
  CHECK_THROWS(std::runtime_error, arena->select(other_table));
  CHECK_THROWS(std::runtime_error, arena->unload(table));
  CHECK_THROWS(std::runtime_error, arena->resize(kKiB));
  CHECK_THROWS(std::runtime_error, arena_with({{}})->begin(0));
  arena->unload(other_table);
  arena->end();
  CHECK_THROWS(std::runtime_error, arena->resize(kKiB - 1));
  arena->unload(table);
  CHECK_THROWS(std::out_of_range, arena->unload(table));
  CHECK_THROWS(std::runtime_error, arena->begin(0));
  arena->resize(kKiB - 1);
  CHECK_EQUAL(arena->stats().reserved_bytes, memory::page_bytes());
}

} // namespace
} // namespace torch_odt::tests
