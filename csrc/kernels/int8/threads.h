// How kernels use threads: through one function of the caller's.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_odt::kernels::int8 {

struct Threads {
  int64_t count = 1;
  // Calls task(context, i) for every i from 0 up to but without `tasks`, which are `count` at most, and returns when all
  // are done; null runs them one after another.
  void (*run)(int64_t tasks, void (*task)(const void* context, int64_t index), const void* context) = nullptr;
  // Of threads that are running already, each of which calls the same function: the one that this is, which does its own
  // part alone. For functions whose parts need nothing of each other's.
  int64_t member = -1;

  // Calls function(thread, begin, end) with a part of `items` for each thread.
  template <typename Function>
  void share(int64_t items, const Function& function) const {
    struct Context {
      const Function* function;
      int64_t items;
      int64_t parts;
    };
    const Context context{&function, items, std::max<int64_t>(1, std::min(count, items))};
    const auto task = [](const void* place, int64_t index) {
      const auto& [body, all, parts] = *static_cast<const Context*>(place);
      (*body)(index, all * index / parts, all * (index + 1) / parts);
    };
    if (member >= 0) {
      if (member < context.parts) {
        task(&context, member);
      }
      return;
    }
    if (context.parts == 1 || run == nullptr) {
      for (int64_t index = 0; index < context.parts; ++index) {
        task(&context, index);
      }
      return;
    }
    run(context.parts, task, &context);
  }
};

} // namespace torch_odt::kernels::int8
