// The module torch_odt._C. Importing it runs the registrations of the ops_*.cpp files; beside that it tells of the
// kernels' instruction sets.

#include <Python.h>

#include <iterator>

#include "kernels/int8/table.h"
#include "kernels/isa.h"

namespace {

using namespace torch_odt;

PyObject* instruction_set(PyObject*, PyObject*) {
  return PyUnicode_FromString(kernels::name_of(kernels::isa()));
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* const names = PyTuple_New(std::size(kernels::kAllIsas));
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    PyTuple_SetItem(names, i, PyUnicode_FromString(kernels::name_of(kernels::kAllIsas[i])));
  }
  return names;
}

PyObject* int8_table(PyObject*, PyObject*) {
  return PyUnicode_FromString(kernels::int8::table().name);
}

PyMethodDef methods[] = {
    {"instruction_set", instruction_set, METH_NOARGS, "The set that kernels use on this machine."},
    {"instruction_sets", instruction_sets, METH_NOARGS, "All sets that kernels are compiled for, each with its name."},
    {"int8_table", int8_table, METH_NOARGS, "The table of int8 kernels that products of matrices use."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

extern "C" PyObject* PyInit__C() {
  return PyModule_Create(&definition);
}
