#include "held.h"

namespace torch_odt::execute {

namespace py = pybind11;

bool hold(const py::list& dicts, const py::list& sizes, const py::list& names, const py::list& values) {
  const auto count = static_cast<Py_ssize_t>(names.size());
  if (dicts.size() != sizes.size() || names.size() != values.size()) {
    throw py::value_error("as many sizes as dicts are wanted, and as many names as values");
  }
  Py_ssize_t at = 0;
  for (size_t i = 0; i < dicts.size(); ++i) {
    PyObject* const dict = PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyDict_Check(dict)) {
      throw py::type_error("dicts are wanted");
    }
    if (PyDict_GET_SIZE(dict) != PyLong_AsSsize_t(PyList_GET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(i)))) {
      return false;
    }
    Py_ssize_t position = 0;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict, &position, &name, &value)) {
      if (at >= count || PyList_GET_ITEM(names.ptr(), at) != name || PyList_GET_ITEM(values.ptr(), at) != value) {
        return false;
      }
      ++at;
    }
  }
  return at == count;
}

} // namespace torch_odt::execute
