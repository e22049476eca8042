#include "held.h"

namespace torch_odt::execute {

namespace py = pybind11;

namespace {

bool are_empty(const py::list& dicts) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts.ptr()); ++i) {
    PyObject* const dict = PyList_GET_ITEM(dicts.ptr(), i);
    if (!PyDict_Check(dict)) {
      throw py::type_error("dicts are wanted");
    }
    if (PyDict_GET_SIZE(dict) != 0) {
      return false;
    }
  }
  return true;
}

} // namespace

bool are_of(const py::list& objects, const py::list& classes, const py::list& own) {
  if (classes.size() != objects.size() || own.size() != objects.size()) {
    throw py::value_error("as many classes and dicts as objects are wanted");
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    PyObject* const object = PyList_GET_ITEM(objects.ptr(), i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != PyList_GET_ITEM(classes.ptr(), i)) {
      return false;
    }
    const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!dict) {
      throw py::error_already_set();
    }
    if (dict.ptr() != PyList_GET_ITEM(own.ptr(), i)) {
      return false;
    }
  }
  return true;
}

bool hold(const py::list& dicts, const py::list& names, const py::list& values, const py::list& empty) {
  if (dicts.size() != names.size()) {
    throw py::value_error("as many tuples of names as dicts are wanted");
  }
  if (!are_empty(empty)) {
    return false;
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
