// A schedule's instructions, run one after another on the values of a table.
#pragma once

#include <cstdint>
#include <vector>

#include <pybind11/pybind11.h>

#include "../memory/arena.h"
#include "operator_call.h"

namespace torch_odt::execute {

// Of `call`, `value` and `output` as Python's executor has them: a call, which is an `OperatorCall` or any other callable
// that takes a table; or a value that is dropped; or one that a receiver gets as an output.
class __attribute__((visibility("hidden"))) Instructions {
 public:
  explicit Instructions(const py::list& code);

  // Those from `start` up to `stop`. With an arena, an instruction's allocations go where its selected table says.
  // Signals are looked for in between, as Python does between its own. What kernels warn of becomes Python's warnings
  // when the run ends.
  void run(const py::list& table, const py::object& receiver, int64_t start, int64_t stop, memory::ArenaCore* arena)
      const;

  // Of Python's collector: calls may lead back to who owns this.
  int traverse(visitproc visit, void* argument) const;
  void clear();

 private:
  struct Instruction {
    py::object call; // null: no call
    const OperatorCall* native; // the same where it is one
    int64_t value;
    py::object output; // null: the value is dropped
  };

  std::vector<Instruction> instructions_;
};

// What Python sees of this folder.
void bind_execution(py::module_& module);

} // namespace torch_odt::execute
