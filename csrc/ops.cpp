// The module torch_odt._C. Importing it runs the registrations of the ops_*.cpp files; there is nothing in it.

#include <Python.h>

extern "C" PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
