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

TEST(a_resized_arena_has_new_pages) {
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
