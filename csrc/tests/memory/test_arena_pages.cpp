// An arena's pages: how long they stay, when they are given back, and when they give way to others.

#include <cstring>
#include <limits>
#include <stdexcept>

#include "arenas.h"

namespace torch_odt::tests {
namespace {

char* touched_block(ArenaCore& arena) {
  arena.begin(0);
  char* const block = serve(&arena, 16 * kKiB);
  arena.end();
  std::memset(block, 7, 16 * kKiB);
  return block;
}

TEST(an_arena_outlives_its_owner_until_its_last_block_is_freed) {
  auto arena = arena_with({{{0, 16 * kKiB}}});
  const std::weak_ptr<ArenaCore> watched = arena;
  ArenaCore* const core = arena.get();
  char* const block = touched_block(*core);
  arena.reset();
  CHECK(!watched.expired());
  CHECK_EQUAL(block[16 * kKiB - 1], 7);
  CHECK_EQUAL(memory::arena_totals().live_blocks, 1);
  core->free_block(block);
  CHECK(watched.expired());
  CHECK_EQUAL(memory::arena_totals().reserved_bytes, 0);
}

TEST(an_arena_outlives_its_owner_while_a_thread_is_inside) {
  auto arena = arena_with({{{0, kKiB}}});
  const std::weak_ptr<ArenaCore> watched = arena;
  ArenaCore* const core = arena.get();
  arena->begin(0);
  arena->set_dynamic(true, -1);
  arena.reset();
  core->end();
  CHECK(!watched.expired());
  core->leave_thread();
  CHECK(watched.expired());
}

TEST(released_pages_are_counted_and_read_as_zero) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  CHECK(arena->release());
  char* block = touched_block(*arena);
  CHECK(arena->stats().resident_bytes >= 16 * kKiB);
  CHECK(!arena->release());
  CHECK_EQUAL(block[0], 7);
  arena->free_block(block);
  CHECK(arena->stats().resident_bytes > 0);
  CHECK(arena->release());
  CHECK_EQUAL(arena->stats().resident_bytes, 0);
  arena->begin(0);
  block = serve(arena.get(), 16 * kKiB);
  arena->end();
  CHECK_EQUAL(block[0], 0);
  CHECK_EQUAL(block[16 * kKiB - 1], 0);
  arena->free_block(block);
}

TEST(an_idle_arena_gives_way_above_its_limit) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  arena->free_block(touched_block(*arena));
  const int64_t resident = arena->stats().resident_bytes;
  const auto yields = [&] { return arena->stats().yields; };

  memory::arenas_give_way(std::numeric_limits<int64_t>::max() / 2);
  CHECK_EQUAL(yields(), 0);
  arena->set_yield_limit(100 * kKiB);
  memory::arenas_give_way(100 * kKiB - resident);
  CHECK_EQUAL(yields(), 0);
  memory::arenas_give_way(100 * kKiB - resident + 1);
  CHECK_EQUAL(yields(), 1);
  CHECK_EQUAL(arena->stats().resident_bytes, 0);

  arena->free_block(touched_block(*arena));
  arena->set_yield_limit(memory::kUnlimited);
  memory::arenas_give_way(std::numeric_limits<int64_t>::max() / 2);
  CHECK_EQUAL(yields(), 1);
}

TEST(an_idle_arena_gives_way_with_four_times_the_little_that_is_lacking_of_what_it_has_touched) {
  const int64_t huge = memory::kHugePageBytes;
  const auto arena = ArenaCore::create(32 * huge);
  arena->select(arena->load(table_of({{{0, 32 * huge}}})));
  arena->begin(0);
  arena->free_block(serve(arena.get(), 32 * huge));
  arena->end();
  arena->set_yield_limit(36 * huge);
  memory::arenas_give_way(4 * huge);
  CHECK_EQUAL(arena->stats().resident_bytes, 32 * huge);
  memory::arenas_give_way(6 * huge);
  CHECK_EQUAL(arena->stats().resident_bytes, 24 * huge);
  memory::arenas_give_way(12 * huge);
  CHECK_EQUAL(arena->stats().yields, 1);
  memory::arenas_give_way(13 * huge);
  CHECK_EQUAL(arena->stats().resident_bytes, 20 * huge);
}

