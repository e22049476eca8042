// The C library's thresholds: a program of its own, because sanitizers bring an allocator of their own.

#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <malloc.h>
#endif

#include "../../memory/heap.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

#if defined(__GLIBC__)

constexpr size_t kMiB = 1 << 20;

bool has_mapping_of_its_own(size_t bytes) {
  const size_t before = mallinfo2().hblks;
  // Volatile, because compilers leave out blocks that nobody uses.
  void* volatile block = std::malloc(bytes);
  const bool result = mallinfo2().hblks > before;
  std::free(block);
  return result;
}

// Left alone, the C library would take the first block's size for a new threshold.
TEST(a_large_block_that_was_freed_does_not_keep_the_next_one_in_the_heap) {
  CHECK(memory::tune_malloc());
  CHECK(has_mapping_of_its_own(16 * kMiB));
  CHECK(has_mapping_of_its_own(16 * kMiB));
}

TEST(trimming_returns_pages_between_blocks) {
  void* const below = std::malloc(128 * 1024);
  std::memset(below, 1, 128 * 1024);
  void* const above = std::malloc(1024);
  std::free(below);
  CHECK(memory::trim());
  std::free(above);
}

#else

TEST(other_libraries_have_no_thresholds) {
  CHECK(!memory::tune_malloc());
  CHECK(!memory::trim());
}

#endif

} // namespace
} // namespace torch_odt::tests
