#include "held.h"

namespace torch_odt::execute {

namespace py = pybind11;

bool hold(const py::list& dicts, const py::list& names, const py::list& values) {
  if (dicts.size() != names.size()) {
    throw py::value_error("as many tuples of names as dicts are wanted");
  }
  const auto count = static_cast<Py_ssize_t>(values.size());
  Py_ssize_t at = 0;
  for (size_t i = 0; i < dicts.size(); ++i) {
    PyObject* const dict = PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i));
    PyObject* const own = PyList_GET_ITEM(names.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyDict_Check(dict) || !PyTuple_Check(own)) {
      throw py::type_error("dicts and tuples are wanted");
    }
    if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(own)) {
      return false;
    }
    Py_ssize_t position = 0;
    Py_ssize_t of_name = 0;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict, &position, &name, &value)) {
      if (at >= count || PyTuple_GET_ITEM(own, of_name++) != name || PyList_GET_ITEM(values.ptr(), at++) != value) {
        return false;
      }
    }
  }
  return at == count;
}

} // namespace torch_odt::execute