TEST(an_idle_arena_gives_way_with_all_that_it_has_touched_where_much_is_lacking) {
  const int64_t huge = memory::kHugePageBytes;
  const auto arena = ArenaCore::create(32 * huge);
  arena->select(arena->load(table_of({{{0, 32 * huge}}})));
  arena->begin(0);
  arena->free_block(serve(arena.get(), 32 * huge));
  arena->end();
  arena->set_yield_limit(36 * huge);
  memory::arenas_give_way(7 * huge);
  CHECK_EQUAL(arena->stats().resident_bytes, 0);
}

TEST(an_idle_arena_gives_way_with_no_more_of_what_it_holds_than_is_needed) {
  const int64_t huge = memory::kHugePageBytes;
  const auto arena = ArenaCore::create(8 * huge);
  arena->hold(8 * huge);
  arena->set_yield_limit(10 * huge);
  memory::arenas_give_way(2 * huge + 1);
  CHECK_EQUAL(arena->stats().held_bytes, 7 * huge);
  memory::arenas_give_way(3 * huge);
  CHECK_EQUAL(arena->stats().yields, 1);
  memory::arenas_give_way(6 * huge);
  CHECK_EQUAL(arena->stats().held_bytes, 4 * huge);
  CHECK_EQUAL(memory::arena_totals().resident_bytes, 4 * huge);
}

TEST(an_allocation_of_any_size_makes_an_arena_give_way) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  arena->set_yield_limit(100 * kKiB);
  arena->free_block(touched_block(*arena));
  memory::arenas_give_way(std::numeric_limits<int64_t>::max());
  CHECK_EQUAL(arena->stats().yields, 1);
}

TEST(an_arena_in_use_keeps_its_pages) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  arena->set_yield_limit(0);
  char* const block = touched_block(*arena);
  memory::arenas_give_way(kKiB);
  CHECK_EQUAL(block[0], 7);
  arena->free_block(block);
  arena->begin(0);
  memory::arenas_give_way(kKiB);
  CHECK_EQUAL(arena->stats().yields, 0);
  arena->end();
  memory::arenas_give_way(kKiB);
  CHECK_EQUAL(arena->stats().yields, 1);
}

TEST(the_pages_of_all_arenas_count) {
  const auto one = arena_with({{{0, 16 * kKiB}}});
  const auto other = arena_with({{{0, 16 * kKiB}}});
  one->free_block(touched_block(*one));
  char* const block = touched_block(*other);
  const int64_t both = memory::arena_totals().resident_bytes;
  CHECK_EQUAL(both, one->stats().resident_bytes + other->stats().resident_bytes);
  one->set_yield_limit(both);
  memory::arenas_give_way(0);
  CHECK_EQUAL(one->stats().yields, 0);
  memory::arenas_give_way(1);
  CHECK_EQUAL(one->stats().yields, 1);
  other->free_block(block);
}

TEST(held_pages_are_counted_once_and_grow) {
  const auto arena = ArenaCore::create(64 * kKiB);
  arena->hold(4 * kKiB);
  CHECK_EQUAL(arena->stats().held_bytes, memory::round_up(4 * kKiB, memory::page_bytes()));
  arena->hold(64 * kKiB);
  arena->hold(8 * kKiB);
  CHECK_EQUAL(arena->stats().held_bytes, 64 * kKiB);
  CHECK_EQUAL(arena->stats().resident_bytes, 64 * kKiB);
  CHECK_EQUAL(memory::arena_totals().held_bytes, 64 * kKiB);
  CHECK_THROWS(std::invalid_argument, arena->hold(arena->stats().reserved_bytes + 1));
  CHECK_THROWS(std::invalid_argument, arena->hold(-1));
}

TEST(touched_pages_are_not_held) {
  const auto arena = arena_with({{{32 * kKiB, 16 * kKiB}}});
  arena->free_block(touched_block(*arena));
  CHECK(arena->stats().resident_bytes >= 48 * kKiB);
  CHECK_EQUAL(arena->stats().held_bytes, 0);
  arena->hold(4 * kKiB);
  CHECK(arena->stats().resident_bytes >= 48 * kKiB);
}

