"""A plan is for one step: what is not as it was is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_steps import Case, assert_equal_bits, saved_plan
from small_steps import PLENTY, Net, make_batches
from torch import nn

import torch_odt as odt
from torch_odt import _extensions
from torch_odt.execute.planned import GivenPlan

SIZE = 6


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case(make_optimizer=functools.partial(torch.optim.SGD, momentum=0.9), size=SIZE)
    return saved_plan(tmp_path_factory.mktemp("plans") / "plan.json", case)


def follow(plan: Path, model: nn.Module | None = None, batch: Any = None, **options: Any) -> None:
    model = model or Net()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=plan, cache=False, **options)
    step(*(batch or make_batches(1, SIZE)[0]))


def changed(change: Callable[[Net], Any]) -> Net:
    model = Net()
    change(model)
    return model


def wider(model: Net) -> None:
    model.first = nn.Linear(6, 9)


def without_bias(model: Net) -> None:
    model.head = nn.Linear(8, 3, bias=False)


def larger(model: Net) -> None:
    model.extra = nn.Linear(2, 2)


def counting(model: Net) -> None:
    model.register_buffer("count", torch.zeros(1))


class OwnDropout(nn.Dropout):
    pass


def frozen(model: Net) -> None:
    model.head.weight.requires_grad_(False)


def test_what_is_only_written_otherwise_is_accepted(plan_path: Path) -> None:
    model = Net()
    model.dropout.inplace = True
    model.norm.normalized_shape = 8
    model.count = 3
    follow(plan_path, model)


def test_a_loss_that_is_a_module_has_settings_as_well(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for smoothing in (0.1, 0.2):
        model, loss_fn = Net(), nn.CrossEntropyLoss(label_smoothing=smoothing)
        options = {"plan": path} if path.exists() else {"budget": PLENTY}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = odt.TrainStep(model, loss_fn, optimizer, cache=False, **options)
        if not path.exists():
            step(*make_batches(1, SIZE)[0])
            step.plan.save(path)
    with pytest.raises(odt.PlanError, match=r"loss_fn:.*label_smoothing is 0\.2; the plan is for 0\.1"):
        step(*make_batches(1, SIZE)[0])


ANOTHER_MODEL = [
    (wider, r"parameter first.weight is float32\[9, 6\].*the plan is for float32\[8, 6\]"),
    (without_bias, "the model has no parameter head.bias"),
    (larger, "the model has parameter extra.weight, of which the plan does not know"),
    (counting, "the model has buffer count, of which the plan does not know"),
    (frozen, "parameter head.weight is .*; the plan is for .* trained"),
    (nn.Module.double, "parameter first.weight is float64"),
    (nn.Module.eval, "the model is to be in training mode, and is in evaluation mode"),
    (lambda model: model.norm.eval(), "module norm is to be in training mode"),
    (lambda model: setattr(model.norm, "eps", 0.1), r"norm\.eps is 0\.1; the plan is for 1e-05"),
    (lambda model: setattr(model, "dropout", nn.AlphaDropout(0.0)), r"dropout\.class is AlphaDropout"),
    (lambda model: setattr(model, "dropout", OwnDropout(0.3)), r"dropout\.p is 0\.3; the plan is for 0\.0"),
]


@pytest.mark.parametrize(("change", "text"), ANOTHER_MODEL)
def test_another_model(change: Callable[[Net], Any], text: str, plan_path: Path) -> None:
    with pytest.raises(odt.PlanError, match=text):
        follow(plan_path, changed(change))


@pytest.mark.parametrize(("change", "text"), ANOTHER_MODEL)
def test_another_model_after_steps_that_were_not_compared_again(
    change: Callable[[Net], Any], text: str, plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    require = GivenPlan.require

    def counted(given: GivenPlan, *arguments: Any) -> None:
        compared.append(given)
        require(given, *arguments)

    monkeypatch.setattr(GivenPlan, "require", counted)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=plan_path, cache=False)
    batches = make_batches(3, SIZE)
    for batch in batches:
        step(*batch)
    assert len(compared) == 1
    change(model)
    with pytest.raises(odt.PlanError, match=text):
        step(*batches[0])
    with pytest.raises(odt.PlanError, match=text):
        step(*batches[0])


def test_a_setting_that_is_a_list_may_change_in_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Dropout(0.0))
    model[2].scales = [1, 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = make_batches(1, SIZE)[0]
    planned = odt.TrainStep(model, F.cross_entropy, optimizer, budget=PLENTY, cache=False)
    planned(*batch)
    planned.plan.save(tmp_path / "plan.json")
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=tmp_path / "plan.json", cache=False)
    step(*batch)
    # Meanwhile it is no setting.
    model[2].scales[1] = object()
    step(*batch)
    model[2].scales[1] = 3
    with pytest.raises(odt.PlanError, match=r"2\.scales is \(1, 3\); the plan is for \(1, 2\)"):
        step(*batch)


class Recording(nn.Sequential):
    """A module of the user's own, whose lists are no settings."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_lists_of_the_users_own_modules_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recording(nn.Flatten(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = make_batches(1, SIZE)[0]
    planned = odt.TrainStep(model, F.cross_entropy, optimizer, budget=PLENTY, cache=False)
    planned(*batch)
    planned.plan.save(tmp_path / "plan.json")
    step = odt.TrainStep(model, F.cross_entropy, optimizer, plan=tmp_path / "plan.json", cache=False)
    step(*batch)
    monkeypatch.setattr(GivenPlan, "require", lambda *_: pytest.fail("compared again"))
    for _ in range(3):
        model.losses.append(float(step(*batch)))


