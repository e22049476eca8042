"""Steps that page to a file: the bits are plain PyTorch's, nothing stays on the disk, and no error loses anything."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS
from torch import Tensor, nn
from wrapped_models import training

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.capture.costs import TransferCosts
from torch_odt.execute import page_file
from torch_odt.execute.paging import Page
from torch_odt.execute.wrap import session_of
from torch_odt.planning.schedule import PageIn, PageOut

pytestmark = pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most tests train the same network: it is traced and measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Transfers are so cheap for the planner that whatever has to go is paged."""

    def measure(pager: Any, limit_bytes: int) -> TransferCosts:
        return TransferCosts(0.0, 1e15, 0.0, 1e15, limit_bytes)

    monkeypatch.setattr(page_file, "_measure", measure)
    monkeypatch.setenv("TORCH_ODT_CACHE", str(cache))


class Deep(nn.Module):
    """Convolutions, BatchNorm and dropout; three megabytes for each."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            layers += [nn.Conv2d(3 if index == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
            layers += [nn.Dropout(0.1)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(x)).mean((2, 3)))


Batch = tuple[Tensor, Tensor]


def batches(count: int = 3, size: int = 4) -> list[Batch]:
    return [(torch.randn(size, 3, 112, 112), torch.randint(5, (size,))) for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def least_budget(model: nn.Module, batch: Batch, folder: Path | None, **options: Any) -> int:
    """The smallest that is accepted."""
    model = copy.deepcopy(model)
    usual: dict[str, Any] = {"disable_rewrites": WITH_GRADIENTS, "optimizer": sgd(model)}
    plan = odt.plan(model, F.cross_entropy, batch, budget=training("1GiB"), page_to=folder, **usual | options)
    assert plan.smallest_feasible_bytes is not None
    return plan.smallest_feasible_bytes


def make_step(model: nn.Module, folder: Path | odt.PageFile, budget: int, **options: Any) -> odt.TrainStep:
    usual = {"budget": training(budget), "disable_rewrites": WITH_GRADIENTS, "page_to": folder}
    return odt.TrainStep(model, F.cross_entropy, sgd(model), **usual | options)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_plainly(model: nn.Module, data: list[Batch]) -> list[Tensor]:
    torch.manual_seed(5)
    optimizer = sgd(model)
    return [plain_step(model, optimizer, batch) for batch in data]


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


def paged(plan: odt.Plan) -> int:
    assert plan.schedule is not None
    outs = [i for i in plan.schedule.instructions if isinstance(i, PageOut)]
    assert bool(outs) == any(isinstance(i, PageIn) for i in plan.schedule.instructions)
    return len(outs)


def pager_of(step: odt.TrainStep) -> Any:
    assert step._request.page_file is not None
    return step._request.page_file.pager


@pytest.mark.parametrize("packs", [False, True])
def test_every_bit_is_plain_pytorchs(tmp_path: Path, packs: bool) -> None:
    model, data = Deep(), batches()
    plain = copy.deepcopy(model)
    folder = odt.PageFile(tmp_path, limit="64MiB", packs=packs)
    step = make_step(model, folder, least_budget(model, data[0], tmp_path))
    torch.manual_seed(5)
    losses = [step(*batch) for batch in data]
    assert paged(step.plan) > 3 and not step.plan.recomputed
    assert any("are paged out and" in note for note in step.plan.notes)
    assert all(torch.equal(a, b) for a, b in zip(losses, train_plainly(plain, data), strict=True))
    assert_same(model, plain)
    stats = pager_of(step).stats()
    assert stats["pages"] == stats["file_bytes"] == 0 and stats["read_pages"] >= 3 * paged(step.plan)
    assert not list(tmp_path.iterdir()), "the file has no name"
    assert not any("departed" in note for note in step.plan.notes)


def test_a_plan_that_pages_travels_in_a_file(tmp_path: Path) -> None:
    model, data = Deep(), batches()
    plain = copy.deepcopy(model)
    made = odt.plan(
        model,
        F.cross_entropy,
        data[0],
        budget=training(least_budget(model, data[0], tmp_path)),
        disable_rewrites=WITH_GRADIENTS,
        page_to=tmp_path,
        optimizer=sgd(model),
    )
    made.save(file := tmp_path / "plan.json")
    optimizer = sgd(model)
    with pytest.raises(odt.PlanError, match="page_to="):
        odt.TrainStep(model, F.cross_entropy, optimizer, plan=file, budget=training("1GiB"))(*data[0])
    small = odt.TrainStep(
        model, F.cross_entropy, optimizer, plan=file, budget=training("1GiB"), page_to=odt.PageFile(tmp_path, "4MiB")
    )
    with pytest.raises(odt.PlanError, match="the file would hold"):
        small(*data[0])
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=file, budget=training("1GiB"), page_to=tmp_path)
    torch.manual_seed(5)
    losses = [step(*batch) for batch in data]
    assert step.plan.schedule == made.schedule and paged(step.plan) > 3
    assert pager_of(step).stats()["read_pages"] >= 3 * paged(made)
    assert all(torch.equal(a, b) for a, b in zip(losses, train_plainly(plain, data), strict=True))
    assert_same(model, plain)


def test_it_trains_where_recomputation_alone_does_not(tmp_path: Path) -> None:
    # Whatever is random stays in memory unless it is paged.
    model, batch = Deep(), batches(1)[0]
    disabled = {"disable_rewrites": WITH_GRADIENTS | {"pack_dropout_masks", "rematerialize_dropout"}}
    alone, together = (least_budget(model, batch, folder, **disabled) for folder in (None, tmp_path))
    assert together < alone
    step = make_step(model, tmp_path, together, **disabled)
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    step(*batch)
    assert step.plan.schedule is not None and paged(step.plan)
    train_plainly(plain, [batch])
    assert_same(model, plain)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")
def test_wrapped_models_page_too(tmp_path: Path) -> None:
    model, data = Deep(), batches(5)
    plain = copy.deepcopy(model)
    probe = odt.wrap(copy.deepcopy(model), budget=training(1 << 20), disable_rewrites=WITH_GRADIENTS)
    with pytest.raises(odt.InfeasibleBudget) as refused:
        probe(data[0][0])
    odt.wrap(
        model,
        budget=training(refused.value.smallest_feasible_bytes),
        disable_rewrites=WITH_GRADIENTS,
        page_to=tmp_path,
    )
    torch.manual_seed(5)
    optimizer = sgd(model)
    losses = [plain_step(model, optimizer, batch) for batch in data]
    assert paged(odt.plan_of(model))
    assert all(torch.equal(a, b) for a, b in zip(losses, train_plainly(plain, data), strict=True))
    assert_same(model, plain)
    opened = session_of(model)._page_file
    assert opened is not None and opened.pager.stats()["pages"] == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")
def test_a_wrapped_models_plan_that_pages_travels_in_a_file(tmp_path: Path) -> None:
    model, data = Deep(), batches(3)
    plain = copy.deepcopy(model)
    probe = odt.wrap(copy.deepcopy(model), budget=training(1 << 20), disable_rewrites=WITH_GRADIENTS)
    with pytest.raises(odt.InfeasibleBudget) as refused:
        probe(data[0][0])
    budget = training(refused.value.smallest_feasible_bytes)
    source = odt.wrap(copy.deepcopy(model), budget=budget, disable_rewrites=WITH_GRADIENTS, page_to=tmp_path)
    optimizer = sgd(source)
    for batch in data:
        plain_step(source, optimizer, batch)
    odt.plan_of(source).save(file := tmp_path / "plan.json")
    torch._dynamo.reset()
    with pytest.raises(odt.PlanError, match="page_to="):
        odt.wrap(model, plan=file, budget=training("1GiB"))
    odt.wrap(model, plan=file, budget=training("1GiB"), page_to=tmp_path)
    torch.manual_seed(5)
    optimizer = sgd(model)
    losses = [plain_step(model, optimizer, batch) for batch in data]
    assert paged(odt.plan_of(model)) and odt.plan_of(model).schedule == odt.plan_of(source).schedule
    assert all(torch.equal(a, b) for a, b in zip(losses, train_plainly(plain, data), strict=True))
    assert_same(model, plain)


def test_a_budget_that_needs_no_paging_is_kept_without_it(tmp_path: Path) -> None:
    # Where parameters are much, all gradients at once are more than paging can spare.
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(8)), nn.Linear(400, 5))
    batch = torch.randn(4, 400), torch.randint(5, (4,))
    least = {folder: least_budget(model, batch, folder, disable_rewrites=()) for folder in (None, tmp_path)}
    assert least[tmp_path] <= 1.05 * (least[None] or 0)
    step = make_step(model, tmp_path, least[tmp_path], disable_rewrites=())
    step(*batch)
    assert not paged(step.plan) and model[0].weight.grad is None


@pytest.mark.parametrize(("micro_batch", "share"), [(4, 0.6), (2, 0.8)])
def test_gradients_that_are_accumulated(tmp_path: Path, micro_batch: int, share: float) -> None:
    model = Deep()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    data = batches(4)
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"accumulation_steps": 2, "micro_batch": micro_batch}
    step = make_step(model, tmp_path, 1 << 30, **options)
    torch.manual_seed(5)
    step(*data[0])
    step(*data[1])
    roomy = step.plan.peak_bytes
    step.budget = training(int(share * roomy))
    step(*data[2])
    step(*data[3])
    assert paged(step.plan)
    torch.manual_seed(5)
    optimizer = sgd(plain)
    for pair in (data[:2], data[2:]):
        optimizer.zero_grad()
        for x, y in pair:
            (F.cross_entropy(plain(x), y) / 2).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@contextlib.contextmanager
def broken(descriptor: int) -> Iterator[None]:
    """Every transfer through a descriptor fails."""
    kept, broken_one = os.dup(descriptor), os.open("/", os.O_RDONLY)
    os.dup2(broken_one, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(broken_one)


@contextlib.contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """The device is full beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def cut_off(descriptor: int) -> Iterator[None]:
    """The file loses what it holds before anything comes back."""
    bring_back = Page.bring_back

    def cut_and_bring_back(page: Page, **options: bool) -> Tensor:
        os.ftruncate(descriptor, 0)
        return bring_back(page, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Page, "bring_back", cut_and_bring_back)
        yield


