"""A tree of state (dicts, lists, numbers, tensors) in one safetensors file: whole or not there, and checked when read.

Tensors lie in the file in the order of their memory, so that writing copies none, and any tool for safetensors shows
them. The tree around them and a checksum for each are in the file's metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_odt.errors import CheckpointError

__all__ = ["read_state", "write_state"]

_FORMAT = "torch_odt state 1"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state, so that there is either the whole file or what was there before, whenever power or process end.

    Args:
        path: the file, in a folder that exists.
        state: dicts, lists, tuples, text, numbers, None, bytes, numpy arrays and tensors on the CPU, nested at will.

    Raises:
        OSError: the file cannot be written; what was there before is as it was.
        TypeError: the state holds something else; the message says where.
    """
    from safetensors.torch import save_file

    flattener = _Flattener()
    tree = flattener.encode(state, "")
    body = {
        "tree": json.dumps(tree),
        "layouts": json.dumps(flattener.layouts),
        "checksums": json.dumps({name: _checksum(tensor) for name, tensor in flattener.tensors.items()}),
    }
    metadata = {"format": _FORMAT, **body, "checksum": str(_checksum_of_text(body))}
    partial = path.with_name(f"{path.name}.partial")
    try:
        with _as_os_errors():
            save_file(flattener.tensors, partial, metadata=metadata)
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Args:
        path: the file.

    Returns:
        The state. Its tensors are pages of the file until they are written to, so that what is only copied into a model
        takes no memory of its own.

    Raises:
        CheckpointError: the file is not whole, has been changed, or is another kind of file.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):
        pass  # the library's own errors do not tell an absent file from a damaged one
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} was not written as a checkpoint of this version ({_FORMAT})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    body = {name: metadata.get(name, "") for name in ("tree", "layouts", "checksums")}
    if metadata.get("checksum") != str(_checksum_of_text(body)):
        raise CheckpointError(f"{path} is damaged: its description has been changed")
    checksums = json.loads(body["checksums"])
    for name, checksum in checksums.items():
        if name not in tensors or _checksum(tensors[name]) != checksum:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written")
    layouts = json.loads(body["layouts"])
    laid_out = {name: _as_before(tensor, layouts.get(name)) for name, tensor in tensors.items()}
    state: dict[str, Any] = _decode(json.loads(body["tree"]), laid_out)
    return state


class _Flattener:
    """Takes the tensors out of a tree; what is left can be written as JSON.

    Attributes:
        tensors: by their names in the file, dense and in the order of their memory.
        layouts: for those whose memory is in another order than their dimensions, that order.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, list[int]] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, at: str) -> Any:
        """What JSON can hold of a value that stands at some place of the tree."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            # JSON has no word for what is not finite.
            return value if np.isfinite(value) else {"float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self.name_of(value.detach(), at)}
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(k, at), self.encode(v, _inside(at, k))] for k, v in value.items()]}
        encoder = _ENCODERS.get(type(value))
        if encoder is None:
            raise TypeError(
                f"a checkpoint cannot hold {at}, which is a {type(value).__name__}: give tensors, numbers, text, lists "
                "and dicts of them"
            )
        return encoder(self, value, at)

    def encode_all(self, values: Any, at: str) -> list[Any]:
        """The same for each value of a list or tuple."""
        return [self.encode(value, _inside(at, number)) for number, value in enumerate(values)]

    def name_of(self, tensor: torch.Tensor, at: str) -> str:
        """What a tensor is called in the file; it is written under this name."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise TypeError(f"a checkpoint cannot hold {at}: a {tensor.layout} tensor on {tensor.device}")
        # The format holds no two tensors of the same memory; tied weights are written once.
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        is_shared = tensor.numel() > 0 and memory in self._names
        if not is_shared:
            name = self._names[memory] = self._free_name(at)
            steps, sizes = tensor.stride(), tensor.shape
            order = sorted(range(tensor.dim()), key=lambda d: (-steps[d], -sizes[d], d))
            if order != sorted(order):
                self.layouts[name] = order
            dense = tensor.permute(order).contiguous()
            storage = dense.untyped_storage().data_ptr()
            self.tensors[name] = dense.clone() if storage in self._storages else dense
            self._storages.add(storage)
        return self._names[memory]

    def _free_name(self, at: str) -> str:
        name, number = at, 2
        while name in self.tensors:
            name, number = f"{at}#{number}", number + 1
        return name


# Not the flattener's own: it would be in a cycle then, and hold the tensors until garbage is collected.
_ENCODERS: dict[type, Callable[[_Flattener, Any, str], Any]] = {
    tuple: lambda to, value, at: {"tuple": to.encode_all(value, at)},
    list: _Flattener.encode_all,
    bytes: lambda to, value, at: {"bytes": to.name_of(_tensor_of_bytes(value), at)},
    np.ndarray: lambda to, value, at: {
        "array": to.name_of(_tensor_of_bytes(np.ascontiguousarray(value).tobytes()), at),
        "dtype": value.dtype.str,
        "shape": list(value.shape),
    },
}


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if "dict" in tree:
        return {_decode(key, tensors): _decode(value, tensors) for key, value in tree["dict"]}
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "tuple" in tree:
        return tuple(_decode(tree["tuple"], tensors))
    if "float" in tree:
        return float(tree["float"])
    if "bytes" in tree:
        return tensors[tree["bytes"]].numpy().tobytes()
    flat = np.frombuffer(tensors[tree["array"]].numpy().tobytes(), dtype=np.dtype(tree["dtype"]))
    return flat.reshape(tree["shape"]).copy()


def _inside(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _tensor_of_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_before(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    if order is None:
        return tensor
    return tensor.permute([order.index(d) for d in range(len(order))])


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def _checksum_of_text(parts: Mapping[str, str]) -> int:
    return zlib.crc32("\n".join(parts.values()).encode())


def _sync(path: Path) -> None:
    """Until this returns, a loss of power may undo what was written."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from None
