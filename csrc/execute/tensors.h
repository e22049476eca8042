// What of many tensors is asked for in each step, in one call.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_odt::execute {

// Whether they require gradients, their dtypes, sizes and strides, as bytes: tensors that are alike have the same.
// With `addresses` also where they lie, and how large their storages are. None among them has a form of its own.
pybind11::bytes forms(const pybind11::list& tensors, bool addresses);

// As `tensor.detach()`, of each.
pybind11::list detached(const pybind11::list& tensors);

// As `torch.autograd.graph.increment_version`: autograd, and whoever keeps something of a tensor, know of a change.
void note_changed(const pybind11::list& tensors);

} // namespace torch_odt::execute
