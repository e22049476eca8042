"""Graphs to and from plain data, for JSON.

Nothing but names and numbers is written, so that reading them can never run code.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torch_odt.capture.graph import Op, Output, Ref, TrainingGraph, Value, refs

_PLAIN = (bool, int, float, str, type(None))
_VALUE_MARK = "%"
_FLAGS = ("is_view", "is_random", "is_pinned")


def graph_to_data(graph: TrainingGraph, *, most_constant_bytes: int) -> dict[str, Any]:
    """Data from which `graph_from_data` makes an equal graph.

    Raises:
        TypeError: it holds something that has no such form, or constants of more than `most_constant_bytes`.
    """
    if sum(constant.nbytes for constant in graph.constants.values()) > most_constant_bytes:
        raise TypeError(f"the graph holds constants of more than {most_constant_bytes} bytes")
    return {
        "values": list(map(_value_to_data, graph.values)),
        "ops": [op_to_data(op) for op in graph.ops],
        "inputs": graph.inputs,
        "outputs": [[output.value, output.kind, output.target] for output in graph.outputs],
        "boundary": graph.boundary,
        "program_length": graph.program_length,
        "rematerializers": list(graph.rematerializers.items()),
        "constants": [[value, _encode_tensor(tensor)] for value, tensor in graph.constants.items()],
        "notes": graph.notes,
    }


def graph_from_data(data: Mapping[str, Any]) -> TrainingGraph:
    """The graph of `graph_to_data`.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the data is not what it was.
    """
    shared: dict[Any, Any] = {}
    return TrainingGraph(
        ops=[op_from_data(index, row) for index, row in enumerate(data["ops"])],
        values=[_value_from_data(index, row, shared) for index, row in enumerate(data["values"])],
        inputs=list(data["inputs"]),
        outputs=[Output(value, kind, target) for value, kind, target in data["outputs"]],
        boundary=data["boundary"],
        program_length=data["program_length"],
        rematerializers=dict(data["rematerializers"]),
        constants={value: _decode_tensor(tensor) for value, tensor in data["constants"]},
        notes=list(data["notes"]),
    )


def _value_to_data(v: Value) -> list[Any]:
    return [v.name, v.shape, v.stride, v.dtype, v.nbytes, v.kind, v.base, v.producer, v.target]


def _value_from_data(index: int, row: list[Any], shared: dict[Any, Any]) -> Value:
    """A value; what it has in common with others, it shares with them."""
    name, shape, stride, dtype, nbytes, kind, base, producer, target = row
    alike = (tuple(shape), tuple(stride), dtype, kind)
    shape, stride, dtype, kind = (shared.setdefault((place, each), each) for place, each in enumerate(alike))
    # Whatever goes by the names of tensors holds them once.
    target = sys.intern(target) if isinstance(target, str) else target
    return Value(index, name, shape, stride, dtype, nbytes, kind, base, producer, target)


def op_to_data(op: Op) -> dict[str, Any]:
    """An op as plain data, but for its position and for what goes without saying."""
    data = {
        "target": op.target,
        "args": list(map(encode, op.args)),
        "kwargs": {name: encode(argument) for name, argument in op.kwargs.items()},
        "shape_reads": op.shape_reads,
        "writes": op.writes,
        "is": [name for name in _FLAGS if getattr(op, name)],
        "overwrites": op.overwrites,
        "phase": op.phase,
    }
    if op.reads != _reads(op.args, op.kwargs, op.shape_reads):
        data["reads"] = op.reads
    return {name: content for name, content in data.items() if content not in ((), [], {}, None)}


def op_from_data(index: int, data: Mapping[str, Any]) -> Op:
    """The op of `op_to_data`, as number `index` of a graph."""
    args = tuple(map(decode, data.get("args", ())))
    kwargs = {name: decode(argument) for name, argument in data.get("kwargs", {}).items()}
    shape_reads = tuple(data.get("shape_reads", ()))
    reads = tuple(data["reads"]) if "reads" in data else _reads(args, kwargs, shape_reads)
    flags = {name: name in data.get("is", ()) for name in _FLAGS}
    writes, overwrites = tuple(data.get("writes", ())), data.get("overwrites")
    target = data["target"]
    if not isinstance(target, str):
        raise TypeError(f"op {index} runs {target!r}, which is no operator's name")
    return Op(
        index,
        sys.intern(target),
        args,
        kwargs,
        reads,
        shape_reads,
        writes,
        **flags,
        overwrites=overwrites,
        phase=sys.intern(data["phase"]),  # type: ignore[arg-type]
    )


def _reads(args: tuple[Any, ...], kwargs: dict[str, Any], shape_reads: Collection[int]) -> tuple[int, ...]:
    """What an op reads as a rule: the values among its arguments, but for those whose shape alone it uses."""
    return tuple(value for value in dict.fromkeys(refs((args, kwargs))) if value not in shape_reads)


def encode(value: Any) -> Any:
    """JSON for an operator's argument: plain values and lists as they are, values as "%number", all else as
    `{kind: content}`."""
    kind = type(value)
    if kind is str and value.startswith(_VALUE_MARK):
        return {"text": value}
    if kind in _PLAIN:
        return value
    if kind is Ref:
        return f"{_VALUE_MARK}{value.value}"
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {"tuple": [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in _NAMED:
        return {_NAMED[kind]: str(value).removeprefix("torch.")}
    raise TypeError(f"a {kind.__name__} among an operator's arguments")


def decode(data: Any) -> Any:
    """The inverse of `encode`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is something else.
    """
    if isinstance(data, str):
        return Ref(int(data[1:])) if data.startswith(_VALUE_MARK) else data
    if isinstance(data, list):
        return [decode(item) for item in data]
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
    "tuple": lambda content: tuple(map(decode, content)),
    "dict": lambda content: {decode(key): decode(item) for key, item in content},
    "text": str,
    "device": torch.device,
    "dtype": _torch_object(torch.dtype),
    "layout": _torch_object(torch.layout),
    "memory_format": _torch_object(torch.memory_format),
}


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        raise TypeError("a constant of the graph is no ordinary tensor")
    content = base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": encode(tensor.dtype), "shape": list(tensor.shape), "content": content}


def _decode_tensor(data: Mapping[str, Any]) -> torch.Tensor:
    content = bytearray(base64.b64decode(data["content"], validate=True))
    dtype, shape = decode(data["dtype"]), data["shape"]
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(shape)
