#include "table.h"

#include <utility>

namespace torch_odt::memory {

BlockTable::Shard& BlockTable::shard_of(const void* address) {
  // Blocks are 64-byte aligned and large ones start at page boundaries, so the low bits alone would pile them up.
  const auto bits = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address)) >> 6;
  return shards_[(bits * 0x9E3779B97F4A7C15ULL) >> 58];
}

std::optional<Block> BlockTable::insert(const void* address, const Block& block) {
  Shard& shard = shard_of(address);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto [entry, is_new] = shard.blocks.try_emplace(address, block);
  if (is_new) {
    return std::nullopt;
  }
  return std::exchange(entry->second, block);
}

std::optional<Block> BlockTable::remove(const void* address) {
  Shard& shard = shard_of(address);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto entry = shard.blocks.find(address);
  if (entry == shard.blocks.end()) {
    return std::nullopt;
  }
  const Block block = entry->second;
  shard.blocks.erase(entry);
  return block;
}

std::optional<Block> BlockTable::retag(const void* address, Category category) {
  Shard& shard = shard_of(address);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto entry = shard.blocks.find(address);
  if (entry == shard.blocks.end()) {
    return std::nullopt;
  }
  const Block before = entry->second;
  entry->second.category = category;
  return before;
}

void BlockTable::lock_all() {
  for (Shard& shard : shards_) {
    shard.mutex.lock();
  }
}

void BlockTable::unlock_all() {
  for (Shard& shard : shards_) {
    shard.mutex.unlock();
  }
}

} // namespace torch_odt::memory
