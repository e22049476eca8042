"""A step as a description that another process can make too: what a trace of it depends on."""

from __future__ import annotations

import builtins
import os
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.cache import code_digest
from torch_odt.capture.describe import Describer, Undescribable, is_users_function
from torch_odt.capture.effects import refuse_hooks
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.machine import machine_name, settings_name
from torch_odt.capture.reads import MODULE_OWN

# Of `nn.Module` itself: parameters, buffers and children are looked at by their own.
MODULE_STRUCTURE = MODULE_OWN - {"training"}
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
_TORCH_VARIABLES = ("TORCH", "PYTORCH", "ATEN", "AOT")


def describe_step(model: nn.Module, loss_fn: Any, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Describer:
    """Describe settings, model, loss and batch, but not yet the code that they are made of.

    Raises:
        Undescribable, CaptureError: the step depends on something that cannot be compared with another process.
    """
    describer = Describer()
    describer.write(*_settings())
    roots = step_modules(model, loss_fn)
    for root in roots:
        refuse_hooks(root)
    modules = [module for root in roots for module in _describe_structure(describer, root)]
    for module in modules:
        describer.value(type(module))
        describer.items((k, v) for k, v in vars(module).items() if k not in MODULE_STRUCTURE)
    if not isinstance(loss_fn, nn.Module):
        describer.value(loss_fn)
    _describe_batch(describer, batch)
    for name, function in _patches():
        describer.write("patch", name)
        describer.value(function)
    return describer


def step_modules(model: nn.Module, loss_fn: Any) -> list[nn.Module]:
    """The model, and what the loss brings along."""
    return [module for module in (model, loss_module(model, loss_fn)) if module is not None]


def _describe_structure(describer: Describer, root: nn.Module) -> Iterator[nn.Module]:
    """Describe the tree of modules with their parameters and buffers; yields each module once."""
    if not describer.is_new(root):
        return
    yield root
    for name, tensor in (*root._parameters.items(), *root._buffers.items()):
        describer.write(name, tensor is None)
        if tensor is not None:
            describer.tensor(tensor)
    for name, child in root._modules.items():
        describer.write("module", name, child is None)
        if child is not None:
            yield from _describe_structure(describer, child)


def _describe_batch(describer: Describer, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    leaves, spec = pytree.tree_flatten(batch)
    try:
        describer.write(pytree.treespec_dumps(spec))
    except (TypeError, NotImplementedError) as error:
        raise Undescribable(f"the batch's structure has no name: {error}") from error
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            describer.tensor(leaf)
        else:
            describer.value(leaf)


def _settings() -> tuple[str, ...]:
    """What torch and Python are, and how torch is set."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        raise Undescribable("a mode of torch is active")
    if any(getattr(nn.modules.module, hooks, None) for hooks in _GLOBAL_HOOKS):
        raise Undescribable("all modules have hooks")
    attention = (
        torch._C._get_flash_sdp_enabled,
        torch._C._get_math_sdp_enabled,
        torch._C._get_mem_efficient_sdp_enabled,
    )
    einsum = torch.backends.opt_einsum
    found = {
        "versions": (sys.version, torch.__version__, torch.version.git_version, np.__version__, code_digest()),
        "machine": (platform.platform(), machine_name(), settings_name()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_deterministic_debug_mode()),
        "attention": ([is_enabled() for is_enabled in attention], torch.backends.mha.get_fastpath_enabled()),
        "einsum": (einsum.is_available(), einsum.enabled, einsum.strategy),
        "functorch": _functorch_settings(),
        "environment": sorted((k, v) for k, v in os.environ.items() if _is_torch_variable(k)),
    }
    return tuple(f"{name} {value}" for name, value in found.items())


def _is_torch_variable(name: str) -> bool:
    # To import Inductor, which nothing here needs, sets a variable.
    return name.startswith(_TORCH_VARIABLES) and not name.startswith(("TORCH_ODT_", "TORCHINDUCTOR_"))


def _functorch_settings() -> str:
    """What somebody has set in the tracer's configuration; nobody has before it is imported."""
    config = sys.modules.get("torch._functorch.config")
    return "" if config is None else str(config.codegen_config())


def _patches() -> Iterator[tuple[str, types.FunctionType]]:
    """Functions of the user's that stand in the place of torch's or Python's own."""
    names = [name for name in sys.modules if name.startswith("torch.nn.modules.")]
    places = {name: vars(sys.modules[name]) for name in ("torch", "torch.functional", "torch.nn.functional", *names)}
    for place, namespace in {**places, "builtins": vars(builtins), "torch.Tensor": vars(torch.Tensor)}.items():
        for name, function in list(namespace.items()):
            if is_users_function(function):
                yield f"{place}.{name}", function
