// An arena that serves without a plan: where blocks go, and what is left to the ordinary heap.

#include <stdexcept>

#include "arenas.h"

namespace torch_odt::tests {
namespace {

TEST(blocks_fill_the_best_hole_before_new_pages) {
  const auto arena = ArenaCore::create(256 * kKiB);
  arena->set_dynamic(true, -1);
  char* const first = serve(arena.get(), 32 * kKiB);
  char* const second = serve(arena.get(), 4 * kKiB + 1);
  char* const third = serve(arena.get(), 16 * kKiB);
  char* const fourth = serve(arena.get(), 8 * kKiB);
  CHECK_EQUAL(second - first, 32 * kKiB);
  CHECK_EQUAL(third - second, 4 * kKiB + 64);
  CHECK_EQUAL(fourth - third, 16 * kKiB);
  arena->free_block(first);
  arena->free_block(third);
  char* const again = serve(arena.get(), 10 * kKiB);
  CHECK(again == third);
  char* const large = serve(arena.get(), 20 * kKiB);
  CHECK(large == first);
  char* const above = serve(arena.get(), 20 * kKiB);
  CHECK(above == fourth + 8 * kKiB);
  CHECK_EQUAL(arena->stats().dynamic_hits, 7);
  arena->leave_thread();
  for (char* const block : {second, fourth, again, large, above}) {
    arena->free_block(block);
  }
  CHECK_EQUAL(arena->stats().live_blocks, 0);
}

TEST(small_blocks_and_those_beyond_the_limit_are_ordinary) {
  const auto arena = ArenaCore::create(64 * kKiB);
  arena->set_dynamic(true, 20 * kKiB);
  CHECK(serve(arena.get(), 4 * kKiB - 1) == nullptr);
  CHECK_EQUAL(arena->stats().dynamic_misses, 0);
  CHECK(serve(arena.get(), 20 * kKiB + 1) == nullptr);
  CHECK(serve(arena.get(), INT64_MAX) == nullptr);
  CHECK_EQUAL(arena->stats().dynamic_misses, 2);
  char* const whole = serve(arena.get(), 20 * kKiB);
  CHECK(whole != nullptr);
  CHECK(serve(arena.get(), 4 * kKiB) == nullptr);
  arena->free_block(whole);

  // A hole that a block above the limit closes ends at the limit.
  arena->set_dynamic(true, -1);
  char* const low = serve(arena.get(), 16 * kKiB);
  char* const high = serve(arena.get(), 32 * kKiB);
  arena->free_block(low);
  arena->set_dynamic(true, 8 * kKiB);
  CHECK(serve(arena.get(), 12 * kKiB) == nullptr);
  char* const below = serve(arena.get(), 8 * kKiB);
  CHECK(below == low);
  arena->leave_thread();
  arena->free_block(high);
  arena->free_block(below);
}

TEST(what_does_not_fit_below_the_limit_is_refused_where_that_is_wanted) {
  const auto arena = ArenaCore::create(64 * kKiB);
  arena->set_dynamic(true, 20 * kKiB, true);
  char* const first = serve(arena.get(), 16 * kKiB);
  CHECK(first != nullptr);
  CHECK(serve(arena.get(), 4 * kKiB - 1) == nullptr);
  int64_t limit_bytes = 0;
  try {
    serve(arena.get(), 8 * kKiB);
  } catch (const memory::ArenaFull& full) {
    limit_bytes = full.limit_bytes;
  }
  CHECK_EQUAL(limit_bytes, 20 * kKiB);
  arena->set_dynamic(true, 20 * kKiB);
  CHECK(serve(arena.get(), 8 * kKiB) == nullptr);
  arena->leave_thread();
  arena->free_block(first);
}

TEST(dynamic_service_comes_before_a_plan_and_from_one_arena) {
  const auto arena = arena_with({{{32 * kKiB, 4 * kKiB}}});
  const auto other = ArenaCore::create(64 * kKiB);
  arena->begin(0);
  other->set_dynamic(true, -1);
  CHECK_THROWS(std::runtime_error, arena->set_dynamic(true, -1));
  char* const dynamic = serve(other.get(), 4 * kKiB);
  CHECK(dynamic != nullptr);
  // Not one of the plan's either.
  CHECK(serve(nullptr, kKiB) == nullptr);
  other->set_dynamic(false, -1);
  char* const planned = serve(arena.get(), 4 * kKiB);
  CHECK(planned != nullptr);
  CHECK(arena->misses().empty());
  arena->end();
  other->free_block(dynamic);
  arena->free_block(planned);
}

} // namespace
} // namespace torch_odt::tests
