// Whether what Python's objects hold is what it was.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_odt::execute {

// Whether dicts hold these very objects, all of them in one order: a tuple of names for each dict, and the values of all.
// A step asks this of everything that a model's modules hold.
bool hold(const pybind11::list& dicts, const pybind11::list& names, const pybind11::list& values);

} // namespace torch_odt::execute
