"""Traced steps to and from plain data, for JSON.

Nothing but names and numbers is written, so that reading an entry can never run code.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_odt.capture.describe import tensor_bytes
from torch_odt.capture.graph import Op, Output, Ref, TrainingGraph, Value
from torch_odt.capture.trace import Opaque, TracedStep

_PLAIN = (bool, int, float, str, type(None))
_MOST_CONSTANT_BYTES = 1 << 16
_VALUE_FIELDS = ("name", "shape", "stride", "dtype", "nbytes", "kind", "base", "producer", "target")
_OP_FIELDS = (
    "target",
    "args",
    "kwargs",
    "reads",
    "shape_reads",
    "writes",
    "is_view",
    "is_random",
    "is_pinned",
    "phase",
)


def step_to_data(step: TracedStep) -> dict[str, Any]:
    """Data from which `step_from_data` makes an equal step.

    Raises:
        TypeError, NotImplementedError: it holds something that has no such form.
    """
    spec = pytree.treespec_dumps(step.result_spec)
    if "__enum__" in spec:
        # To read it would import a module that the file names.
        raise TypeError("the outputs' structure holds an enumeration")
    return {
        "graph": _graph_to_data(step.graph),
        "fingerprint": step.graph.fingerprint,
        "result_spec": spec,
        "result_leaves": [[position, _encode_leaf(leaf)] for position, leaf in step.result_leaves],
    }


def step_from_data(data: Mapping[str, Any]) -> TracedStep:
    """The step of `step_to_data`.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the data is not what it was.
        NotImplementedError: a class in the outputs' structure is not known to `torch.utils._pytree`.
    """
    graph = _graph_from_data(data["graph"])
    if graph.fingerprint != data["fingerprint"]:
        raise ValueError("the graph's fingerprint is another one")
    if "__enum__" in data["result_spec"]:
        raise ValueError("the outputs' structure names code")
    return TracedStep(
        graph=graph,
        result_spec=pytree.treespec_loads(data["result_spec"]),
        result_leaves=[(position, _decode_leaf(leaf)) for position, leaf in data["result_leaves"]],
    )


def _graph_to_data(graph: TrainingGraph) -> dict[str, Any]:
    if sum(constant.nbytes for constant in graph.constants.values()) > _MOST_CONSTANT_BYTES:
        raise TypeError("the graph holds large constants")
    return {
        "values": [[_encode(getattr(value, name)) for name in _VALUE_FIELDS] for value in graph.values],
        "ops": [[_encode(getattr(op, name)) for name in _OP_FIELDS] for op in graph.ops],
        "inputs": graph.inputs,
        "outputs": [[output.value, output.kind, output.target] for output in graph.outputs],
        "boundary": graph.boundary,
        "program_length": graph.program_length,
        "rematerializers": list(graph.rematerializers.items()),
        "constants": [[value, _encode_tensor(tensor)] for value, tensor in graph.constants.items()],
        "notes": graph.notes,
    }


def _graph_from_data(data: Mapping[str, Any]) -> TrainingGraph:
    values = [dict(zip(_VALUE_FIELDS, map(_decode, row), strict=True)) for row in data["values"]]
    ops = [dict(zip(_OP_FIELDS, map(_decode, row), strict=True)) for row in data["ops"]]
    return TrainingGraph(
        ops=[Op(index=index, **fields) for index, fields in enumerate(ops)],
        values=[Value(index=index, **fields) for index, fields in enumerate(values)],
        inputs=list(data["inputs"]),
        outputs=[Output(value, kind, target) for value, kind, target in data["outputs"]],
        boundary=data["boundary"],
        program_length=data["program_length"],
        rematerializers=dict(data["rematerializers"]),
        constants={value: _decode_tensor(tensor) for value, tensor in data["constants"]},
        notes=list(data["notes"]),
    )


def _encode(value: Any) -> Any:
    """JSON for an operator's argument: plain values and lists as they are, all else as `{kind: content}`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if kind is Ref:
        return {"ref": value.value}
    if kind in _NAMED:
        return {_NAMED[kind]: str(value).removeprefix("torch.")}
    raise TypeError(f"a {kind.__name__} among an operator's arguments")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if isinstance(data, dict):
        ((kind, content),) = data.items()
        return _DECODERS[kind](content)
    return data


def _torch_object(kind: type) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        found = getattr(torch, name)
        if type(found) is not kind:
            raise ValueError(f"torch.{name} is no {kind.__name__}")
        return found

    return find


_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format", torch.device: "device"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(map(_decode, content)),
    "dict": lambda content: {_decode(key): _decode(item) for key, item in content},
    "ref": Ref,
    "device": torch.device,
    "dtype": _torch_object(torch.dtype),
    "layout": _torch_object(torch.layout),
    "memory_format": _torch_object(torch.memory_format),
}


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        raise TypeError("a constant of the graph is no ordinary tensor")
    content = base64.b64encode(tensor_bytes(tensor)).decode()
    return {"dtype": _encode(tensor.dtype), "shape": list(tensor.shape), "content": content}


def _decode_tensor(data: Mapping[str, Any]) -> torch.Tensor:
    content = bytearray(base64.b64decode(data["content"], validate=True))
    dtype, shape = _decode(data["dtype"]), data["shape"]
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _encode_leaf(leaf: Any) -> Any:
    return {"opaque": leaf.type_name} if isinstance(leaf, Opaque) else _encode(leaf)


def _decode_leaf(data: Any) -> Any:
    return Opaque(data["opaque"]) if isinstance(data, dict) and "opaque" in data else _decode(data)
