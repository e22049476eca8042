// Address space from the system: its size, its lifetime, pages that are given back, and phantoms.

#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include <sys/mman.h>
#include <unistd.h>

#include "../../memory/mapping.h"
#include "../check.h"
#include "threads.h"

// A phantom that was outgrown stays mapped without an owner, on purpose.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:torch_odt::memory::phantom_address";
}

namespace torch_odt::tests {
namespace {

using memory::Mapping;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

bool is_mapped(const void* address) {
  return msync(const_cast<void*>(address), 1, MS_ASYNC) == 0;
}

bool is_resident(void* page) {
  unsigned char found = 0;
  CHECK_EQUAL(mincore(page, 1, &found), 0);
  return (found & 1) != 0;
}

// A system call says of memory that cannot be read what a read of our own would die of.
bool is_readable(const void* address) {
  int ends[2];
  if (pipe(ends) != 0) {
    throw std::runtime_error("no pipe");
  }
  const bool result = write(ends[1], address, 1) == 1;
  CHECK(result || errno == EFAULT);
  close(ends[0]);
  close(ends[1]);
  return result;
}

TEST(sizes_are_rounded_up_to_pages) {
  const int64_t page = memory::page_bytes();
  CHECK_EQUAL(memory::round_up(0, 64), 0);
  CHECK_EQUAL(memory::round_up(1, 64), 64);
  CHECK_EQUAL(memory::round_up(64, 64), 64);
  CHECK_EQUAL(Mapping(0, Mapping::Access::read_write).bytes(), page);
  CHECK_EQUAL(Mapping(page, Mapping::Access::read_write).bytes(), page);
  CHECK_EQUAL(Mapping(page + 1, Mapping::Access::read_write).bytes(), 2 * page);
}

TEST(a_mapping_lives_as_long_as_its_object) {
  auto mapping = std::make_unique<Mapping>(3 * memory::page_bytes(), Mapping::Access::read_write);
  char* const base = mapping->base();
  char* const last = base + mapping->bytes() - 1;
  *base = 1;
  *last = 2;
  CHECK_EQUAL(*base + *last, 3);
  CHECK(is_mapped(base));
  mapping.reset();
  CHECK(!is_mapped(base));
}

TEST(discarded_pages_read_as_zero_and_the_rest_stays) {
  const int64_t page = memory::page_bytes();
  const Mapping kept(3 * page, Mapping::Access::read_write);
  Mapping mapping(3 * page, Mapping::Access::read_write);
  std::memset(mapping.base(), 7, static_cast<size_t>(mapping.bytes()));
  mapping.discard(0, page + 1);
  CHECK_EQUAL(mapping.base()[0], 0);
  CHECK_EQUAL(mapping.base()[2 * page - 1], 0);
  CHECK_EQUAL(mapping.base()[2 * page], 7);
  mapping.base()[0] = 9;
  CHECK_EQUAL(mapping.base()[0], 9);
  mapping.discard(1, 3 * page);
  CHECK_EQUAL(mapping.base()[0], 9);
  CHECK_EQUAL(mapping.base()[2 * page], 0);
}

TEST(populated_pages_are_resident_and_what_is_in_them_stays) {
  const int64_t page = memory::page_bytes();
  Mapping mapping(2 * memory::kHugePageBytes, Mapping::Access::read_write);
  mapping.base()[2 * page] = 7;
  mapping.populate(2 * page - 1, memory::kHugePageBytes);
  CHECK_EQUAL(mapping.base()[2 * page], 7);
  for (int64_t offset = page; offset < memory::kHugePageBytes; offset += page) {
    CHECK(is_resident(mapping.base() + offset));
  }
  // What follows may be a part of a page as large as these.
  mapping.discard(memory::kHugePageBytes, mapping.bytes());
  CHECK(!is_resident(mapping.base() + mapping.bytes() - page));
}

TEST(a_resized_mapping_has_its_pages) {
  const int64_t page = memory::page_bytes();
  Mapping mapping(3 * page, Mapping::Access::read_write);
  mapping.base()[page] = 7;
  const bool have_stayed = mapping.resize(4 * memory::kHugePageBytes);
  CHECK_EQUAL(mapping.bytes(), 4 * memory::kHugePageBytes);
  CHECK_EQUAL(mapping.base()[page], have_stayed ? 7 : 0);
  CHECK_EQUAL(mapping.base()[mapping.bytes() - 1], 0);
  mapping.resize(page + 1);
  CHECK_EQUAL(mapping.bytes(), 2 * page);
  CHECK_EQUAL(mapping.base()[page], have_stayed ? 7 : 0);
  CHECK_THROWS(std::runtime_error, mapping.resize(int64_t{1} << 62));
  CHECK_EQUAL(mapping.bytes(), 2 * page);
  CHECK(is_mapped(mapping.base()));
}

TEST(impossible_sizes_are_refused) {
  for (const int64_t bytes : {int64_t{1} << 62, kMost - 4096, kMost - 1, kMost}) {
    const Context here(std::to_string(bytes) + " bytes");
    CHECK_THROWS(std::runtime_error, Mapping(bytes, Mapping::Access::none));
    CHECK_THROWS(std::runtime_error, memory::phantom_address(bytes));
  }
  CHECK_THROWS(std::invalid_argument, memory::phantom_address(-1));
}

TEST(phantoms_share_an_address_and_stay_when_they_are_outgrown) {
  const uintptr_t small = memory::phantom_address(1);
  CHECK_EQUAL(memory::phantom_address(int64_t{1} << 30), small);
  const uintptr_t large = memory::phantom_address((int64_t{1} << 30) + 1);
  CHECK(large != small);
  CHECK_EQUAL(memory::phantom_address(int64_t{2} << 30), large);
  CHECK_EQUAL(memory::phantom_address(0), large);
  for (const uintptr_t address : {small, large}) {
    const auto* const phantom = reinterpret_cast<const void*>(address);
    CHECK(is_mapped(phantom));
    CHECK(!is_readable(phantom));
  }
  CHECK(is_readable(&small));
}

TEST(threads_get_one_phantom) {
  std::vector<uintptr_t> addresses(4);
  run_together(4, [&](int index) { addresses[static_cast<size_t>(index)] = memory::phantom_address(index); });
  for (const uintptr_t address : addresses) {
    CHECK_EQUAL(address, addresses[0]);
  }
}

} // namespace
} // namespace torch_odt::tests
