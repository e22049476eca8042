#include "heap.h"

#if defined(__linux__)
#include <malloc.h>
#endif

namespace torch_odt::memory {

#if defined(__GLIBC__)

bool tune_malloc() {
  constexpr int kThreshold = 256 * 1024;
  return mallopt(M_MMAP_THRESHOLD, kThreshold) == 1 && mallopt(M_TRIM_THRESHOLD, kThreshold) == 1;
}

bool trim() {
  return malloc_trim(0) == 1;
}

#else

bool tune_malloc() {
  return false;
}

bool trim() {
  return false;
}

#endif

} // namespace torch_odt::memory
