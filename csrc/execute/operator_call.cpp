#include "operator_call.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../memory/allocator.h"

namespace torch_odt::execute {

namespace {

int64_t position_of(const c10::FunctionSchema& schema, const std::string& name) {
  const std::optional<int> found = schema.argumentIndexWithName(name);
  TORCH_CHECK_VALUE(found.has_value(), schema.name(), " has no argument ", name);
  return *found;
}

std::vector<c10::IValue> converted(const c10::FunctionSchema& schema, const py::dict& given) {
  // As in calls from Python: some operators take a number where their schema has a tensor.
  const torch::jit::ToIValueAllowNumbersAsTensors guard(torch::should_allow_numbers_as_tensors(
      schema.name().substr(schema.name().find("::") + 2)));
  std::vector<c10::IValue> arguments;
  arguments.reserve(schema.arguments().size());
  size_t used = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const char* const name = argument.name().c_str();
    if (given.contains(name)) {
      ++used;
      arguments.push_back(torch::jit::argumentToIValue(schema, i, given[name]));
    } else {
      TORCH_CHECK_VALUE(argument.default_value().has_value(), schema.name(), " lacks its argument ", name);
      arguments.push_back(*argument.default_value());
    }
  }
  TORCH_CHECK_VALUE(used == given.size(), schema.name(), " has other arguments than those that are given");
  return arguments;
}

const at::Tensor& tensor_in(PyObject* table, int64_t value) {
  PyObject* const found = PyList_GET_ITEM(table, value);
  if (!THPVariable_Check(found)) {
    throw std::runtime_error("an operator uses value " + std::to_string(value) + ", which is not in memory");
  }
  return THPVariable_Unpack(found);
}

// Those of torch and of this package leave nothing to autograd in a graph that holds both passes, where autograd's part
// of an operator may be Python's. Kernels of others may use autograd themselves.
bool needs_no_autograd(const std::string& name) {
  return name.starts_with("aten::") || name.starts_with("torch_odt::");
}

// Whether elements lie in the same order, with nothing between them.
bool lie_alike(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_contiguous() && other.is_contiguous()) {
    return true;
  }
  if (!one.is_non_overlapping_and_dense()) {
    return false;
  }
  for (int64_t i = 0; i < one.dim(); ++i) {
    if (one.size(i) > 1 && one.stride(i) != other.stride(i)) {
      return false;
    }
  }
  return true;
}

} // namespace

void require_values(PyObject* table, int64_t largest) {
  if (largest >= PyList_GET_SIZE(table)) {
    throw py::index_error("the table has no value " + std::to_string(largest));
  }
}

OperatorCall::OperatorCall(
    const std::string& name,
    const std::string& overload,
    const py::dict& arguments,
    const std::vector<std::tuple<std::string, int64_t, int64_t>>& places,
    const std::vector<std::pair<std::string, at::Tensor>>& numbers,
    std::vector<int64_t> writes,
    std::pair<int64_t, int64_t> takes,
    std::pair<int64_t, int64_t> alike,
    std::string mark,
    int64_t category)
    : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())),
      arguments_(converted(operator_.schema(), arguments)),
      writes_(std::move(writes)),
      takes_(takes),
      alike_(alike),
      mark_(std::move(mark)),
      category_(category),
      is_below_autograd_(needs_no_autograd(name)) {
  for (const auto& [argument, element, value] : places) {
    places_.push_back({position_of(operator_.schema(), argument), element, value});
    largest_value_ = std::max(largest_value_, value);
  }
  for (const int64_t value : writes_) {
    largest_value_ = std::max(largest_value_, value);
  }
  largest_value_ = std::max({largest_value_, takes_.first, takes_.second});
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].isTensor() && arguments_[i].toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      tensors_of_numbers_.emplace_back(i, arguments_[i].toTensor().item());
    }
  }
  for (const auto& [argument, cell] : numbers) {
    TORCH_CHECK_VALUE(
        cell.is_cpu() && cell.scalar_type() == at::kDouble && cell.numel() == 1, "a number is one float64");
    numbers_.emplace_back(position_of(operator_.schema(), argument), cell);
  }
  const auto count = static_cast<int64_t>(arguments_.size());
  TORCH_CHECK_VALUE(std::max(alike_.first, alike_.second) < count, name, " has fewer arguments");
  const std::vector<c10::Argument>& returns = operator_.schema().returns();
  TORCH_CHECK_VALUE(returns.size() == writes_.size(), name, " has another number of results");
  for (const c10::Argument& result : returns) {
    TORCH_CHECK_VALUE(result.type()->kind() == c10::TypeKind::TensorType, name, " has a result that is no tensor");
  }
}

void OperatorCall::operator()(PyObject* table) const {
  require_values(table, largest_value_);
  torch::jit::Stack stack = arguments_;
  at::RecordFunction marked(at::RecordScope::USER_SCOPE);
  if (!mark_.empty() && marked.isActive()) {
    marked.before(mark_);
  }
  fill(stack, table);
  {
    const py::gil_scoped_release released;
    std::optional<at::AutoDispatchBelowAutograd> below;
    if (is_below_autograd_) {
      below.emplace();
    }
    operator_.callBoxed(stack);
  }
  for (size_t i = 0; i < writes_.size(); ++i) {
    if (writes_[i] < 0) {
      continue;
    }
    const at::Tensor& result = stack[i].toTensor();
    if (category_ >= 0 && result.defined()) {
      memory::tag(reinterpret_cast<uintptr_t>(result.storage().data()), static_cast<int>(category_));
    }
    PyObject* const wrapped = THPVariable_Wrap(result);
    if (wrapped == nullptr) {
      throw py::error_already_set();
    }
    PyList_SetItem(table, writes_[i], wrapped);
  }
  if (takes_.first >= 0) {
    PyObject* const taken = PyList_GET_ITEM(table, takes_.second);
    Py_INCREF(taken);
    PyList_SetItem(table, takes_.first, taken);
  }
}

void OperatorCall::fill(torch::jit::Stack& stack, PyObject* table) const {
  for (const auto& [argument, number] : tensors_of_numbers_) {
    at::Tensor tensor = at::scalar_to_tensor(number);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    stack[argument] = std::move(tensor);
  }
  int64_t list = -1; // the argument whose copy is being filled: that of all calls is not to be written to
  for (const Place& place : places_) {
    const at::Tensor& tensor = tensor_in(table, place.value);
    if (place.element < 0) {
      stack[place.argument] = tensor;
      continue;
    }
    if (place.argument != list) {
      stack[place.argument] = stack[place.argument].toList().copy();
      list = place.argument;
    }
    stack[place.argument].toList().set(place.element, tensor);
  }
  for (const auto& [argument, cell] : numbers_) {
    stack[argument] = *cell.const_data_ptr<double>();
  }
  if (alike_.first >= 0) {
    const at::Tensor& model = stack[alike_.first].toTensor();
    const at::Tensor& tensor = stack[alike_.second].toTensor();
    if (!lie_alike(model, tensor)) {
      stack[alike_.second] = at::empty_like(model).copy_(tensor);
    }
  }
}

} // namespace torch_odt::execute
