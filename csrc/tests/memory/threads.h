// Threads that start together, so that they meet where a test wants them to.
#pragma once

#include <barrier>
#include <thread>
#include <vector>

namespace torch_odt::tests {

// Calls function(0) to function(count - 1), each on a thread of its own, and waits for all of them.
template <typename Function>
void run_together(int count, const Function& function) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      start.arrive_and_wait();
      function(index);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

} // namespace torch_odt::tests