@pytest.mark.parametrize(
    ("make_batch", "text"),
    [
        (lambda x, y: (x[:4], y[:4]), r"argument \[0\] is float32\[4, 6\].*the plan is for float32\[6, 6\]"),
        (lambda x, y: (x.t().contiguous().t(), y), r"strides \(1, 6\)"),
        (lambda x, y: (x, y.int()), r"argument \[1\] is int32"),
        (lambda x, y: (x, y, y), r"the batch has argument \[2\], of which the plan does not know"),
        (lambda x, y: ([x], y), r"the batch has no argument \[0\]"),
    ],
)
def test_another_batch(make_batch: Callable[..., Any], text: str, plan_path: Path) -> None:
    with pytest.raises(odt.PlanError, match=text):
        follow(plan_path, batch=make_batch(*make_batches(1, SIZE)[0]))


def test_a_later_batch_of_another_size_is_refused_and_the_next_one_trains(plan_path: Path) -> None:
    model = Net()
    step = odt.TrainStep(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), plan=plan_path
    )
    x, y = make_batches(1, SIZE)[0]
    step(x, y)
    with pytest.raises(odt.PlanError, match="another step"):
        step(x[:2], y[:2])
    assert torch.isfinite(step(x, y))


def test_keyword_batches_come_in_the_same_order(tmp_path: Path) -> None:
    class Keywords(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(super().forward(x) * scale, y)}

    model = Keywords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = make_batches(1, SIZE)[0]
    odt.plan(model, None, {"x": x, "y": y, "scale": 2.0}, budget=PLENTY, cache=False).save(tmp_path / "plan.json")
    step = odt.TrainStep(model, None, optimizer, plan=tmp_path / "plan.json", budget=PLENTY)
    assert torch.isfinite(step(x=x, y=y, scale=2.0))
    with pytest.raises(odt.PlanError, match=r"another order; the plan is for \['x'\], \['y'\]"):
        step(y=y, x=x, scale=2.0)
    with pytest.raises(odt.PlanError, match=r"argument \['scale'\] is 3.0; the plan is for 2.0"):
        step(x=x, y=y, scale=3.0)


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self, *, tie: bool = True) -> None:
            super().__init__()
            self.second = nn.Linear(6, 8)
            if tie:
                self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.second(x)[:, :3]

    case = Case(Tied, size=SIZE)
    path = saved_plan(tmp_path / "plan.json", case)
    case.train(plan=path)
    with pytest.raises(odt.PlanError, match=r"ties \{'second.weight': 'first.weight'\}, not \{\}"):
        follow(path, Tied(tie=False))


