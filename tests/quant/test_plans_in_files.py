"""Plans of int8 steps that travel in files with their graphs: the same bits, and nothing that a file could forge."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from niti_cases import Residual as SumsOfIntegers
from niti_cases import small_net
from quantized_models import calibration, images, labels, trained_a_little
from torch import nn

import torch_odt as odt
from torch_odt.capture.carried_operators import _OWN
from torch_odt.capture.update_in_backward import FUSED_UPDATE
from torch_odt.planning.plan_file import read_plan_file, write_plan_file

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch_odt.OdtWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROOMY = odt.Budget("2GiB", of="training")
Prepare = Callable[[nn.Module], torch.optim.Optimizer]


def qas(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    odt.quant.convert_(model, calibration(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    odt.quant.train_int8_(model, optimizer)
    return optimizer


def niti(model: nn.Module) -> torch.optim.Optimizer:
    odt.quant.niti_(model)
    return odt.quant.NitiSGD(model, lr=0.05)


def octo(model: nn.Module) -> torch.optim.Optimizer:
    made = odt.quant.octo_(model, sample=images(2, 0))
    return torch.optim.SGD(made.parameter_groups(), lr=0.05)


def fake(model: nn.Module) -> torch.optim.Optimizer:
    odt.quant.fake_quantize_(model)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def fake_learned(model: nn.Module) -> torch.optim.Optimizer:
    odt.quant.fake_quantize_(model, ranges="learned", sample=images(8, 0))
    return torch.optim.SGD(model.parameters(), lr=0.001)


def qas_to_the_scores(model: nn.Module) -> torch.optim.Optimizer:
    return qas(model, classifier="int8")


def clamped() -> nn.Module:
    """A clamp without a layer in front of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(3, 2, 1), nn.ReLU6(), nn.Flatten(), nn.Linear(150, 4))


