"""The suites: which cells there are, in the order in which they are measured.

A suite is a function from `Choices` to jobs. Plain PyTorch comes before torch_odt, whose budget may be a share of what
it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_odt.measure.job import How, Job
from torch_odt.measure.networks import CIFAR_SHAPE, IMAGE_SHAPES, is_network
from torch_odt.measure.record import DEFAULT_OPTIMIZER, Cell, Engine, Mode, Number
from torch_odt.memory._units import format_bytes, parse_bytes

UBIQUITOUS = ("lenet", "alexnet", "mobilenet_v2", "squeezenet1_1", "googlenet")
REDUCED = ("mentee", "reduced_mobilenet", "reduced_resnet")
_QUICK_PIXELS, _PIXELS = 128, 224


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a user may choose; an empty list takes the suite's own.

    Attributes:
        quick: fewer and smaller cells, for some minutes on two cores.
        models: by name.
        sample_shape: of one sample, for models that are not the suite's own.
        own_batches: size of the batch and shape of a sample, by model, of those that bring a batch of their own.
        batch_sizes, threads, governors: to measure with.
        cores: of this machine.
        device: to train on, beside the CPU where it is another.
        executorch: measure ExecuTorch's training steps beside plain PyTorch's.
        budgets: for torch_odt, a cell for each: bytes, or a share of what plain PyTorch took, such as "50%". Long runs
            and runs beside a neighbour take the first one.
        largest_batch_bytes: into which the largest batch is to fit.
        how: how cells are measured.
    """

    quick: bool = False
    models: Sequence[str] = ()
    sample_shape: tuple[int, ...] = ()
    own_batches: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    batch_sizes: Sequence[int] = ()
    threads: Sequence[int] = ()
    governors: Sequence[str] = ()
    cores: int = 1
    device: str = "cpu"
    executorch: bool = False
    budgets: Sequence[str] = ("50%",)
    largest_batch_bytes: int = 0
    how: How = field(default_factory=How)

    @property
    def thread_counts(self) -> list[int]:
        """Ascending; as many as there are cores at last, unless others were chosen."""
        return sorted(set(self.threads) or {1, max(1, self.cores // 2), self.cores})

    def batches_of(self, model: str, usual: Sequence[int]) -> list[int]:
        """The sizes to measure a model with: its own batch's, those that were chosen, or the suite's."""
        return [self.own_batches[model][0]] if model in self.own_batches else list(self.batch_sizes or usual)

    def shape_of(self, model: str) -> tuple[int, ...]:
        if model in self.own_batches:
            return self.own_batches[model][1]
        if model in IMAGE_SHAPES:
            return IMAGE_SHAPES[model]
        if is_network(model):
            return CIFAR_SHAPE
        pixels = _QUICK_PIXELS if self.quick else _PIXELS
        return self.sample_shape or (3, pixels, pixels)


def ubiquitous(choices: Choices) -> Iterator[Job]:
    """Cai et al.: time, memory and energy of inference and training by network, batch, threads and governor.

    Then the largest batch that fits, and temperatures and frequencies over a long run. A quick run measures torch_odt
    and a single thread at the larger batch alone.
    """
    usual = [1, 8] if choices.quick else [1, 4, 16, 64]
    models = list(choices.models) or list(UBIQUITOUS)
    counts = choices.thread_counts
    for model in models:
        batches = choices.batches_of(model, usual)
        for batch in batches:
            for governor in choices.governors or [""]:
                for threads in counts:
                    is_corner = threads == counts[-1] and batch == batches[-1]
                    yield from _sides(
                        choices, "ubiquitous", model, batch, threads, governor=governor,
                        inference=not choices.quick or threads == counts[-1],
                        planned=not choices.quick or is_corner,
                        training=not choices.quick or threads == counts[-1] or batch == batches[-1],
                    )  # fmt: skip
    for model in _beyond_lenet(models)[: 1 if choices.quick else None]:
        yield from _largest_batch(choices, "ubiquitous", model, counts[-1])
    hot = "mobilenet_v2" if "mobilenet_v2" in models else models[-1]
    for engine, budget in _both(choices):
        yield _job(
            choices, "ubiquitous", hot, choices.batches_of(hot, usual)[-1], counts[-1], "training", engine,
            experiment="long run", budget=budget,
        )  # fmt: skip


def architectures(choices: Choices) -> Iterator[Job]:
    """Chen et al.: its three networks, layers by width and depth, and what training does to other programs.

    A quick run measures torch_odt at the ends of each sweep alone.
    """
    usual = [16 if choices.quick else 128]
    (batch, *_) = choices.batch_sizes or usual
    threads = choices.thread_counts[-1]
    models = list(choices.models) or list(REDUCED)
    for model in models:
        yield from _sides(choices, "architectures", model, choices.batches_of(model, usual)[0], threads)
    widths = (64, 128, 256) if choices.quick else (64, 128, 256, 512)
    depths = (1, 2, 4) if choices.quick else (1, 2, 4, 8)
    sizes = [(width, depth) for width in widths for depth in depths]
    for layer in ("fully_connected", "convolution", "separable"):
        for width, depth in sizes:
            # The paper compares separable convolutions with standard ones layer by layer.
            if layer == "separable" and depth > 1:
                continue
            is_corner = width in (widths[0], widths[-1]) and depth in (depths[0], depths[-1])
            yield from _sides(
                choices, "architectures", f"{layer}_{width}x{depth}", batch, threads,
                planned=not choices.quick or is_corner,
                factors={"layer": layer.replace("_", " "), "width": width, "depth": depth},
            )  # fmt: skip
    # The other program alone knows no engine.
    beside: list[tuple[str, Engine, str]] = [("none", "torch", "")]
    beside += [(how, *each) for each in _both(choices) for how in ("foreground", "background")]
    for training, engine, budget in beside:
        yield _job(
            choices, "architectures", models[0], choices.batches_of(models[0], usual)[0], threads, "training", engine,
            experiment="neighbour", factors={"training": training}, budget=budget,
        )  # fmt: skip


def breakdown(choices: Choices) -> Iterator[Job]:
    """The survey's Figure 2 (the survey of on-device training): what a training step's memory is for, and by layer."""
    usual = [8 if choices.quick else 16]
    deeper = replace(choices, how=replace(choices.how, layers=True, operators=False))
    for model in choices.models or UBIQUITOUS:
        for batch in choices.batches_of(model, usual):
            yield from _sides(deeper, "breakdown", model, batch, choices.thread_counts[-1], inference=False)


SUITES: dict[str, Callable[[Choices], Iterator[Job]]] = {
    "ubiquitous": ubiquitous,
    "architectures": architectures,
    "breakdown": breakdown,
}


def _sides(
    choices: Choices,
    suite: str,
    model: str,
    batch: int,
    threads: int,
    *,
    governor: str = "",
    factors: dict[str, Number | str] | None = None,
    inference: bool = True,
    training: bool = True,
    planned: bool = True,
) -> Iterator[Job]:
    """A configuration's cells: inference, training by plain PyTorch, torch_odt and others, and on the other device.

    Inference has no torch_odt beside it: what it plans is training.
    """
    sides: list[tuple[Mode, Engine]] = []
    sides += [("inference", "torch")] if inference else []
    sides += [("training", "torch")] if training else []
    for mode, engine in sides:
        yield _job(choices, suite, model, batch, threads, mode, engine, governor=governor, factors=factors)
    for budget in _descending(choices.budgets) if planned else ():
        yield _job(
            choices, suite, model, batch, threads, "training", "torch_odt", governor=governor, factors=factors,
            budget=budget,
        )  # fmt: skip
    if choices.executorch and training and not governor:
        yield _job(choices, suite, model, batch, threads, "training", "executorch", factors=factors)
    if choices.device != "cpu" and threads == choices.thread_counts[-1]:
        for mode, engine in sides:
            yield _job(
                choices, suite, model, batch, threads, mode, engine, governor=governor, factors=factors,
                device=choices.device,
            )  # fmt: skip
        if planned:
            job = _job(
                choices, suite, model, batch, threads, "training", "torch_odt", governor=governor, factors=factors,
                device=choices.device, budget=choices.budgets[0],
            )  # fmt: skip
            yield replace(job, cell=replace(job.cell, outcome="skipped", reason="torch_odt trains on the CPU"))


def _descending(budgets: Sequence[str]) -> list[str]:
    """Shares before bytes, the largest first: a smaller one's plan rests on what was measured within the larger."""
    shares = [budget for budget in budgets if budget.strip().endswith("%")]
    others = [budget for budget in budgets if budget not in shares]
    shares.sort(key=lambda budget: -float(budget.strip().removesuffix("%")))
    return [*shares, *sorted(others, key=lambda budget: -parse_bytes(budget))]


def _both(choices: Choices) -> Iterator[tuple[Engine, str]]:
    """Engines with their budgets, for what takes minutes each: torch_odt within the first one alone."""
    yield "torch", ""
    yield "torch_odt", choices.budgets[0]


def _largest_batch(choices: Choices, suite: str, model: str, threads: int) -> Iterator[Job]:
    limit = choices.largest_batch_bytes or (128 << 20 if choices.quick else 512 << 20)
    exact = replace(choices, how=replace(choices.how, budget_bytes=limit))
    engines: dict[Engine, str] = {"torch": "", "torch_odt": format_bytes(limit).replace(" ", "")}
    for engine, budget in engines.items():
        job = _job(
            exact, suite, model, 0, threads, "training", engine, experiment="largest batch", budget=budget,
            factors={"limit_bytes": limit},
        )  # fmt: skip
        if model in choices.own_batches:
            reason = "the model brings a batch of its own, which cannot be made larger"
            job = replace(job, cell=replace(job.cell, outcome="skipped", reason=reason))
        yield job


def _job(
    choices: Choices,
    suite: str,
    model: str,
    batch: int,
    threads: int,
    mode: Mode = "training",
    engine: Engine = "torch",
    *,
    experiment: str = "step",
    governor: str = "",
    device: str = "cpu",
    budget: str = "",
    factors: dict[str, Number | str] | None = None,
) -> Job:
    cell = Cell(
        suite=suite, experiment=experiment, model=model, batch_size=batch, input_shape=choices.shape_of(model),
        mode=mode, engine=engine, threads=threads, governor=governor, device=device, factors=factors or {},
        budget=budget, optimizer=choices.how.optimizer if mode == "training" else DEFAULT_OPTIMIZER,
    )  # fmt: skip
    return Job(cell, choices.how)


def _beyond_lenet(models: Sequence[str]) -> list[str]:
    """LeNet fits everywhere; of the others, SqueezeNet first, whose steps are short."""
    others = [model for model in models if model != "lenet"] or list(models)
    return sorted(others, key=lambda model: model != "squeezenet1_1")
