"""Traced steps to and from plain data, for JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch.utils._pytree as pytree

from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.graph_data import decode, encode, graph_from_data, graph_to_data
from torch_odt.capture.trace import Opaque, TracedStep

_MOST_CONSTANT_BYTES = 1 << 16
# To read an enumeration would import a module that the file names. JSON may spell any letter of the word as an escape,
# but what writes it escapes no letter that every keyboard has.
_NAMES_CODE = re.compile(r"__enum__|\\u00[2-7]")


def step_to_data(step: TracedStep) -> dict[str, Any]:
    """Data from which `step_from_data` makes an equal step.

    Raises:
        TypeError, NotImplementedError: it holds something that has no such form.
    """
    return {
        "graph": graph_to_data(step.graph, most_constant_bytes=_MOST_CONSTANT_BYTES),
        "fingerprint": step.graph.fingerprint,
        "results": results_to_data(step),
    }


def step_from_data(data: Mapping[str, Any]) -> TracedStep:
    """The step of `step_to_data`.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the data is not what it was.
        NotImplementedError: a class in the outputs' structure is not known to `torch.utils._pytree`.
    """
    graph = graph_from_data(data["graph"])
    if graph.fingerprint != data["fingerprint"]:
        raise ValueError("the graph's fingerprint is another one")
    return with_results(graph, data["results"])


def step_to_text(step: TracedStep) -> str:
    """The same as one line of JSON, which takes one piece of memory.

    Raises:
        TypeError, NotImplementedError: it holds something that has no such form.
    """
    return json.dumps(step_to_data(step), separators=(",", ":"))


def step_from_text(text: str) -> TracedStep:
    """The step of `step_to_text`; raises as `step_from_data` does."""
    return step_from_data(json.loads(text))


def results_to_data(step: TracedStep) -> dict[str, Any]:
    """How the model's outputs are put together again, without the graph that computes them.

    Raises:
        TypeError, NotImplementedError: they hold something that has no such form.
    """
    spec = pytree.treespec_dumps(step.result_spec)
    if _NAMES_CODE.search(spec):
        raise TypeError("the outputs' structure holds an enumeration")
    if pytree.treespec_loads(spec) != step.result_spec:
        raise TypeError("the outputs' structure holds what JSON does not, such as a tuple among a dict's keys")
    return {"spec": spec, "leaves": [[position, _encode_leaf(leaf)] for position, leaf in step.result_leaves]}


def with_results(graph: TrainingGraph, data: Mapping[str, Any]) -> TracedStep:
    """A graph with what `results_to_data` has written.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the data is not what it was.
        NotImplementedError: a class in the outputs' structure is not known to `torch.utils._pytree`.
    """
    if _NAMES_CODE.search(data["spec"]):
        raise ValueError("the outputs' structure names code")
    leaves = [(position, _decode_leaf(leaf)) for position, leaf in data["leaves"]]
    return TracedStep(graph, pytree.treespec_loads(data["spec"]), leaves)


def _encode_leaf(leaf: Any) -> Any:
    return {"opaque": leaf.type_name} if isinstance(leaf, Opaque) else encode(leaf)


def _decode_leaf(data: Any) -> Any:
    return Opaque(data["opaque"]) if isinstance(data, dict) and "opaque" in data else decode(data)
