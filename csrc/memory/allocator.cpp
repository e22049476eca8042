#include "allocator.h"

#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include "arena.h"
#include "recorder.h"
#include "table.h"

namespace torch_odt::memory {

namespace {

// Above the default allocator's 0, so that a later registration at the default priority does not push this one out.
constexpr uint8_t kPriority = 64;

constinit thread_local Category category_here = Category::other;

// Neither is ever destroyed: tensors are freed until the very end of the process.
BlockTable& table() {
  static auto* const instance = new BlockTable;
  return *instance;
}

void forget(const Block& block) {
  Counters& count = counters();
  count.allocated.subtract(block.bytes);
  count.of(block.category).subtract(block.bytes);
  if (block.arena == nullptr) {
    count.outside.subtract(block.bytes);
  }
}

Category checked_category(int category) {
  if (category < 0 || category >= kCategoryCount) {
    throw std::invalid_argument(
        "category " + std::to_string(category) + " is not between 0 and " + std::to_string(kCategoryCount - 1));
  }
  return static_cast<Category>(category);
}

std::string in_mib(int64_t bytes) {
  std::string text = std::to_string(static_cast<double>(bytes) / (1 << 20));
  return text.substr(0, text.find('.') + 2) + " MiB";
}

void release(void* address) {
  if (address == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(address);
  // Out of the table before it goes back to the heap: from then on another thread may be given the same address.
  const std::optional<Block> block = table().remove(address);
  if (Recorder* recorder = current_recorder()) {
    recorder->on_free(address, block ? block->bytes : 0);
  }
  if (block && block->arena != nullptr) {
    block->arena->free_block(address);
  } else {
    // An address that the table does not know came from the default allocator before this one was installed.
    c10::free_cpu(address);
  }
  if (block) {
    forget(*block);
  }
}

class TrackingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* const address = size == 0 ? nullptr : allocate_block(size);
    // The context is the data pointer itself, which is what makes raw_allocate() and raw_deallocate() legal.
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }

  // oneDNN's bridge frees through whatever allocator is current, so there has to be one.
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static void* allocate_block(size_t size) {
    // Half, so that adding it to what lives cannot overflow.
    if (size > static_cast<size_t>(std::numeric_limits<int64_t>::max() / 2)) {
      return c10::alloc_cpu(size); // raises torch's own error for an impossible size
    }
    const auto bytes = static_cast<int64_t>(size);
    Counters& count = counters();
    refuse_if_asked(bytes);
    reserve_under_cap(bytes);

    ArenaCore* arena = nullptr;
    void* address = nullptr;
    const Category category = category_here;
    try {
      address = arena_serve(bytes, &arena);
      if (address == nullptr) {
        arenas_give_way(count.outside.live() + bytes);
        address = c10::alloc_cpu(size);
      }
    } catch (const ArenaFull& full) {
      count.allocated.subtract(bytes);
      refusals().note();
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "torch_odt: an allocation of ",
          in_mib(bytes),
          " does not fit into the ",
          in_mib(full.limit_bytes),
          " of the arena that are allowed here");
    } catch (...) {
      count.allocated.subtract(bytes);
      refusals().note();
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      throw;
    }

    count.allocated.confirm();
    count.of(category).add(bytes);
    if (arena == nullptr) {
      count.outside.add(bytes);
    }
    count.allocation_count.fetch_add(1, std::memory_order_relaxed);
    if (const std::optional<Block> stale = table().insert(address, {bytes, arena, category})) {
      forget(*stale);
    }
    if (Recorder* recorder = current_recorder()) {
      recorder->on_alloc(address, bytes);
    }
    c10::profiledCPUMemoryReporter().New(address, size);
    return address;
  }

  static void refuse_if_asked(int64_t bytes) {
    if (refusals().refuses_next()) {
      refusals().note();
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "torch_odt: an allocation of ", in_mib(bytes), " is refused, as was asked for");
    }
  }

  static void reserve_under_cap(int64_t bytes) {
    Counters& count = counters();
    const int64_t cap = count.cap_bytes.load(std::memory_order_relaxed);
    if (count.allocated.try_reserve(bytes, cap)) {
      return;
    }
    refusals().note();
    c10::profiledCPUMemoryReporter().OutOfMemory(static_cast<size_t>(bytes));
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "torch_odt: an allocation of ",
        in_mib(bytes),
        " would pass the memory cap of ",
        in_mib(cap),
        " (",
        in_mib(count.allocated.live()),
        " are allocated)");
  }
};

TrackingAllocator& tracker() {
  static auto* const instance = new TrackingAllocator;
  return *instance;
}

c10::Allocator* replaced = nullptr;

// A fork copies the locks as they are, held ones included, but only the thread that forked. So it takes them all first.
// The order is that of nested use: arenas before shards.
void before_fork() {
  lock_phantom();
  lock_arenas();
  table().lock_all();
}

void after_fork() {
  table().unlock_all();
  unlock_arenas();
  unlock_phantom();
}

} // namespace

Counters& counters() {
  static auto* const instance = new Counters;
  return *instance;
}

Refusals& refusals() {
  static auto* const instance = new Refusals;
  return *instance;
}

bool install() {
  static std::once_flag prepared;
  std::call_once(prepared, [] { pthread_atfork(&before_fork, &after_fork, &after_fork); });
  c10::Allocator* const current = c10::GetCPUAllocator();
  if (current == &tracker()) {
    return false;
  }
  c10::SetCPUAllocator(&tracker(), kPriority);
  if (!is_installed()) {
    throw std::runtime_error("another CPU allocator of a higher priority is installed");
  }
  replaced = current;
  return true;
}

bool uninstall() {
  if (!is_installed()) {
    return false;
  }
  if (const int64_t blocks = arena_live_blocks(); blocks > 0) {
    throw std::runtime_error(
        "the tracking allocator cannot be uninstalled while " + std::to_string(blocks) +
        " blocks live in an arena: free the tensors that a planned step produced first");
  }
  c10::SetCPUAllocator(replaced, kPriority);
  return true;
}

bool is_installed() {
  return c10::GetCPUAllocator() == &tracker();
}

int set_category(int category) {
  const Category before = category_here;
  category_here = checked_category(category);
  return static_cast<int>(before);
}

bool tag(uintptr_t address, int category) {
  const Category wanted = checked_category(category);
  const std::optional<Block> before = table().retag(reinterpret_cast<const void*>(address), wanted);
  if (!before) {
    return false;
  }
  counters().of(before->category).subtract(before->bytes);
  counters().of(wanted).add(before->bytes);
  return true;
}

int64_t set_cap(int64_t bytes) {
  return counters().cap_bytes.exchange(bytes < 0 ? kUnlimited : bytes, std::memory_order_relaxed);
}

} // namespace torch_odt::memory
