// One operator of a graph, ready to be called on the values of a table.
//
// A small operator takes less time than Python does to gather its arguments, to find out what they are for the operator,
// and to put its results away. Here that is done once; a call copies pointers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

namespace torch_odt::execute {

namespace py = pybind11;

// Where a value of the table goes: into an argument, or into an element of an argument that is a list.
struct Place {
  int64_t argument;
  int64_t element; // -1: the argument itself
  int64_t value;
};

// Throws where a table has no such value.
void require_values(PyObject* table, int64_t largest);

class OperatorCall {
 public:
  // `arguments` are all of the schema's that are no defaults, with anything at places. `writes` has the value of each
  // result, -1 where it is dropped; `takes` a value that becomes what another one is after the call, an argument that
  // the operator writes into, or -1. `numbers` are read from tensors of one float64 in each call. Of two arguments that
  // are to lie `alike`, the second is copied where it does not lie as the first. `mark` is the call's name in profiles, if
  // it has one. Results are counted under a category;
  // a negative one leaves them as they are.
  // Throws where an argument is none for the operator, or a result is no tensor.
  OperatorCall(
      const std::string& name,
      const std::string& overload,
      const py::dict& arguments,
      const std::vector<std::tuple<std::string, int64_t, int64_t>>& places,
      const std::vector<std::pair<std::string, at::Tensor>>& numbers,
      std::vector<int64_t> writes,
      std::pair<int64_t, int64_t> takes,
      std::pair<int64_t, int64_t> alike,
      std::string mark,
      int64_t category);

  void operator()(PyObject* table) const;

 private:
  void fill(torch::jit::Stack& stack, PyObject* table) const;

  c10::OperatorHandle operator_;
  std::vector<c10::IValue> arguments_;
  // Numbers where an operator takes tensors are made tensors in each call, as they are in calls from Python, because
  // plans have places for what those allocate.
  std::vector<std::pair<int64_t, c10::Scalar>> tensors_of_numbers_;
  std::vector<std::pair<int64_t, at::Tensor>> numbers_;
  std::vector<Place> places_;
  std::vector<int64_t> writes_;
  std::pair<int64_t, int64_t> takes_;
  std::pair<int64_t, int64_t> alike_;
  std::string mark_;
  int64_t category_;
  int64_t largest_value_ = -1;
  bool is_below_autograd_;
};

} // namespace torch_odt::execute
