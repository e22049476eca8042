// Address space from the system, without memory behind it until it is touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_odt::memory {

int64_t page_bytes();
int64_t round_up(int64_t value, int64_t multiple);

// A part of a huge page is given back by name only: its memory stays until the system is short of it.
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// One private anonymous mapping.
class Mapping {
 public:
  enum class Access { none, read_write };

  Mapping(int64_t bytes, Access access);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const {
    return base_;
  }
  int64_t bytes() const {
    return bytes_;
  }
  // Makes the pages of a range resident, and leaves what is in them. There must be memory for it: a control group ends
  // the process that goes beyond its limit.
  void populate(int64_t begin, int64_t end);
  // Gives the pages of a range back; they read as zero from then on.
  void discard(int64_t begin, int64_t end);
  // The address may change. Whether the pages have stayed: not every system can take them along.
  bool resize(int64_t bytes);

 private:
  char* base_;
  int64_t bytes_;
};

// The address of at least this many bytes that are reserved and never touched: reading or writing them is a fault.
// Never unmapped, because tensors over it carry no owner.
uintptr_t phantom_address(int64_t bytes);

void lock_phantom();
void unlock_phantom();

} // namespace torch_odt::memory
