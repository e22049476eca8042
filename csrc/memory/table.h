// The side table: which addresses are ours, and what they are.
//
// Sizes live here and not in a header in front of the block, because blocks cross over: one that the default allocator
// made can be freed through ours and the other way round, whenever the allocator is swapped while it lives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "counters.h"

namespace torch_odt::memory {

class ArenaCore;

struct Block {
  int64_t bytes;
  ArenaCore* arena; // null for an ordinary block
  Category category;
};

class BlockTable {
 public:
  // Returns the block that was listed under this address, if there was one. That one is stale: somebody freed it
  // behind our back, and its bytes have to leave the count.
  std::optional<Block> insert(const void* address, const Block& block);
  std::optional<Block> remove(const void* address);
  // Returns the block as it was before, or nothing for an unknown address.
  std::optional<Block> retag(const void* address, Category category);

  void lock_all();
  void unlock_all();

 private:
  static constexpr size_t kShards = 64;

  struct alignas(64) Shard {
    std::mutex mutex;
    std::unordered_map<const void*, Block> blocks;
  };

  Shard& shard_of(const void* address);

  std::array<Shard, kShards> shards_;
};

} // namespace torch_odt::memory
