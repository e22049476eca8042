// What tests of arenas share: blocks as the allocator asks for them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../../memory/arena.h"
#include "../check.h"

namespace torch_odt::tests {

using memory::ArenaCore;
using memory::Place;
using memory::PlaceTable;

inline constexpr int64_t kKiB = 1024;

// Null where the calling thread's plan has no place; the block's owner has to be the arena otherwise.
inline char* serve(const ArenaCore* arena, int64_t bytes) {
  ArenaCore* owner = nullptr;
  void* const address = memory::arena_serve(bytes, &owner);
  CHECK(owner == (address == nullptr ? nullptr : arena));
  return static_cast<char*>(address);
}

// A table of one list of places per instruction.
inline PlaceTable table_of(const std::vector<std::vector<Place>>& instructions) {
  PlaceTable table;
  table.starts.push_back(0);
  for (const std::vector<Place>& places : instructions) {
    table.places.insert(table.places.end(), places.begin(), places.end());
    table.starts.push_back(static_cast<int64_t>(table.places.size()));
  }
  return table;
}

inline std::shared_ptr<ArenaCore> arena_with(const std::vector<std::vector<Place>>& instructions) {
  std::shared_ptr<ArenaCore> arena = ArenaCore::create(64 * kKiB);
  arena->select(arena->load(table_of(instructions)));
  return arena;
}

} // namespace torch_odt::tests