TEST(so_many_held_pages_stay_as_are_to_be_kept) {
  const int64_t huge = memory::kHugePageBytes;
  const auto arena = ArenaCore::create(4 * huge);
  arena->hold(4 * huge);
  CHECK(arena->release(5 * huge));
  CHECK_EQUAL(arena->stats().held_bytes, 4 * huge);
  CHECK(arena->release(huge + 1));
  CHECK_EQUAL(arena->stats().held_bytes, 2 * huge);
  CHECK_EQUAL(arena->stats().resident_bytes, 2 * huge);
  CHECK_EQUAL(memory::arena_totals().resident_bytes, 2 * huge);
  arena->hold(3 * huge);
  CHECK_EQUAL(arena->stats().held_bytes, 3 * huge);
  CHECK(arena->release());
  CHECK_EQUAL(arena->stats().held_bytes, 0);
  CHECK_THROWS(std::invalid_argument, arena->release(-1));
}

TEST(held_pages_survive_a_new_size) {
  const int64_t huge = memory::kHugePageBytes;
  const auto arena = ArenaCore::create(2 * huge);
  arena->hold(2 * huge);
  arena->resize(4 * huge);
  const int64_t held = arena->stats().held_bytes;
  CHECK(held == 2 * huge || held == 0);
  CHECK_EQUAL(arena->stats().resident_bytes, held);
  arena->hold(3 * huge);
  arena->resize(huge);
  CHECK(arena->stats().held_bytes <= huge);
  CHECK_EQUAL(memory::arena_totals().resident_bytes, arena->stats().resident_bytes);
}

TEST(a_vacated_arena_gives_back_what_no_block_needs) {
  const int64_t page = memory::page_bytes();
  const auto arena = ArenaCore::create(8 * page);
  arena->select(arena->load(table_of({{{page, 2 * page}, {4 * page, page / 2}, {6 * page, page}}})));
  arena->hold(8 * page);
  arena->begin(0);
  char* const first = serve(arena.get(), 2 * page);
  char* const second = serve(arena.get(), page / 2);
  char* const third = serve(arena.get(), page);
  arena->end();
  std::memset(first, 7, 2 * page);
  std::memset(second, 8, page / 2);
  std::memset(third, 9, page);
  // Behind the first page there is a gap, so that nothing is held.
  arena->vacate(true);
  CHECK_EQUAL(arena->stats().held_bytes, 0);
  CHECK_EQUAL(arena->stats().resident_bytes, 7 * page);
  arena->free_block(third);
  CHECK_EQUAL(arena->stats().resident_bytes, 5 * page);
  CHECK_EQUAL(memory::arena_totals().resident_bytes, 5 * page);
  CHECK_EQUAL(third[0], 0);
  CHECK_EQUAL(first[2 * page - 1], 7);
  arena->free_block(first);
  CHECK_EQUAL(first[0], 0);
  CHECK_EQUAL(second[page / 2 - 1], 8);
  arena->free_block(second);
  CHECK_EQUAL(arena->stats().resident_bytes, 0);
  CHECK_EQUAL(second[0], 0);
}

TEST(an_arena_that_is_no_longer_vacated_keeps_its_pages) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  arena->vacate(true);
  arena->vacate(false);
  arena->free_block(touched_block(*arena));
  CHECK(arena->stats().resident_bytes >= 16 * kKiB);
}

TEST(a_resized_arena_has_new_pages_where_none_were_held) {
  const auto arena = arena_with({{{0, 16 * kKiB}}});
  char* const block = touched_block(*arena);
  CHECK_THROWS(std::runtime_error, arena->resize(128 * kKiB));
  arena->free_block(block);
  arena->resize(128 * kKiB);
  CHECK_EQUAL(arena->stats().reserved_bytes, memory::round_up(128 * kKiB, memory::page_bytes()));
  CHECK_EQUAL(arena->stats().resident_bytes, 0);
  CHECK_EQUAL(memory::arena_totals().resident_bytes, 0);
  arena->free_block(touched_block(*arena));
}

} // namespace
} // namespace torch_odt::tests
