"""How it is trained: every method is a function from a workload to a step, and a row of configurations.

A step takes a batch and runs zero_grad, forward, backward and the optimizer; gradients are in `.grad` afterwards,
unless the backward pass has used them up.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from workloads import Batch, Workload

Step = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Configuration:
    """One cell of the benchmark.

    Attributes:
        method: the name of the function that makes the step.
        value: the method's knob: samples, segments, a fraction.
        environment: variables of the process.
        headline: whether a target of the summary reads it, so that it is measured in all rounds.
    """

    method: str
    value: float | None = None
    environment: dict[str, str] = field(default_factory=dict)
    headline: bool = False

    @property
    def label(self) -> str:
        if self.value is None:
            return self.method
        return f"{self.method} {'smallest' if self.method == 'torch_odt' and self.value == 0 else f'{self.value:g}'}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"label": self.label}


# Keeps glibc from returning pages between steps, which makes eager faster and its resident size larger.
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

BUDGET_SHARES = (0.5, 1.0, 0.4, 0.3, 0.25, 0.0)
SEGMENTS = (2, 3, 4, 6, 9, 13, 19)
COMPILE_BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)


def configurations(model: str, batch_size: int, blocks: int, quick: bool = False) -> list[Configuration]:
    """All cells of a model; the smallest budget comes last, plain eager first."""
    found = [Configuration("eager"), Configuration("eager, tuned malloc", environment=TUNED_MALLOC)]
    sizes = [s for s in (8, 4, 2, 1) if s < batch_size]
    segments = [s for s in SEGMENTS if s <= blocks]
    budgets = COMPILE_BUDGETS
    shares = BUDGET_SHARES
    if quick:
        sizes, segments, budgets, shares = sizes[1::2], segments[1::2], (0.5,), (0.5, 0.3)
    found += [Configuration("micro-batches", s) for s in sizes]
    found += [Configuration("checkpoint_sequential", s) for s in segments]
    found += [Configuration("selective checkpoint, blocks"), Configuration("selective checkpoint, whole")]
    if model == "densenet121":
        found.append(Configuration("memory_efficient=True"))
    found += [Configuration("torch.compile", budget) for budget in budgets]
    found += [Configuration("torch_odt", share, headline=True) for share in shares]
    return found


def make_step(configuration: Configuration, workload: Workload, options: dict[str, Any]) -> Step:
    """The step of a configuration; what this call and the first steps allocate counts as the method's memory."""
    return _METHODS[configuration.method](workload, _optimizer(workload, options), configuration.value, options)


def _optimizer(workload: Workload, options: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=options["momentum"])


def _plain(workload: Workload, optimizer: torch.optim.Optimizer, _value: Any, _options: Any) -> Step:
    return _stepping(optimizer, workload.loss)


def _micro_batches(workload: Workload, optimizer: torch.optim.Optimizer, samples: float, _options: Any) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        size = len(batch["labels"])
        parts = zip(*(tensor.split(int(samples)) for tensor in batch.values()), strict=True)
        total = torch.zeros(())
        for part in parts:
            piece = dict(zip(batch, part, strict=True))
            loss = workload.loss(piece) * (len(piece["labels"]) / size)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def _segments(workload: Workload, optimizer: torch.optim.Optimizer, segments: float, _options: Any) -> Step:
    def loss(batch: Batch) -> torch.Tensor:
        blocks, inputs, finish = workload.chain(batch)
        count = min(int(segments), len(blocks))
        return finish(checkpoint_sequential(blocks, count, inputs, use_reentrant=False))

    return _stepping(optimizer, loss)


_SAVED_OPERATORS = [
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def _save_matmuls(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(whole: bool, workload: Workload, optimizer: torch.optim.Optimizer, _value: Any, _options: Any) -> Step:
    # A saved convolution output must not be changed in place by the activation behind it.
    for module in workload.model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
    run = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def loss(batch: Batch) -> torch.Tensor:
        blocks, x, finish = workload.chain(batch)
        groups = [nn.Sequential(*map(_as_module, blocks))] if whole else blocks
        for group in groups:
            x = run(group, x)
        return finish(x)

    return _stepping(optimizer, loss)


def _as_module(block: Any) -> nn.Module:
    if isinstance(block, nn.Module):
        return block
    module = nn.Module()
    module.forward = block
    return module


def _compiled(workload: Workload, optimizer: torch.optim.Optimizer, budget: float, _options: Any) -> Step:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    functorch_config.activation_memory_budget = budget
    # Draws dropout masks as eager does, so that gradients can be compared.
    inductor_config.fallback_random = True
    backend = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    workload.model.compile(backend=backend)
    return _stepping(optimizer, workload.loss)


def _torch_odt(workload: Workload, optimizer: torch.optim.Optimizer, share: float, options: dict[str, Any]) -> Step:
    budget_bytes = int(share * options["eager_bytes"]) if share else options["smallest_feasible_bytes"]
    train_step = _train_step(workload, optimizer, budget_bytes, options)

    def step(batch: Batch) -> torch.Tensor:
        arguments, named = _arguments(batch)
        return train_step(*arguments, **named)

    step.train_step = train_step  # type: ignore[attr-defined]
    return step


def find_smallest(workload: Workload, options: dict[str, Any]) -> int:
    """The smallest budget that torch_odt names when it refuses one; a process of its own then trains in it."""
    import torch_odt as odt

    arguments, named = _arguments(workload.batches[0])
    try:
        _train_step(workload, _optimizer(workload, options), 4096, options)(*arguments, **named)
    except odt.InfeasibleBudget as refusal:
        return refusal.smallest_feasible_bytes
    raise AssertionError("4096 bytes were enough")


def _train_step(workload: Workload, optimizer: torch.optim.Optimizer, budget_bytes: int, options: Any) -> Any:
    import torch_odt as odt

    loss_fn = nn.functional.cross_entropy if "images" in workload.batches[0] else None
    budget = odt.Budget(budget_bytes, of="training")
    return odt.TrainStep(workload.model, loss_fn, optimizer, budget=budget, cache=options.get("cache"))


def _arguments(batch: Batch) -> tuple[tuple[torch.Tensor, ...], Batch]:
    return (tuple(batch.values()), {}) if "images" in batch else ((), batch)


def _stepping(optimizer: torch.optim.Optimizer, loss_of: Callable[[Batch], torch.Tensor]) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


_METHODS: dict[str, Callable[..., Step]] = {
    "eager": _plain,
    "eager, tuned malloc": _plain,
    "float64": _plain,
    "memory_efficient=True": _plain,
    "micro-batches": _micro_batches,
    "checkpoint_sequential": _segments,
    "selective checkpoint, blocks": functools.partial(_selective, False),
    "selective checkpoint, whole": functools.partial(_selective, True),
    "torch.compile": _compiled,
    "torch_odt": _torch_odt,
}
