// What one thread's recording writes down.

#include <stdexcept>

#include "../../memory/recorder.h"
#include "../check.h"
#include "threads.h"

namespace torch_odt::tests {
namespace {

using memory::Event;

void check_event(const Event& event, bool is_alloc, int64_t ordinal, int64_t bytes) {
  CHECK_EQUAL(event.is_alloc, is_alloc);
  CHECK_EQUAL(event.ordinal, ordinal);
  CHECK_EQUAL(event.bytes, bytes);
}

TEST(a_recording_numbers_allocations_and_names_them_when_they_are_freed) {
  const char memory[3] = {};
  memory::record_begin();
  memory::Recorder* const recorder = memory::current_recorder();
  recorder->on_alloc(&memory[0], 10);
  recorder->on_alloc(&memory[1], 20);
  recorder->on_free(&memory[0], 10);
  recorder->on_free(&memory[2], 30);
  recorder->on_alloc(&memory[0], 40);
  recorder->on_free(&memory[0], 40);
  // Another thread may have allocated there since.
  recorder->on_free(&memory[0], 50);
  const std::vector<Event> events = memory::record_end();
  CHECK_EQUAL(events.size(), 7u);
  check_event(events[0], true, 0, 10);
  check_event(events[1], true, 1, 20);
  check_event(events[2], false, 0, 10);
  check_event(events[3], false, -1, 30);
  check_event(events[4], true, 2, 40);
  check_event(events[5], false, 2, 40);
  check_event(events[6], false, -1, 50);
  const std::vector<const void*> addresses = memory::record_addresses();
  CHECK_EQUAL(addresses.size(), 3u);
  CHECK(addresses[0] == &memory[0] && addresses[1] == &memory[1] && addresses[2] == &memory[0]);
}

TEST(recordings_begin_and_end_in_turn) {
  CHECK(memory::current_recorder() == nullptr);
  CHECK_THROWS(std::runtime_error, memory::record_end());
  memory::record_begin();
  CHECK_THROWS(std::runtime_error, memory::record_begin());
  CHECK(memory::record_end().empty());
  CHECK(memory::current_recorder() == nullptr);
  CHECK_THROWS(std::runtime_error, memory::record_end());
}

TEST(every_thread_has_its_own_recording) {
  memory::record_begin();
  run_together(2, [](int index) {
    CHECK(memory::current_recorder() == nullptr);
    CHECK_THROWS(std::runtime_error, memory::record_addresses());
    memory::record_begin();
    for (int i = 0; i <= index; ++i) {
      memory::current_recorder()->on_alloc(&index + i, i);
    }
    CHECK_EQUAL(static_cast<int>(memory::record_end().size()), index + 1);
    // Left open: the thread's end closes it.
    memory::record_begin();
  });
  CHECK(memory::record_end().empty());
}

} // namespace
} // namespace torch_odt::tests