def pooled() -> nn.Module:
    """To a size that is not that of one pixel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))


class ConvolvesInInt8(nn.Sequential):
    """Float tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(432, 4))
        self.kernel = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(odt.ops.int8_training_conv2d(x, self.kernel, seed=1))
        return found


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def grey(network: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """For images of one channel, eight pixels wide."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Grey(), network())

    return make


class Grey(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1, :8, :8]


@dataclass(frozen=True)
class Case:
    """A network, and how it becomes one of integers."""

    network: str | Callable[[], nn.Module]
    prepare: Prepare
    has_fused_updates: bool
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy

    def train(self, steps: int = 2, **options: Any) -> tuple[odt.TrainStep, list[torch.Tensor]]:
        """A step after some batches; losses, and the model's state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = trained_a_little(self.network) if isinstance(self.network, str) else self.network()
            optimizer = self.prepare(model.train())
            step = odt.TrainStep(model.train(), self.loss_fn, optimizer, **options)
            losses = []
            for number in range(steps):
                torch.manual_seed(number)
                batch = images(8, number)
                losses.append(step(batch, labels(8, number)))
                assert torch.equal(batch, images(8, number)), "a step changed its batch"
        return step, [*losses, *(tensor.clone() for tensor in model.state_dict().values())]


CASES = {
    **{f"qas-{name}": Case(name, qas, True) for name in ("residual", "excited", "fire", "mlp", "vgg")},
    "qas-scores": Case("residual", qas_to_the_scores, True),
    "qas-clamped": Case(clamped, qas, True),
    "qas-pooled": Case(pooled, qas, True),
    "float": Case(ConvolvesInInt8, plain, False),
    "niti-small": Case(grey(small_net), niti, True, odt.quant.niti_cross_entropy),
    "niti-sums": Case(grey(SumsOfIntegers), niti, True, odt.quant.niti_cross_entropy),
    "niti-residual": Case("residual", niti, True),
    "niti-vgg": Case("vgg", niti, True),
    "octo": Case("residual", octo, False),
    "fake": Case("residual", fake, False),
    "fake-learned": Case("residual", fake_learned, False),
}


@functools.cache
def planned(name: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A plan file's content, and what training came to without it."""
    with TemporaryDirectory() as folder:
        step, expected = CASES[name].train(budget=ROOMY)
        step.plan.save(Path(folder) / "plan.json")
        return read_plan_file(Path(folder) / "plan.json"), expected


def follow(name: str, content: dict[str, Any]) -> list[torch.Tensor]:
    with TemporaryDirectory() as folder:
        write_plan_file(Path(folder) / "plan.json", content)
        return CASES[name].train(plan=Path(folder) / "plan.json")[1]


def ops_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["program"]["parts"][0]["first"]["graph"]["ops"]
    return found


def fused(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [op for op in ops_of(content) if op["target"] == FUSED_UPDATE]


@pytest.mark.parametrize("name", CASES)
def test_a_step_from_a_file_has_the_bits_of_the_one_that_was_saved(name: str) -> None:
    content, expected = planned(name)
    assert bool(fused(content)) == CASES[name].has_fused_updates
    # NITI's layers count in numbers of which some are NaN until they are needed.
    torch.testing.assert_close(follow(name, content), expected, rtol=0, atol=0, equal_nan=True)


def values_of(content: dict[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = content["program"]["parts"][0]["first"]["graph"]["values"]
    return found


def read_as_is_right(op: dict[str, Any]) -> None:
    """What a fused update reads, by its arguments: its parameter and its weight come first."""
    of_values = [argument for argument in op["args"][4:] if isinstance(argument, str) and argument.startswith("%")]
    named = (op["args"][3], op["args"][4 + WEIGHT], *of_values)
    op["reads"] = list(dict.fromkeys(int(each[1:]) for each in named))


def other_weight(content: dict[str, Any]) -> None:
    """The first layer's update takes the gradient off the second one's weight."""
    first, second = fused(content)[:2]
    of_first, of_second = (op["args"][4 + WEIGHT] for op in (first, second))
    first["args"] = [of_second if argument == of_first else argument for argument in first["args"]]
    read_as_is_right(first)


def other_parameter(content: dict[str, Any]) -> None:
    first, second = fused(content)[:2]
    first["args"][3] = second["args"][3]
    read_as_is_right(first)


def twice(content: dict[str, Any]) -> None:
    first, second = fused(content)[:2]
    second["args"][3:5], second["args"][4 + WEIGHT] = first["args"][3:5], first["args"][4 + WEIGHT]
    read_as_is_right(second)


def in_the_forward_pass(content: dict[str, Any]) -> None:
    fused(content)[-1]["phase"] = "forward"


def other_rule(content: dict[str, Any]) -> None:
    fused(content)[0]["args"][0] = "sgd"


def other_operator(content: dict[str, Any]) -> None:
    fused(content)[0]["args"][1] = "torch_odt.int8_conv2d_update_weight_.default"


def returned(*positions: Any, kind: str = "tuple") -> Callable[[dict[str, Any]], None]:
    def forge(content: dict[str, Any]) -> None:
        op = next(op for op in fused(content) if len(op["writes"]) == 2)
        op["args"][2] = {kind: list(positions)} if kind == "tuple" else list(positions)

    return forge


def fewer_arguments(content: dict[str, Any]) -> None:
    fused(content)[0]["args"].pop()


def less_to_read(content: dict[str, Any]) -> None:
    op = fused(content)[0]
    op["reads"] = [int(op["args"][3][1:])]


def may_run_twice(content: dict[str, Any]) -> None:
    fused(content)[0]["is"] = []


def many_rows(content: dict[str, Any]) -> None:
    """Of a linear layer, whose input is said to have had a million times as many."""
    op = next(op for op in fused(content) if op["args"][4 + INPUT_SHAPE] == [8, 16])
    op["args"][4 + INPUT_SHAPE] = [1_000_000, 8, 16]


WEIGHT, INPUT_SHAPE = 4, 6
FORGERIES: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "another weight": ("residual", other_weight, "has been updated|in another way"),
    "another parameter": ("residual", other_parameter, "has been updated|in another way"),
    "twice": ("residual", twice, "has been updated|more than once"),
    "in the forward pass": ("residual", in_the_forward_pass, "may not stand in the forward pass"),
    "another rule": ("residual", other_rule, "no update that an operator makes"),
    "another operator": ("residual", other_operator, "no update that an operator makes"),
    "another order": ("residual", returned(2, 0), "or in another order"),
    "the gradient too": ("residual", returned(0, 1), "it returns the gradient"),
    "one result": ("residual", returned(0), "it has other results"),
    "no numbers": ("residual", returned(0.0, 2.0), "it returns what has no number"),
    "no tuple": ("residual", returned(0, 2, kind="list"), "it returns what has no number"),
    "fewer arguments": ("residual", fewer_arguments, "it has other arguments"),
    "less to read": ("residual", less_to_read, "does not read what its arguments are"),
    "run twice": ("residual", may_run_twice, "it is more than an update"),
    "many rows": ("mlp", many_rows, "input_shape has another number of elements"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_updates_are_refused(name: str) -> None:
    network, forge, text = FORGERIES[name]
    content = copy.deepcopy(planned(f"qas-{network}")[0])
    forge(content)
    with pytest.raises((odt.PlanError, RuntimeError), match=text):
        follow(f"qas-{network}", content)


def test_every_operator_of_integers_that_a_file_may_name_is_in_some_plan() -> None:
    named = {str(op["target"]) for name in CASES for op in ops_of(planned(name)[0])}
    named |= {str(op["args"][1]) for name in CASES for op in fused(planned(name)[0])}
    of_integers = {name for name in _OWN if name.startswith(("int8", "niti", "octo", "observed", "weight", "learned"))}
    assert of_integers - {each.removeprefix("torch_odt.").removesuffix(".default") for each in named} == set()


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


numbers = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 2**40])
others = st.sampled_from([None, True, 1.5, "", "%0", "%7", "torch_odt.int8_add.default", "int8", "uint8", [], [1, 2]])


@pytest.mark.parametrize("name", ["qas-residual", "niti-vgg"])
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_changed_ends_in_an_error_or_a_run(name: str, data: st.DataObject) -> None:
    content = copy.deepcopy(planned(name)[0])
    found = [*places(ops_of(content)), *places(values_of(content))]
    holder, key = found[data.draw(st.integers(0, len(found) - 1))]
    holder[key] = data.draw(numbers | others)
    # Operators refuse tensors that are not as they must be by themselves.
    with contextlib.suppress(odt.PlanError, odt.InfeasibleBudget, RuntimeError, IndexError):
        follow(name, content)
