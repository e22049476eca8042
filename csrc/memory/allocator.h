// The allocator that torch calls for every CPU tensor while it is installed.
#pragma once

#include <cstdint>

#include "counters.h"
#include "refusals.h"

namespace torch_odt::memory {

// Both return whether anything changed. uninstall() refuses while arena blocks live: were they freed through the
// default allocator, it would hand addresses in the middle of a mapping to free().
bool install();
bool uninstall();
bool is_installed();

Counters& counters();
Refusals& refusals();

// The category that the calling thread's allocations are counted under; returns the one before.
int set_category(int category);
// Moves a live block to another category; false if the address is not the start of a block that is tracked.
bool tag(uintptr_t address, int category);
// Bounds the live tracked bytes, kUnlimited for none; returns the bound before.
int64_t set_cap(int64_t bytes);

} // namespace torch_odt::memory
