"""Outputs' structures from files: put together again, or refused before anything is imported."""

from __future__ import annotations

import json

import pytest
import torch.utils._pytree as pytree

from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.step_data import results_to_data, with_results
from torch_odt.capture.trace import TracedStep

GRAPH = TrainingGraph(ops=[], values=[], inputs=[], outputs=[], boundary=0, program_length=0)


def test_a_structure_survives_as_data() -> None:
    _, spec = pytree.tree_flatten({"größe": (1, [2]), "a word": 3})
    step = TracedStep(GRAPH, spec, [(0, None), (None, 2.5), (1, None)])
    data = json.loads(json.dumps(results_to_data(step)))
    found = with_results(GRAPH, data)
    assert (found.result_spec, found.result_leaves) == (spec, step.result_leaves)


def test_a_structure_that_json_would_change_is_refused() -> None:
    _, spec = pytree.tree_flatten({("a", 1): 2})
    with pytest.raises(TypeError, match="such as a tuple among a dict's keys"):
        results_to_data(TracedStep(GRAPH, spec, [(0, None)]))


def spec_with(key: str) -> str:
    """A dictionary's structure whose first key is an object of one entry named `key`, as JSON spells it."""
    context = f'[{{"{key}": true, "fqn": "no_such_module:Name", "name": "A"}}]'
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": [leaf]}])


@pytest.mark.parametrize("key", ["__enum__", r"\u005f_enum__", r"__\u0065num__", r"__enu\u006D__"])
def test_a_structure_that_would_import_a_module_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="names code"):
        with_results(GRAPH, {"spec": spec_with(key), "leaves": []})


def test_an_escape_of_an_escape_is_refused() -> None:
    spec = spec_with(r"\u005f_enum__").replace("u005f", r"\u0075005f")
    with pytest.raises(ValueError, match="names code"):
        with_results(GRAPH, {"spec": spec, "leaves": []})
