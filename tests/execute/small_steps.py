"""A small network, and the same training by `TrainStep` and by a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import exactness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt

Batch = tuple[Tensor, Tensor]
PLENTY = odt.Budget("2GiB", of="training")


class Net(nn.Module):
    """Two layers over six features and three classes."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.first(x))))) * self.scale


def make_batches(count: int, size: int = 4, seed: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def make_step(model: nn.Module, loss_fn: Callable[..., Any] | None = F.cross_entropy, **options: Any) -> odt.TrainStep:
    """A step whose every bit is plain PyTorch's where the batch is not cut, and that leaves its gradients."""
    optimizer = options.pop("optimizer", None) or sgd(model.parameters())
    usual = {"budget": PLENTY, "disable_rewrites": exactness.WITH_GRADIENTS}
    return odt.TrainStep(model, loss_fn, optimizer, **usual | options)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_step(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    clip_grad_norm: float | None = None,
) -> Tensor:
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    return loss.detach()


def train_both(
    model: nn.Module,
    batches: Iterable[Batch],
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    plain_loss_fn: Callable[..., Tensor] | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    between: Callable[[int, nn.Module], None] | None = None,
    exact: bool = True,
    **options: Any,
) -> odt.TrainStep:
    """Train `model` with `TrainStep` and a copy of it in a plain loop; asserts that they are equal after each step.

    Args:
        groups: the optimizer's parameter groups; all parameters in one when None.
        between: what the user does to either model before step number i.
    """
    plain = copy.deepcopy(model)
    optimizers = [make_optimizer(m.parameters() if groups is None else groups(m)) for m in (model, plain)]
    schedulers = [make_scheduler(o) for o in optimizers] if make_scheduler else []
    step = make_step(model, loss_fn, optimizer=optimizers[0], **options)
    for index, batch in enumerate(batches):
        if between is not None:
            between(index, model)
            between(index, plain)
        state = torch.get_rng_state()
        expected = plain_step(plain, batch, optimizers[1], plain_loss_fn or loss_fn, options.get("clip_grad_norm"))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        loss = step(*batch)
        assert torch.equal(torch.get_rng_state(), after), "the random state differs"
        torch.testing.assert_close(loss, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
        for scheduler in schedulers:
            scheduler.step()
        assert_equal_models(model, plain, exact=exact)
    return step


def assert_equal_models(ours: nn.Module, plain: nn.Module, *, exact: bool = True) -> None:
    """Parameters, gradients and buffers."""
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    assert list(ours.state_dict()) == list(plain.state_dict())
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: {p.grad} {q.grad}"
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, **tolerance, msg=lambda m, name=name: f"{name}.grad: {m}")
