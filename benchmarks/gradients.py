"""Whether a step's gradients and buffers are plain PyTorch's: their distance to a float64 run of the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from workloads import Batch, Workload

SEED = 2


def write_reference(workload: Workload, path: Path) -> dict[str, Any]:
    """Writes gradients and buffers of the first step in float64, and how far plain float32 is from them."""
    distances = {}
    state = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
    plain = _plain_step(workload)
    workload.model.double().load_state_dict(state)
    workload.model.zero_grad()
    reference = _plain_step(Workload(workload.name, workload.model, [_in_float64(workload.batches[0])]))
    for kind in reference:
        distances[kind] = distance(plain[kind], reference[kind])
    torch.save({"reference": reference, "distances": distances}, path)
    return {"plain_distances": distances}


def compare(step: Callable[[Batch], torch.Tensor], workload: Workload, path: Path) -> dict[str, Any]:
    """Runs one step from the model's present state; says how far it is from the reference and whether that is exact."""
    torch.manual_seed(SEED)
    with _used_up(workload.model) as gradients:
        step(workload.batches[0])
    ours = _collect(workload.model)
    ours["gradients"] |= gradients
    saved = torch.load(path)
    distances = {kind: distance(ours[kind], saved["reference"][kind]) for kind in ours}
    exact = {kind: value <= 2 * saved["distances"][kind] + 1e-6 for kind, value in distances.items()}
    return {"distances": distances, "plain_distances": saved["distances"], "exact": exact}


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The norm of all differences over the norm of the reference."""
    if ours.keys() != reference.keys():
        return float("inf")
    difference = sum(
        float((ours[name].double() - tensor.double()).square().sum()) for name, tensor in reference.items()
    )
    scale = sum(float(tensor.double().square().sum()) for tensor in reference.values())
    return (difference / scale) ** 0.5 if scale else difference**0.5


def _plain_step(workload: Workload) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(SEED)
    workload.loss(workload.batches[0]).backward()
    return _collect(workload.model)


def _collect(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"gradients": gradients, "buffers": buffers}


@contextmanager
def _used_up(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The gradients that are gone after a step, because parameters are updated in its backward pass."""
    # Not at the top: other methods are measured in processes that have not loaded it.
    from torch_odt.capture.parameter_updates import update
    from torch_odt.execute import optimizer_updates

    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def note_and_update(rule: str, options: Any, *tensors: torch.Tensor, is_first: bool) -> None:
        parameter, gradient, *_ = tensors
        found[names[parameter.data_ptr()]] = gradient.clone()
        update(rule, options, *tensors, is_first=is_first)

    with mock.patch.object(optimizer_updates, "update", note_and_update):
        yield found


def _in_float64(batch: Batch) -> Batch:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
