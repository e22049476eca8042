"""Blockwise training: the model is cut in depth into blocks that fit, and they are trained one after the other.

K. Zhang et al., "Memory-adaptive Depth-wise Heterogenous Federated Learning" (FeDepth), 2023: a device that cannot hold
the activations of a whole model trains it in blocks from the input to the output, the earlier ones frozen, each with a
head of its own for the loss. The peak is that of the largest block, and every weight is trained, where width
slimming trains some. Here the planner says what a block takes, and so where to cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache as remember
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.chain import Chain, Cut
from torch_odt.adapt.kept_batches import KeptBatches
from torch_odt.adapt.layers import evaluating
from torch_odt.adapt.partition import UnitTooLarge, even_blocks, fewest_blocks
from torch_odt.cache import CacheOption
from torch_odt.errors import CaptureError, InfeasibleBudget
from torch_odt.execute.accounting import held_by_process
from torch_odt.execute.dry_run import plan
from torch_odt.memory._units import format_bytes
from torch_odt.runtime.budget import Budget

MakeHead = Callable[[Cut], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_UNLIMITED = Budget(1 << 50, of="training")


class PooledHead(nn.Module):
    """The mean over all dimensions but samples and channels, and a linear layer.

    Args:
        channels, classes: of its input and output.
        channel_dim: which dimension of its input holds the channels.

    Example:
        >>> PooledHead(8, 10)(torch.ones(2, 8, 5, 5)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int, classes: int, *, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [dim for dim in range(1, x.dim()) if dim != self.channel_dim]
        return self.linear(x.mean(pooled) if pooled else x)


@dataclass
class Stage:
    """One block's turn.

    Attributes:
        name: the block, by the layers that it ends with and begins after.
        module: the block and its head: what trains. Its layers are the model's own, so that the model has what it
            learns. The last block ends with the model's own classifier. Its operators are those of training:
            `eval()` ends dropout that is a module, not `F.dropout` in the model's own code. To evaluate, run the model.
        frozen: what runs before it; None for the first block.
        bytes: the fewest that a step of it is trained in, with its inputs and what computes them.
        budget: what to give to `TrainStep`: what is left of the budget beside the inputs.
    """

    name: str
    module: nn.Module = field(repr=False)
    frozen: nn.Module | None = field(repr=False)
    bytes: int
    budget: Budget
    _samples_at_once: int = field(repr=False)

    def parameters(self) -> list[nn.Parameter]:
        """What trains, for the optimizer."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def inputs(self, x: Tensor) -> Tensor:
        """What the block is given for a batch of the model's inputs.

        The earlier blocks run without gradients and in evaluation mode: BatchNorm's statistics stay what they are and
        no dropout is made. They run over so many samples at a time as the budget leaves room for.
        """
        if self.frozen is None:
            return x
        parts = x.split(self._samples_at_once)
        with evaluating(self.frozen), torch.no_grad():
            first: Tensor = self.frozen(parts[0])
            if len(parts) == 1:
                return first
            # Held once: together, the parts would take as much again.
            made = _empty_for(len(x), first)
            made[: len(first)] = first
            del first
            for number, part in enumerate(parts[1:], start=1):
                start = number * self._samples_at_once
                made[start : start + len(part)] = self.frozen(part)
        return made

    def keep(self, batches: Iterable[tuple[Tensor, Tensor]], folder: str | Path) -> KeptBatches:
        """Compute the inputs of batches once, and keep them in files.

        Choose it where the same batches are gone through several times, and the disk is faster than the earlier blocks.

        Args:
            batches: of the model's inputs and targets.
            folder: new or empty.

        Returns:
            Pairs of the block's inputs and targets, in the same order each time that they are iterated over.
        """
        return KeptBatches.write(((self.inputs(x), y) for x, y in batches), folder)


def _empty_for(samples: int, like: Tensor) -> Tensor:
    """For so many samples, with the dimensions lying as those of a part do."""
    strides = like.stride()
    layout = [0, *sorted(range(1, like.dim()), key=lambda dim: -strides[dim])]
    shape = (samples, *like.shape[1:])
    return torch.empty_permuted(shape, layout, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Blockwise:
    """A model in blocks: iterate over it to train them in turn, as often as you like.

    Attributes:
        model: whose layers the blocks are made of. It is an ordinary module all the time.
        stages: in the order of training. Heads keep what they have learnt.
    """

    model: nn.Module = field(repr=False)
    stages: tuple[Stage, ...]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest block."""
        return max(stage.bytes for stage in self.stages)

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__} in {len(self)} blocks, trained in turn"]
        for stage in self.stages:
            trained = sum(parameter.numel() for parameter in stage.parameters())
            lines.append(f"  {stage.name}: {trained:,} parameters in {format_bytes(stage.bytes)}")
        return "\n".join(lines)


