#include "tensors.h"

#include <cstdint>
#include <stdexcept>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace torch_odt::execute {

namespace {

namespace py = pybind11;

constexpr int64_t kNone = -1;

const at::Tensor& tensor_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("tensors are wanted");
  }
  return THPVariable_Unpack(object.ptr());
}

void append_form(std::vector<int64_t>& words, const at::Tensor& tensor, bool addresses) {
  words.push_back(tensor.dim());
  words.push_back(tensor.requires_grad());
  words.push_back(static_cast<int64_t>(tensor.scalar_type()));
  words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
  if (addresses) {
    words.push_back(reinterpret_cast<int64_t>(tensor.storage().data()));
    words.push_back(static_cast<int64_t>(tensor.storage().nbytes()));
  }
}

} // namespace

py::bytes forms(const py::list& tensors, bool addresses) {
  std::vector<int64_t> words;
  words.reserve(12 * tensors.size());
  for (const py::handle& each : tensors) {
    if (each.is_none()) {
      words.push_back(kNone);
    } else {
      append_form(words, tensor_of(each), addresses);
    }
  }
  return py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
}

py::list detached(const py::list& tensors) {
  py::list result;
  for (const py::handle& each : tensors) {
    result.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor_of(each).detach())));
  }
  return result;
}

void note_changed(const py::list& tensors) {
  for (const py::handle& each : tensors) {
    const at::Tensor& tensor = tensor_of(each);
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

} // namespace torch_odt::execute
