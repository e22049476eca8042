// The side table of addresses: what it returns, and that threads lose and invent no block.

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "../../memory/table.h"
#include "../check.h"
#include "threads.h"

namespace torch_odt::tests {
namespace {

using memory::Block;
using memory::BlockTable;
using memory::Category;

const void* address_of(int64_t index) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(0x10000 + 64 * index));
}

TEST(a_block_is_found_under_its_address_until_it_is_removed) {
  BlockTable table;
  CHECK(!table.insert(address_of(1), {100, nullptr, Category::gradient}));
  CHECK(!table.remove(address_of(2)));
  CHECK(!table.retag(address_of(2), Category::other));
  const std::optional<Block> before = table.retag(address_of(1), Category::optimizer);
  CHECK(before && before->category == Category::gradient);
  const std::optional<Block> removed = table.remove(address_of(1));
  CHECK(removed && removed->bytes == 100 && removed->category == Category::optimizer);
  CHECK(!table.remove(address_of(1)));
}

TEST(an_address_that_is_used_again_returns_its_stale_block) {
  BlockTable table;
  table.insert(address_of(1), {100, nullptr, Category::gradient});
  const std::optional<Block> stale = table.insert(address_of(1), {200, nullptr, Category::other});
  CHECK(stale && stale->bytes == 100 && stale->category == Category::gradient);
  const std::optional<Block> removed = table.remove(address_of(1));
  CHECK(removed && removed->bytes == 200 && removed->category == Category::other);
}

TEST(threads_find_their_own_blocks) {
  constexpr int64_t kBlocks = 2000;
  BlockTable table;
  run_together(4, [&](int thread) {
    for (int round = 0; round < 2; ++round) {
      for (int64_t i = 0; i < kBlocks; ++i) {
        CHECK(!table.insert(address_of(4 * i + thread), {i, nullptr, Category::other}));
      }
      for (int64_t i = 0; i < kBlocks; ++i) {
        CHECK(table.retag(address_of(4 * i + thread), Category::workspace).has_value());
      }
      for (int64_t i = 0; i < kBlocks; ++i) {
        const std::optional<Block> block = table.remove(address_of(4 * i + thread));
        CHECK(block && block->bytes == i && block->category == Category::workspace);
      }
    }
  });
}

TEST(of_threads_that_remove_one_block_a_single_one_gets_it) {
  constexpr int64_t kBlocks = 4000;
  BlockTable table;
  for (int64_t i = 0; i < kBlocks; ++i) {
    table.insert(address_of(i), {1, nullptr, Category::other});
  }
  std::atomic<int64_t> removed{0};
  run_together(4, [&](int) {
    for (int64_t i = 0; i < kBlocks; ++i) {
      removed += table.remove(address_of(i)).has_value() ? 1 : 0;
    }
  });
  CHECK_EQUAL(removed.load(), kBlocks);
}

TEST(a_locked_table_lets_nobody_in) {
  BlockTable table;
  std::atomic<bool> is_in{false};
  table.lock_all();
  std::thread other([&] {
    table.insert(address_of(1), {1, nullptr, Category::other});
    is_in = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!is_in);
  table.unlock_all();
  other.join();
  CHECK(is_in.load());
}

} // namespace
} // namespace torch_odt::tests
