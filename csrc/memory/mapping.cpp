#include "mapping.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace torch_odt::memory {

namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Phantom {
  std::mutex mutex;
  Mapping* newest = nullptr;
};

Phantom& phantom() {
  static auto* const instance = new Phantom;
  return *instance;
}

// Sizes next to the largest number would overflow; the system refuses the largest number of whole pages as it is.
int64_t whole_pages(int64_t bytes) {
  const int64_t most = std::numeric_limits<int64_t>::max() - page_bytes() + 1;
  return round_up(std::clamp<int64_t>(bytes, 1, most), page_bytes());
}

[[noreturn]] void refuse(int64_t bytes) {
  throw std::runtime_error(
      "cannot reserve " + std::to_string(bytes) + " bytes of address space: " + std::strerror(errno));
}

} // namespace

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + (multiple - 1)) / multiple * multiple;
}

Mapping::Mapping(int64_t bytes, Access access) : base_(nullptr), bytes_(whole_pages(bytes)) {
  const int protection = access == Access::none ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* const address = mmap(nullptr, static_cast<size_t>(bytes_), protection, kFlags, -1, 0);
  if (address == MAP_FAILED) {
    refuse(bytes_);
  }
  base_ = static_cast<char*>(address);
#if defined(MADV_HUGEPAGE)
  // A step sweeps over the whole arena again and again: with small pages, misses of the TLB show in its time.
  if (access != Access::none) {
    madvise(address, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  }
#endif
}

Mapping::~Mapping() {
  munmap(base_, static_cast<size_t>(bytes_));
}

void Mapping::populate(int64_t begin, int64_t end) {
#if defined(MADV_POPULATE_WRITE)
  const int64_t first = begin / page_bytes() * page_bytes();
  if (madvise(base_ + first, static_cast<size_t>(round_up(end, page_bytes()) - first), MADV_POPULATE_WRITE) == 0) {
    return;
  }
#endif
  // A change of nothing is a write to the system; atomic, for another thread may write into a block there.
  for (int64_t offset = begin; offset < end; offset += page_bytes()) {
    __atomic_fetch_or(base_ + offset, char{0}, __ATOMIC_RELAXED);
  }
}

void Mapping::discard(int64_t begin, int64_t end) {
  const int64_t first = round_up(begin, page_bytes());
  const auto length = static_cast<size_t>(round_up(end, page_bytes()) - first);
#if defined(__linux__)
  madvise(base_ + first, length, MADV_DONTNEED);
#else
  // Elsewhere MADV_DONTNEED is only a hint, while mapping afresh over the same place always frees.
  mmap(base_ + first, length, PROT_READ | PROT_WRITE, kFlags | MAP_FIXED, -1, 0);
#endif
}

bool Mapping::resize(int64_t bytes) {
  const int64_t wanted = whole_pages(bytes);
#if defined(__linux__)
  void* const address = mremap(base_, static_cast<size_t>(bytes_), static_cast<size_t>(wanted), MREMAP_MAYMOVE);
  if (address == MAP_FAILED) {
    refuse(wanted);
  }
  base_ = static_cast<char*>(address);
  bytes_ = wanted;
  return true;
#else
  Mapping other(wanted, Access::read_write);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return false;
#endif
}

uintptr_t phantom_address(int64_t bytes) {
  if (bytes < 0) {
    throw std::invalid_argument("a phantom cannot have " + std::to_string(bytes) + " bytes");
  }
  Phantom& state = phantom();
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.newest == nullptr || state.newest->bytes() < bytes) {
    // Doubling bounds the address space of the outgrown mappings, which tensors may still point into.
    const int64_t grown = state.newest == nullptr ? int64_t{1} << 30 : 2 * state.newest->bytes();
    state.newest = new Mapping(std::max(bytes, grown), Mapping::Access::none);
  }
  return reinterpret_cast<uintptr_t>(state.newest->base());
}

void lock_phantom() {
  phantom().mutex.lock();
}

void unlock_phantom() {
  phantom().mutex.unlock();
}

} // namespace torch_odt::memory