@pytest.mark.parametrize("fault", ["failed", "full", "torn"])
def test_a_failed_transfer_leaves_everything_as_it_was(tmp_path: Path, fault: str) -> None:
    model, data = Deep(), batches()
    plain = copy.deepcopy(model)
    step = make_step(model, tmp_path, least_budget(model, data[0], tmp_path))
    torch.manual_seed(5)
    step(*data[0])
    assert paged(step.plan)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(step.optimizer.state_dict())
    random = torch.get_rng_state()
    # The file is as large as one step has made it, and does not shrink.
    descriptor = pager_of(step).descriptor
    ending = {"failed": broken(descriptor), "full": files_at_most(4096), "torn": cut_off(descriptor)}[fault]
    with ending, pytest.raises(odt.PagingError, match=r"paging (out|in) .* bytes: ") as failed:
        step(*data[1])
    assert failed.value.fault == fault
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    after = step.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["momentum_buffer"], s["momentum_buffer"]) for i, s in state["state"].items())
    assert torch.equal(torch.get_rng_state(), random)
    assert pager_of(step).stats()["pages"] == 0
    for batch in data[1:]:
        step(*batch)
    train_plainly(plain, data)
    assert_same(model, plain)


def test_a_failed_transfer_is_made_up_for_by_a_plan_that_does_not_page(tmp_path: Path) -> None:
    model, data = Deep(), batches()
    plain = copy.deepcopy(model)
    step = make_step(model, tmp_path, least_budget(model, data[0], None), transactional=True)
    torch.manual_seed(5)
    step(*data[0])
    assert paged(step.plan)
    with broken(pager_of(step).descriptor), pytest.warns(odt.OdtWarning, match="by a plan that does not page"):
        step(*data[1])
    assert [retry.remedy for retry in step.last_retries] == ["without paging"] and not paged(step.plan)
    step(*data[2])
    assert paged(step.plan) and not step.last_retries
    train_plainly(plain, data)
    assert_same(model, plain)


