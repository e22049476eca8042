// Whether what Python's objects hold is what it was. A step asks this of everything that a model's modules hold.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_odt::execute {

// Whether objects are of these very classes and have these very `__dict__`s.
bool are_of(const pybind11::list& objects, const pybind11::list& classes, const pybind11::list& own);

// Whether dicts hold these very objects, all of them in one order, a tuple of names for each dict and the values of all,
// and whether those of `empty` are still empty.
bool hold(
    const pybind11::list& dicts, const pybind11::list& names, const pybind11::list& values, const pybind11::list& empty);

} // namespace torch_odt::execute
