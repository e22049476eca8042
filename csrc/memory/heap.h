// The C library's heap: how soon it returns memory to the system.
#pragma once

namespace torch_odt::memory {

// Fixes the thresholds from which blocks get a mapping of their own and the heap's top is given back. Left alone, glibc
// raises both with the largest block freed so far, until hundreds of MiB stay in the heap after a step. False where the
// C library has no such thresholds.
bool tune_malloc();

// Returns the heap's free pages to the system; false if there was nothing to return.
bool trim();

} // namespace torch_odt::memory
