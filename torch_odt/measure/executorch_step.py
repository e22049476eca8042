"""Training by ExecuTorch, where it is installed and has a model's operators: a baseline beside plain PyTorch.

The forward and backward graph is exported in a child, whose memory is not the step's; this process loads the program
and runs it with ExecuTorch's operators and optimizer, as a device would.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.capture.child import ChildFailed, run_in_child
from torch_odt.measure.ending import is_out_of_memory
from torch_odt.measure.steps import Work


class NotTrainable(RuntimeError):
    """ExecuTorch cannot train this model; the text says why."""


def executorch_reason() -> str:
    """Why ExecuTorch cannot be measured here; empty where it can."""
    try:
        version("executorch")
        with _quiet():
            import executorch.extension.training  # noqa: F401
    except (PackageNotFoundError, ImportError) as error:
        return f'{error}: install it with pip install "torch_odt[executorch]"'
    return ""


class ExecuTorchStep:
    """Forward, backward and SGD by ExecuTorch.

    Choose it to see what a step costs in the runtime that people put on devices. Its portable operators are made to
    run anywhere and be small, not to be fast.

    Args:
        work: its optimizer must be `torch.optim.SGD`, the only one that ExecuTorch has.

    Attributes:
        base_bytes: what the process held when the program was loaded and the batch copied.
        notes: what is to be known beside the numbers.

    Raises:
        NotTrainable: an operator of the step cannot be exported or is none of ExecuTorch's.
    """

    def __init__(self, work: Work) -> None:
        with _quiet():
            from executorch.extension.training import (
                _load_for_executorch_for_training_from_buffer as load,
            )
        self._options = _sgd_options(work.optimizer)
        self._batch = tuple(_contiguous(tensor) for tensor in work.batch)
        with _quiet(), _named("export"):
            # What is loaded reads from it, and does not keep it.
            self._program = run_in_child(lambda: _exported(work.model, work.loss_fn, self._batch))
        with _quiet(), _named("load"):
            self._module = load(self._program)
        self._optimizer: Any = None
        gc.collect()
        memory.trim()
        self.base_bytes = memory.process_bytes()
        self.notes = (
            f"ExecuTorch {version('executorch')} with its portable operators, not XNNPACK's",
            "memory counts above the level with the program loaded, which holds the weights, and the batch copied",
        )

    def __call__(self) -> torch.Tensor:
        with _named("run") if self._optimizer is None else nullcontext():
            (loss,) = self._module.forward_backward("forward", self._batch)
        if self._optimizer is None:
            self._optimizer = self._make_optimizer()
        self._optimizer.step(self._module.named_gradients())
        return loss

    def _make_optimizer(self) -> Any:
        """Parameters have their names after the first run."""
        with _quiet():
            from executorch.extension.training import get_sgd_optimizer

            return get_sgd_optimizer(self._module.named_parameters(), *self._options)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._loss_fn(self.model(inputs), target)


def _exported(model: nn.Module, loss_fn: Callable[..., torch.Tensor], batch: tuple[Any, ...]) -> bytes:
    from executorch.exir import to_edge
    from torch.export import export
    from torch.export.experimental import _export_forward_backward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
        joint = _export_forward_backward(export(_WithLoss(plain, loss_fn), batch, strict=True))
        return bytes(to_edge(joint).to_executorch().buffer)


def _sgd_options(optimizer: torch.optim.Optimizer) -> tuple[float, float, float, float, bool]:
    if not isinstance(optimizer, torch.optim.SGD):
        raise NotTrainable(f"ExecuTorch has SGD only, not {type(optimizer).__name__}")
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"]


def _contiguous(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise NotTrainable(f"ExecuTorch takes a batch of tensors, not of {type(value).__name__}")
    return value.contiguous()


@contextmanager
def _named(doing: str) -> Iterator[None]:
    """What ExecuTorch raises is of many types."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        # Nobody but the system sends the export's process this signal.
        if isinstance(error, ChildFailed) and "killed by SIGKILL" in first:
            raise MemoryError(f"ExecuTorch cannot {doing} the step: {first}") from error
        raise NotTrainable(f"ExecuTorch cannot {doing} the step: {first}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """It calls its interface experimental, each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
