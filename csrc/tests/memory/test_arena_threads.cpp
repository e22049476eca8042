// Arenas under several threads: plans of their own, blocks that one serves and another frees, and the fork's locks.

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "arenas.h"
#include "threads.h"

namespace torch_odt::tests {
namespace {

TEST(threads_replay_instructions_of_one_plan) {
  const auto arena = arena_with({{{0, kKiB}, {kKiB, kKiB}}, {{8 * kKiB, kKiB}, {9 * kKiB, kKiB}}, {}});
  run_together(2, [&](int thread) {
    for (int step = 0; step < 500; ++step) {
      arena->begin(thread);
      char* const first = serve(arena.get(), kKiB);
      char* const second = serve(arena.get(), kKiB);
      CHECK(first != nullptr && second == first + kKiB);
      std::memset(first, thread, kKiB);
      std::memset(second, thread, kKiB);
      arena->end();
      arena->free_block(first);
      arena->free_block(second);
    }
  });
  CHECK_EQUAL(arena->stats().hits, 2000);
  CHECK_EQUAL(arena->stats().live_blocks, 0);
}

TEST(the_last_block_is_freed_by_another_thread) {
  for (int round = 0; round < 100; ++round) {
    auto arena = arena_with({{{0, kKiB}, {kKiB, kKiB}}});
    const std::weak_ptr<ArenaCore> watched = arena;
    ArenaCore* const core = arena.get();
    arena->begin(0);
    char* const blocks[] = {serve(core, kKiB), serve(core, kKiB)};
    arena->end();
    arena.reset();
    run_together(2, [&](int thread) { core->free_block(blocks[thread]); });
    CHECK(watched.expired());
  }
  CHECK_EQUAL(memory::arena_live_blocks(), 0);
}

TEST(arenas_come_go_and_give_way_together) {
  run_together(3, [](int thread) {
    for (int round = 0; round < 200; ++round) {
      const auto arena = ArenaCore::create(64 * kKiB);
      arena->set_yield_limit(thread * kKiB);
      arena->set_dynamic(true, -1);
      char* const block = serve(arena.get(), 16 * kKiB);
      std::memset(block, thread, 16 * kKiB);
      arena->leave_thread();
      memory::arenas_give_way(32 * kKiB);
      CHECK_EQUAL(static_cast<int>(block[16 * kKiB - 1]), thread);
      arena->free_block(block);
      memory::arenas_give_way(32 * kKiB);
      CHECK(arena->stats().yields >= 1);
    }
  });
  CHECK_EQUAL(memory::arena_totals().reserved_bytes, 0);
}

TEST(locked_arenas_let_nobody_in) {
  const auto arena = arena_with({{{0, kKiB}}});
  std::atomic<bool> is_in{false};
  memory::lock_arenas();
  std::thread other([&] {
    arena->begin(0);
    is_in = true;
    arena->end();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!is_in);
  memory::unlock_arenas();
  other.join();
  CHECK(is_in.load());
}

} // namespace
} // namespace torch_odt::tests