def blockwise(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: tuple[Tensor, Tensor],
    *,
    budget: int | str | Budget | None = None,
    blocks: int | None = None,
    optimizer: MakeOptimizer | None = None,
    head: MakeHead | None = None,
    planner: str = "auto",
    cache: CacheOption = None,
) -> Blockwise:
    """Cut a model in depth into blocks that are trained one after the other, each inside the budget.

    Choose it where not even the planner's smallest schedule of the whole model fits, or where recomputing would cost
    more time than the blocks do, and all weights have to be trained. Layers learn from their own block's head, not
    from the end of the model: the result is another one than that of training all at once.

    Args:
        model: an image classifier of torchvision, an `nn.Sequential`, or any module of one input that torch.fx
            traces and that is a chain somewhere. Put it into training mode.
        loss_fn: `loss_fn(outputs, target)`, for the model's outputs and those of the heads.
        batch: inputs and target as they will be trained with; nothing is learnt from them.
        budget: bytes in which each block's step is to fit, its inputs included; the fewest blocks are made that do.
        blocks: so many blocks instead, as even as possible.
        optimizer: makes an optimizer from parameters, so that its state is counted; none is counted by default.
        head: makes the head of an inner block from the `Cut` behind it, which has the shape of the block's output;
            `PooledHead` for the model's classes by default.
        planner, cache: as for `odt.plan`; a stage's budget is for steps with the same planner. "keep-all" makes
            blocks in which nothing has to be recomputed.

    Returns:
        The blocks, to be iterated over.

    Raises:
        InfeasibleBudget: a block of one layer takes more; it names the smallest budget that would do.
        ValueError: the model is no chain (see `Chain`), or both or neither of `budget` and `blocks` is given, or there
            cannot be so many blocks, or the model returns no classes and `head` is not given.
        CaptureError: a block cannot be captured, so that nobody knows what it takes.

    Example:
        >>> import torch_odt as odt
        >>> from torch.nn import functional as F
        >>> layers = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        >>> model, batch = nn.Sequential(*layers, nn.Linear(16, 4)), (torch.ones(8, 16), torch.zeros(8).long())
        >>> for stage in blockwise(model, F.cross_entropy, batch, blocks=2, cache=False):
        ...     optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        ...     step = odt.TrainStep(stage.module, F.cross_entropy, optimizer, budget=stage.budget, cache=False)
        ...     loss = step(stage.inputs(batch[0]), batch[1])
    """
    if (budget is None) == (blocks is None):
        raise ValueError("give either a budget, in which each block is to fit, or the number of blocks")
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int)):
        raise TypeError(f"blocks={blocks!r}: give the number of blocks")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError("batch: give inputs and target, (x, y)")
    x, target = batch
    if not len(x):
        raise ValueError("the batch is empty: give one of the size that will be trained with")
    chain = Chain(model, x)
    units = _Units(chain, loss_fn, x, target, optimizer, head or _pooled_head(chain), planner, cache)
    guess = [chain.bytes_between(start, end) for start, end in units.ends]
    if blocks is not None:
        if not 1 <= blocks <= len(guess):
            raise ValueError(f"blocks={blocks}: {type(model).__name__} can be cut into 1 to {len(guess)} blocks")
        found = even_blocks(len(guess), units.bytes_of, guess, blocks)
        limit_bytes = max(units.bytes_of(*block) for block in found)
    else:
        assert budget is not None
        resolved = Budget.of_value(budget).resolve(held_by_process())
        limit_bytes = resolved.growth_bytes
        try:
            found = fewest_blocks(len(guess), units.bytes_of, guess, limit_bytes)
        except UnitTooLarge as error:
            hints = ("smaller batches", "an optimizer with less state")
            smallest_bytes = resolved.in_terms_of(error.smallest_bytes)
            detail = f"{type(model).__name__} is cut into {len(guess)} blocks already, and one of them takes this"
            if resolved.of == "process":
                detail += f", with the {format_bytes(resolved.level_bytes)} that the process held before"
            raise InfeasibleBudget(budget, smallest_bytes, hints, detail) from None
    return Blockwise(model, tuple(units.stage(first, end, limit_bytes) for first, end in found))


