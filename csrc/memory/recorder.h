// Writes down what one thread allocates and frees, in order.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch_odt::memory {

struct Event {
  bool is_alloc;
  int64_t ordinal; // -1: freed here, allocated before the recording began
  int64_t bytes;
};

class Recorder {
 public:
  void on_alloc(const void* address, int64_t bytes);
  void on_free(const void* address, int64_t bytes);

  const std::vector<Event>& events() const {
    return events_;
  }
  const std::vector<const void*>& addresses() const {
    return addresses_;
  }

 private:
  std::vector<Event> events_;
  std::vector<const void*> addresses_;
  std::unordered_map<const void*, int64_t> live_;
};

void record_begin();
std::vector<Event> record_end();
std::vector<const void*> record_addresses();

// Null unless this thread is recording.
Recorder* current_recorder();

} // namespace torch_odt::memory
