"""How an operator of this package gets its plain-torch form and its shapes for tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_odt import _extensions

Fake = TypeVar("Fake", bound=Callable[..., Any])


def register(name: str, schema: str, in_torch: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make `torch.ops.torch_odt.<name>` complete; without compiled parts, `in_torch` is what it calls.

    Args:
        name: the operator's name.
        schema: its arguments and results, as the compiled parts state them.
        in_torch: the same computation in plain torch.
        fake: the results' shapes, strides and dtypes.
    """
    if not _extensions.has_kernels:
        torch.library.define(f"torch_odt::{name}", schema)
        torch.library.impl(f"torch_odt::{name}", "cpu", in_torch)
    fake_of(name)(fake)


def operator_in_torch(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `torch.ops.torch_odt.<name>` of a function on CPU tensors; the operator takes the function's place.

    When to choose it: for an operator that has no compiled form and runs in each step. `torch.library.custom_op` leads
    each call through several layers, which take longer than many an operator; it also looks whether the function keeps
    what is asked here: no argument is changed, and no result lies in an argument's memory.
    """

    def defined(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"torch_odt::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"torch_odt::{name}", "cpu", function)
        operator: Callable[..., Any] = getattr(torch.ops.torch_odt, name).default
        return operator

    return defined


def fake_of(name: str) -> Callable[[Fake], Fake]:
    """Gives `torch.ops.torch_odt.<name>` its results' shapes, strides and dtypes."""

    def registered(fake: Fake) -> Fake:
        torch.library.register_fake(f"torch_odt::{name}", _on_one_device(name, fake))
        return fake

    return registered


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor without data among others must not make of a result what is there by chance."""

    @functools.wraps(fake)
    def checked(*arguments: Any, **named: Any) -> Any:
        devices = {str(value.device) for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{name}: its tensors are on several devices, {' and '.join(sorted(devices))}")
        return fake(*arguments, **named)

    return checked


_library = torch.library.Library("torch_odt", "FRAGMENT")


def register_gradient(name: str, keep: Callable[..., None], gradients: Callable[..., tuple[Any, ...]]) -> None:
    """Give `torch.ops.torch_odt.<name>` a gradient, as `torch.library.register_autograd` does.

    When to choose it: for an operator that runs many times a step. That function reads the schema once more for each
    argument of each call, which takes longer than many an operator. Here all arguments are positional, without
    defaults, and none that wants a gradient stands in a list.

    Args:
        name: the operator's name; it has been registered.
        keep: called with the context, the arguments and the result of a forward pass.
        gradients: called with the context and the gradients of the results, None for those that have none, but not
            without any; returns those of all arguments.
    """
    computed = _below_autograd(name)

    def forward(ctx: Any, *arguments: Any) -> Any:
        ctx.set_materialize_grads(False)
        *own, keyset = arguments
        result = computed(keyset, tuple(own))
        keep(ctx, tuple(own), result)
        return result

    def backward(ctx: Any, *of_results: Any) -> tuple[Any, ...]:
        if all(each is None for each in of_results):
            return (None,) * len(ctx.needs_input_grad)
        return *gradients(ctx, *of_results), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"{name}_gradient", (torch.autograd.Function,), members)

    def run(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return function.apply(*arguments, keyset)
        return computed(keyset, arguments)

    _library.impl(name, run, "Autograd", with_keyset=True)


def refuse_gradient(name: str) -> None:
    """Let `torch.ops.torch_odt.<name>` raise RuntimeError where autograd would have to differentiate it."""
    computed = _below_autograd(name)

    def run(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            raise RuntimeError(f"torch_odt::{name} has no gradient: int8 networks have no second derivatives")
        return computed(keyset, arguments)

    _library.impl(name, run, "Autograd", with_keyset=True)


def _below_autograd(name: str) -> Callable[[Any, tuple[Any, ...]], Any]:
    operator = getattr(torch.ops.torch_odt, name).default
    below: Any = torch._C._after_autograd_keyset

    def computed(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & below, *arguments)

    return computed
