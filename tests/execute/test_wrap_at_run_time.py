"""What of the runtime holds for wrapped models: the second column of the table in the runtime's README."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from scripted_budgets import Scripted, make_batches, make_net, plainly
from torch import nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.runtime import Background, Checkpointer

pytestmark = [
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built"),
]
PLENTY = odt.Budget("1GiB", of="training")
EXACT: dict[str, Any] = {"disable_rewrites": inexact_rewrites()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def arena() -> memory.ArenaStats:
    found = memory.stats().arena
    assert found is not None
    return found


def test_nothing_is_held() -> None:
    model = odt.wrap(make_net(), budget=Scripted(1 << 30), **EXACT)
    optimizer = sgd(model)
    for batch in make_batches(3):
        one_step(model, optimizer, batch)
        assert arena().held_bytes == 0 < arena().resident_bytes


def test_checkpoints(tmp_path: Path) -> None:
    batches = list(make_batches(4))
    torch.manual_seed(3)
    whole = odt.wrap(make_net(), budget=PLENTY, **EXACT)
    optimizer = sgd(whole)
    losses = [one_step(whole, optimizer, batch) for batch in batches]

    torch.manual_seed(3)
    model = odt.wrap(make_net(), budget=PLENTY, **EXACT)
    optimizer = sgd(model)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every_steps=2) as checkpointer:
        for number in range(2):
            one_step(model, optimizer, batches[number])
            checkpointer.step_done(number + 1)
    assert [name.split(".")[0] for name in model.state_dict()] == [name.split(".")[0] for name in whole.state_dict()]

    model = odt.wrap(make_net(), budget=PLENTY, **EXACT)
    optimizer = sgd(model)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        resumed = checkpointer.resume()
    assert resumed is not None and resumed.step == 2
    assert [one_step(model, optimizer, batch) for batch in batches[2:]] == losses[2:]
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_in_the_background_a_pause_gives_no_memory_back() -> None:
    model = odt.wrap(make_net(), budget=PLENTY, **EXACT)
    plain = copy.deepcopy(odt.unwrap(copy.deepcopy(model)))
    optimizer, reasons, seen = sgd(model), [False, False, True, False], list[int]()

    def waits() -> bool:
        if reasons[0]:
            seen.append(arena().resident_bytes)
        return reasons.pop(0)

    threads = torch.get_num_threads()
    options = Background(nice=0, scheduling="normal", idle_storage=False, threads=threads, pause_when=waits)
    torch.manual_seed(3)
    losses = []
    with options.applied() as background:
        for batch in make_batches(3):
            background.before_step()
            losses.append(one_step(model, optimizer, batch))
            background.after_step()
    assert background.paused_seconds > 0 and not reasons
    assert seen[0] > 0
    assert losses == plainly(plain, 3)


def test_a_call_that_fails_is_not_made_again() -> None:
    model = odt.wrap(make_net(), budget=PLENTY, **EXACT)
    plainly(model, 2)
    (batch,) = make_batches(1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with refused(0), pytest.raises((torch.OutOfMemoryError, RuntimeError)):
        model(batch[0])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.isfinite(F.cross_entropy(model(batch[0]), batch[1])), "the next call works"