def test_a_batch_elsewhere(plan_path: Path) -> None:
    x, y = make_batches(1, SIZE)[0]
    with pytest.raises(TypeError, match="on meta"):
        follow(plan_path, batch=(x.to("meta"), y))


def test_autocast_belongs_to_the_step(plan_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(odt.PlanError, match="for no autocast"):
        follow(plan_path)


def test_updates_in_the_backward_pass_are_those_of_the_optimizer(plan_path: Path) -> None:
    model = Net()
    for optimizer, text in (
        (torch.optim.SGD(model.parameters(), lr=0.05), "in another way"),
        (torch.optim.Adam(model.parameters()), "in another way"),
        (torch.optim.RMSprop(model.parameters()), "RMSprop makes its step as a whole"),
        (torch.optim.SGD([model.first.weight], lr=0.05, momentum=0.9), "in another way"),
    ):
        with pytest.raises(odt.PlanError, match=text):
            follow(plan_path, model, optimizer=optimizer)
    with pytest.raises(odt.PlanError, match="clipping"):
        follow(plan_path, clip_grad_norm=1.0)


def test_what_was_not_planned_for_is_not_done(plan_path: Path) -> None:
    with pytest.raises(odt.PlanError, match="accumulation_steps=1"):
        follow(plan_path, accumulation_steps=2)
    model = Net()
    step = odt.TrainStep(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), plan=plan_path
    )
    with pytest.raises(odt.PlanError, match="without the model's outputs"):
        step.with_outputs(*make_batches(1, SIZE)[0])


class Squared(Net):
    """As `Net`, with another operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square()


class Halved(Net):
    """As `Net`, with another number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5


def test_without_its_graph_a_plan_compares_the_code(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json", Case(Halved, size=SIZE), carry_graph=False)
    optimizer: dict[str, Any] = {"budget": PLENTY}
    for make_model, text in ((Squared, "another graph: it has"), (Net, "other arguments, shapes or strides")):
        model = make_model()
        with pytest.raises(odt.PlanError, match=text):
            follow(path, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), **optimizer)


def test_with_its_graph_a_plan_is_the_program(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json", Case(Halved, size=SIZE))
    torch.manual_seed(5)
    model = Net()
    step = odt.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.05), plan=path)
    wanted = Case(Halved, size=SIZE).plan()[1]
    assert [step(*batch).item() for batch in make_batches(3, SIZE)] == [loss.item() for loss in wanted[:3]]


@pytest.mark.skipif(not _extensions.has_kernels, reason="there are no compiled operators to miss")
def test_compiled_operators_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_plan(tmp_path / "plan.json", Case(functools.partial(Net, norm=True), size=SIZE))
    monkeypatch.setattr(_extensions, "has_kernels", False)
    with pytest.raises(odt.PlanError, match="compiled operators, which are missing here"):
        follow(path, Net(norm=True), optimizer=None)


def test_a_large_constant_is_not_written(tmp_path: Path) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(300_000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.mask.sum()

    case = Case(Masked, size=SIZE)
    step, wanted = case.plan()
    with pytest.raises(odt.PlanError, match="constants of more than"):
        step.plan.save(tmp_path / "plan.json")
    step.plan.save(tmp_path / "plan.json", carry_graph=False)
    case.train(plan=tmp_path / "plan.json", cache=False)
    # A plan of this process needs no file.
    _, found = case.train(plan=step.plan, cache=False)
    assert_equal_bits(found, wanted)
