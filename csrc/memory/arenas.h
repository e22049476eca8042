// All arenas of the process: what an ordinary allocation makes give way, and what a fork locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "arena.h"

namespace torch_odt::memory {

struct Registry {
  std::mutex mutex;
  std::vector<ArenaCore*> arenas;
};

// Never destroyed: tensors are freed until the very end of the process.
Registry& registry();

inline std::atomic<int64_t> total_resident{0};
inline std::atomic<int64_t> total_live_blocks{0};

// Expects the registry to be locked.
void update_yield_limit();

} // namespace torch_odt::memory