class _Units:
    """The smallest blocks of a chain, and what runs of them take."""

    def __init__(
        self,
        chain: Chain,
        loss_fn: Callable[..., Any],
        x: Tensor,
        target: Tensor,
        optimizer: MakeOptimizer | None,
        head: MakeHead,
        planner: str,
        cache: CacheOption,
    ) -> None:
        self._chain = chain
        self._loss_fn = loss_fn
        self._batch = (x, target)
        self._optimizer = optimizer
        self._head = head
        self._planner = planner
        self._cache = cache
        bounds: list[Cut | None] = [None, *chain.cuts, None]
        self.ends = list(pairwise(bounds))
        self.bytes_of = remember(self._bytes_of)

    def stage(self, first: int, end: int, limit_bytes: int) -> Stage:
        start = self.ends[first][0]
        taken = self.bytes_of(first, end)
        if start is None:
            frozen, at_once, beside_bytes = None, self._chain.batch_size, 0
        else:
            frozen = self._chain.segment(None, start, training=False)
            at_once = self._samples_at_once(start, limit_bytes - taken)
            beside_bytes = start.nbytes + at_once * self._sample_bytes(start)
        budget = Budget(limit_bytes - beside_bytes, of="training")
        name = _block_name(start, self.ends[end - 1][1])
        return Stage(name, self._module(first, end), frozen, taken, budget, at_once)

    def _samples_at_once(self, start: Cut, spare_bytes: int) -> int:
        """Of the frozen blocks: the fewest are in the block's bytes, others have half of what is left over."""
        fewest = self._fewest_at_once()
        more = spare_bytes // 2 // max(1, self._sample_bytes(start))
        return min(self._chain.batch_size, fewest + more)

    def _fewest_at_once(self) -> int:
        """Samples that the frozen blocks cannot be run with fewer of: norms by the batch's statistics need all."""
        norms = (module for module in self._chain.model.modules() if isinstance(module, _BatchNorm))
        return self._chain.batch_size if any(norm.running_mean is None for norm in norms) else 1

    def _sample_bytes(self, start: Cut) -> int:
        return self._chain.forward_bytes(start) // self._chain.batch_size

    def _module(self, first: int, end: int) -> nn.Module:
        start, stop = self.ends[first][0], self.ends[end - 1][1]
        body = self._chain.segment(start, stop)
        if stop is None:
            return body
        like = next(self._chain.model.parameters())
        return nn.Sequential(body, self._head(stop).to(like.device, stop.dtype).train(self._chain.model.training))

    def _bytes_of(self, first: int, end: int) -> int:
        with torch.random.fork_rng(devices=[]):
            module = self._module(first, end)
        start = self.ends[first][0]
        x, target = self._batch
        if start is not None:
            x = torch.zeros(start.shape, dtype=start.dtype, device=x.device)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        name = _block_name(start, self.ends[end - 1][1])
        if not parameters:
            raise ValueError(f"nothing would train in the block {name!r}: let its parameters require gradients")
        made = plan(
            module,
            self._loss_fn,
            (x, target),
            budget=_UNLIMITED,
            optimizer=None if self._optimizer is None else self._optimizer(parameters),
            planner=self._planner,
            cache=self._cache,
        )
        if not made.captured or made.smallest_feasible_bytes is None:
            raise CaptureError(f"nobody knows what the block {name!r} takes: {'; '.join(made.notes)}")
        beside_bytes = 0 if start is None else start.nbytes + self._fewest_at_once() * self._sample_bytes(start)
        return made.smallest_feasible_bytes + beside_bytes


def _pooled_head(chain: Chain) -> MakeHead:
    shape = chain.output_shape
    if shape is None or len(shape) != 2:
        found = "something else than a tensor" if shape is None else f"a tensor of {shape}"
        raise ValueError(
            f"{type(chain.model).__name__} returns {found} and not samples x classes: say by head= what head inner "
            "blocks are to have"
        )
    return lambda cut: PooledHead(cut.shape[cut.channel_dim], shape[1], channel_dim=cut.channel_dim)


def _block_name(start: Cut | None, stop: Cut | None) -> str:
    if start is None:
        return "the whole model" if stop is None else f"up to {stop.name}"
    return f"after {start.name}" + ("" if stop is None else f", up to {stop.name}")
