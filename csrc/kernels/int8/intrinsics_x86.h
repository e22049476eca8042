// The vector instructions of x86 by name.
#pragma once

// GCC's headers let a result begin as whatever is in a register, and GCC's own warning stumbles over that.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
