// The arena as Python owns it.
#pragma once

#include <memory>

#include "arena.h"

namespace torch_odt::memory {

// The core outlives it while blocks are left.
class Arena {
 public:
  explicit Arena(int64_t reserve_bytes) : core(ArenaCore::create(reserve_bytes)) {}
  ~Arena() {
    core->leave_thread();
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const std::shared_ptr<ArenaCore> core;
};

} // namespace torch_odt::memory
