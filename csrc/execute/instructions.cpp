#include "instructions.h"

#include <stdexcept>
#include <string>
#include <tuple>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include "../memory/python_arena.h"
#include "held.h"
#include "tensors.h"

namespace torch_odt::execute {

namespace {

// An instruction's allocations, also where it ends by an exception.
class InArena {
 public:
  InArena(memory::ArenaCore* arena, int64_t instruction) : arena_(arena) {
    if (arena_ != nullptr) {
      arena_->begin(instruction);
    }
  }
  ~InArena() {
    if (arena_ != nullptr) {
      arena_->end();
    }
  }
  InArena(const InArena&) = delete;
  InArena& operator=(const InArena&) = delete;

 private:
  memory::ArenaCore* const arena_;
};

void deliver(PyObject* table, int64_t value, const py::object& output, const py::object& receiver) {
  require_values(table, value);
  const py::object tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(table, value));
  if (tensor.is_none()) {
    throw std::runtime_error("the schedule delivers a value that is not in memory");
  }
  receiver.attr("deliver")(output, tensor);
}

// Null while it is being made.
Instructions* instructions_in(PyObject* self) {
  const py::detail::value_and_holder held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return held.holder_constructed() ? held.value_ptr<Instructions>() : nullptr;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Instructions* const found = instructions_in(self);
  return found == nullptr ? 0 : found->traverse(visit, arg);
}

int clear(PyObject* self) {
  if (Instructions* const found = instructions_in(self)) {
    found->clear();
  }
  return 0;
}

void let_collector_follow(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = traverse;
  type->ht_type.tp_clear = clear;
}

void drop(PyObject* table, int64_t value) {
  require_values(table, value);
  Py_INCREF(Py_None);
  PyList_SetItem(table, value, Py_None);
}

} // namespace

Instructions::Instructions(const py::list& code) {
  instructions_.reserve(code.size());
  for (const py::handle& each : code) {
    auto [call, value, output] = each.cast<std::tuple<py::object, int64_t, py::object>>();
    const OperatorCall* const native = py::isinstance<OperatorCall>(call) ? call.cast<const OperatorCall*>() : nullptr;
    instructions_.push_back({
        call.is_none() ? py::object() : std::move(call),
        native,
        value,
        output.is_none() ? py::object() : std::move(output),
    });
  }
}

void Instructions::run(
    const py::list& table, const py::object& receiver, int64_t start, int64_t stop, memory::ArenaCore* arena) const {
  for (int64_t i = start; i < stop; ++i) {
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    const Instruction& here = instructions_.at(i);
    if (here.call) {
      const InArena guard(arena, i);
      if (here.native != nullptr) {
        (*here.native)(table.ptr());
      } else {
        here.call(table);
      }
    } else if (here.output) {
      deliver(table.ptr(), here.value, here.output, receiver);
    } else {
      drop(table.ptr(), here.value);
    }
  }
}

int Instructions::traverse(visitproc visit, void* arg) const {
  for (const Instruction& each : instructions_) {
    Py_VISIT(each.call.ptr());
    Py_VISIT(each.output.ptr());
  }
  return 0;
}

void Instructions::clear() {
  // What ends with them may look at this object once more.
  const std::vector<Instruction> ended = std::move(instructions_);
  instructions_.clear();
}

void bind_execution(py::module_& module) {
  py::class_<OperatorCall>(module, "OperatorCall")
      .def(
          py::init([](const std::string& name,
                      const std::string& overload,
                      const py::dict& arguments,
                      const std::vector<std::tuple<std::string, int64_t, int64_t>>& places,
                      const std::vector<std::pair<std::string, at::Tensor>>& numbers,
                      std::vector<int64_t> writes,
                      std::pair<int64_t, int64_t> takes,
                      std::pair<int64_t, int64_t> alike,
                      std::string mark,
                      int64_t category) {
            HANDLE_TH_ERRORS
            return std::make_unique<OperatorCall>(
                name, overload, arguments, places, numbers, std::move(writes), takes, alike, std::move(mark), category);
            END_HANDLE_TH_ERRORS_PYBIND
          }),
          py::arg("name"),
          py::arg("overload"),
          py::arg("arguments"),
          py::arg("places"),
          py::arg("numbers"),
          py::arg("writes"),
          py::arg("takes"),
          py::arg("alike"),
          py::arg("mark"),
          py::arg("category"))
      .def("__call__", [](const OperatorCall& call, const py::list& table) {
        HANDLE_TH_ERRORS
        call(table.ptr());
        END_HANDLE_TH_ERRORS_PYBIND
      });
  py::class_<Instructions>(module, "Instructions", py::custom_type_setup(let_collector_follow))
      .def(py::init<const py::list&>(), py::arg("code"))
      .def(
          "run",
          [](const Instructions& self,
             const py::list& table,
             const py::object& receiver,
             int64_t start,
             int64_t stop,
             memory::Arena* arena) {
            HANDLE_TH_ERRORS
            self.run(table, receiver, start, stop, arena == nullptr ? nullptr : arena->core.get());
            END_HANDLE_TH_ERRORS_PYBIND
          },
          py::arg("table"),
          py::arg("receiver"),
          py::arg("start"),
          py::arg("stop"),
          py::arg("arena").none(true));
  module.def("forms", &forms, py::arg("tensors"), py::arg("addresses"));
  module.def("are_of", &are_of, py::arg("objects"), py::arg("classes"), py::arg("own"));
  module.def("hold", &hold, py::arg("dicts"), py::arg("names"), py::arg("values"), py::arg("empty"));
  module.def("detached", &detached, py::arg("tensors"));
  module.def("note_changed", &note_changed, py::arg("tensors"));
}

} // namespace torch_odt::execute