def test_a_failed_transfer_that_nothing_makes_up_for_undoes_the_step(tmp_path: Path) -> None:
    model, data = Deep(), batches(2)
    plain = copy.deepcopy(model)
    disabled = {"disable_rewrites": WITH_GRADIENTS | {"pack_dropout_masks", "rematerialize_dropout"}}
    step = make_step(
        model, tmp_path, least_budget(model, data[0], tmp_path, **disabled), transactional=True, **disabled
    )
    torch.manual_seed(5)
    step(*data[0])
    assert paged(step.plan)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with (
        broken(pager_of(step).descriptor),
        pytest.warns(odt.OdtWarning, match="by a plan that does not page"),
        pytest.raises(odt.PagingError),
    ):
        step(*data[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    step(*data[1])
    train_plainly(plain, data)
    assert_same(model, plain)


def wrapped_to_page(folder: Path, batch: Batch) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model after two steps in the least that does without paging, and its optimizer."""
    model = Deep()
    probe = odt.wrap(copy.deepcopy(model), budget=training(1 << 20), disable_rewrites=WITH_GRADIENTS)
    with pytest.raises(odt.InfeasibleBudget) as refused:
        probe(batch[0])
    least = refused.value.smallest_feasible_bytes
    odt.wrap(model, budget=training(least), disable_rewrites=WITH_GRADIENTS, page_to=folder)
    optimizer = sgd(model)
    for _ in range(2):
        plain_step(model, optimizer, batch)
    assert paged(odt.plan_of(model))
    return model, optimizer


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")
@pytest.mark.parametrize("fault", ["failed", "full"])
def test_a_failed_transfer_of_a_wrapped_model_updates_nothing(tmp_path: Path, fault: str) -> None:
    batch = batches()[0]
    model, optimizer = wrapped_to_page(tmp_path, batch)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    opened = session_of(model)._page_file
    assert opened is not None
    descriptor = opened.pager.descriptor
    ending = {"failed": broken(descriptor), "full": files_at_most(4096)}[fault]
    with ending, pytest.raises(odt.PagingError, match=r"paging (out|in) .* bytes: ") as failed:
        plain_step(model, optimizer, batch)
    assert failed.value.fault == fault
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    # The error's traceback holds what the step has made until then.
    del failed
    gc.collect()
    assert opened.pager.stats()["pages"] == 0
    losses = [float(plain_step(model, optimizer, batch)) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")
def test_a_file_that_is_cut_off_between_forward_and_backward(tmp_path: Path) -> None:
    batch = batches()[0]
    model, optimizer = wrapped_to_page(tmp_path, batch)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    opened = session_of(model)._page_file
    assert opened is not None and opened.pager.stats()["pages"] > 0
    os.ftruncate(opened.pager.descriptor, 0)
    with pytest.raises(odt.PagingError, match=r"the file has become shorter|does not hold what was written"):
        loss.backward()
    del loss
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert opened.pager.stats()["pages"] == 0
    plain_step(model, optimizer, batch)
