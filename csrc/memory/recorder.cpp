#include "recorder.h"

#include <memory>
#include <stdexcept>

namespace torch_odt::memory {

namespace {

// A pointer of its own, free of constructors, because every allocation of every thread looks at it.
constinit thread_local Recorder* recording = nullptr;

struct Slot {
  std::unique_ptr<Recorder> recorder;
  ~Slot() {
    recording = nullptr;
  }
};
thread_local Slot slot;

} // namespace

void Recorder::on_alloc(const void* address, int64_t bytes) {
  const auto ordinal = static_cast<int64_t>(addresses_.size());
  addresses_.push_back(address);
  live_[address] = ordinal;
  events_.push_back({true, ordinal, bytes});
}

void Recorder::on_free(const void* address, int64_t bytes) {
  int64_t ordinal = -1;
  if (const auto entry = live_.find(address); entry != live_.end()) {
    ordinal = entry->second;
    live_.erase(entry);
  }
  events_.push_back({false, ordinal, bytes});
}

void record_begin() {
  if (recording != nullptr) {
    throw std::runtime_error("this thread is already recording its allocations: call record_end() first");
  }
  slot.recorder = std::make_unique<Recorder>();
  recording = slot.recorder.get();
}

std::vector<Event> record_end() {
  if (recording == nullptr) {
    throw std::runtime_error("this thread is not recording its allocations: call record_begin() first");
  }
  recording = nullptr;
  return slot.recorder->events();
}

std::vector<const void*> record_addresses() {
  if (!slot.recorder) {
    throw std::runtime_error("this thread has not recorded any allocations: call record_begin() first");
  }
  return slot.recorder->addresses();
}

Recorder* current_recorder() {
  return recording;
}

} // namespace torch_odt::memory
