"""Frozen BatchNorms in frozen convolutions: the same gradients within rounding, fewer operators, and the way back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapted_steps import assert_trained_alike, train_both
from models import MOBILENET_V2, case_named
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt import Scheme, add_lite_residuals_, bias_only_, sparse_update_, tinytl_
from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.fold_frozen_norms import FoldedBatchNorm, fold_frozen_norms
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm, freeze_batch_norms
from torch_odt.adapt.step_bytes import step_bytes, step_graph
from torch_odt.execute.plain_modules import plain_values

MOBILENET_SCHEME = Scheme(20, {"features.13.conv.1.0": 1 / 2, "features.14.conv.0.0": 1})
VERBS: dict[str, Callable[..., Adaptation]] = {
    "bias_only": bias_only_,
    "sparse_update": lambda model, **options: sparse_update_(model, MOBILENET_SCHEME, **options),
    "tinytl": lambda model, **options: tinytl_(model, input_size=32, **options),
}


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in float64, with BatchNorms that do something."""
    torch.manual_seed(0)
    for module in model.double().modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return model


def gradients(adaptation: Adaptation, x: Tensor, y: Tensor) -> list[Tensor]:
    F.cross_entropy(adaptation.model.train()(x), y).backward()
    return [parameter.grad for parameter in adaptation.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("verb", VERBS)
def test_what_trains_has_the_gradients_of_norms_that_are_frozen(verb: str) -> None:
    model = with_statistics(MOBILENET_V2.model())
    for dropout in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
        dropout.p = 0.0
    x, y = torch.randn(2, 3, 32, 32).double(), torch.tensor([0, 1])
    found = []
    for norm in ("frozen", "folded"):
        torch.manual_seed(1)
        found.append(gradients(VERBS[verb](copy.deepcopy(model), norm=norm), x, y))
    assert len(found[0]) == len(found[1]) > 20
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_steps_train_what_plain_training_does(name: str) -> None:
    case = case_named(name)
    model = case.model()
    bias_only_(model, norm="folded")
    assert_trained_alike(train_both(model, [args for args, _ in case.batches(3)]))


@pytest.mark.parametrize("verb", VERBS)
def test_unload_gives_back_the_model_within_rounding(verb: str) -> None:
    model = with_statistics(MOBILENET_V2.model()).eval()
    before = copy.deepcopy(model.state_dict())
    parameters, modules = dict(model.named_parameters()), list(model.modules())
    adaptation = VERBS[verb](model, norm="folded")
    adaptation.unload()
    assert list(model.modules()) == modules and dict(model.named_parameters()) == parameters
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-12, atol=1e-14)


def test_unload_and_merge_keep_what_was_trained() -> None:
    model = with_statistics(MOBILENET_V2.model()).eval()
    x = torch.randn(2, 3, 32, 32).double()
    adaptation = sparse_update_(model, MOBILENET_SCHEME, norm="folded")
    before = model(x)
    with torch.no_grad():
        for parameter in adaptation.parameters():
            parameter.add_(0.01)
    trained = model.eval()(x)
    assert not torch.allclose(trained, before)
    torch.testing.assert_close(adaptation.merge().eval()(x), trained)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 52


def test_what_was_moved_meanwhile_comes_back_moved() -> None:
    model = with_statistics(MOBILENET_V2.model()).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x.double())
    adaptation = bias_only_(model, norm="folded")
    adaptation.model.float()
    adaptation.unload()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}
    torch.testing.assert_close(model.eval()(x).double(), expected, rtol=1e-3, atol=1e-3)


def test_frozen_weights_in_8_bits_are_those_of_the_folded_convolutions() -> None:
    model = with_statistics(MOBILENET_V2.model()).float().eval()
    whole = copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32)
    adaptation = sparse_update_(model, MOBILENET_SCHEME, norm="folded", weight_bits=8)
    other = sparse_update_(whole, MOBILENET_SCHEME, weight_bits=8)
    torch.testing.assert_close(model.eval()(x), whole.eval()(x), rtol=1e-3, atol=1e-3)
    for name, tensor in adaptation.unload().state_dict().items():
        torch.testing.assert_close(tensor, other.unload().state_dict()[name], rtol=1e-4, atol=1e-5)


def test_lite_modules_that_were_pretrained_do_not_stand_in_the_way() -> None:
    model = MOBILENET_V2.model()
    add_lite_residuals_(model, input_size=32)
    adaptation = tinytl_(model, input_size=32, norm="folded")
    assert "52 frozen BatchNorms are a part of the convolutions in front of them" in adaptation.notes


def test_steps_have_fewer_operators_and_hold_no_more() -> None:
    batch = (torch.randn(1, 3, 64, 64), torch.randint(10, (1,)))
    counts, nbytes = [], []
    loss_fn = nn.CrossEntropyLoss()
    for norm in ("frozen", "folded"):
        model = MOBILENET_V2.model()
        parameters = sparse_update_(model, MOBILENET_SCHEME, norm=norm).parameters()  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        counts.append(len(step_graph(model, loss_fn, batch, optimizer=optimizer).ops))
        nbytes.append(step_bytes(model, loss_fn, batch, optimizer=optimizer))
    assert counts[1] < 0.6 * counts[0]
    assert nbytes[1] <= nbytes[0]


class Odd(nn.Module):
    """Convolutions whose norms cannot become a part of them, one that can, and one in front of an activation's."""

    def __init__(self) -> None:
        super().__init__()
        self.folds, self.folds_norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)
        self.twice, self.twice_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shared, self.shared_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shares = nn.Conv2d(4, 4, 1)
        self.shares.weight = self.shared.weight
        self.read, self.read_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.branches, self.branches_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.flat, self.flat_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.hooked, self.hooked_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.folds_norm(self.folds(x))
        x = self.twice_norm(self.twice(self.twice(x)))
        x = self.shares(self.shared_norm(self.shared(x)))
        x = self.read_norm(self.read(x)) + self.read.weight.sum()
        branch = self.branches(x)
        x = self.branches_norm(branch) + branch
        x = self.flat_norm(self.flat(x))
        return self.linear(self.hooked_norm(self.hooked(x)).mean((2, 3)))


def test_norms_stay_where_folding_would_change_what_is_computed() -> None:
    model = Odd().eval()
    nn.init.zeros_(model.flat_norm.weight)
    handle = model.hooked.register_forward_hook(lambda module, arguments, result: result * 2)
    x = torch.randn(2, 3, 5, 5)
    before = model(x)
    # What trains in front of a norm is scaled by it.
    with Adapting(model) as adapting:
        adapting.train_only(["linear.weight"])
        freeze_batch_norms(adapting)
        fold_frozen_norms(adapting)
    adaptation = adapting.finish("folded")
    torch.testing.assert_close(model.eval()(x), before)
    left = [name for name, module in model.named_modules() if isinstance(module, FrozenBatchNorm)]
    assert left == ["twice_norm", "shared_norm", "read_norm", "branches_norm", "flat_norm", "hooked_norm"]
    assert adaptation.notes[-1].startswith("1 frozen BatchNorms are a part")
    torch.testing.assert_close(adaptation.unload().eval()(x), before)
    handle.remove()


def test_a_convolution_whose_own_bias_trains_keeps_its_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
    adaptation = bias_only_(model, norm="folded")
    assert adaptation.trained == ("0.bias", "1.bias", "3.weight", "3.bias")
    assert isinstance(model[1], FrozenBatchNorm)


def test_padding_of_other_kinds_and_1_and_3_dimensions_are_folded() -> None:
    for conv, norm, shape in (
        (nn.Conv1d(3, 4, 3, bias=False), nn.BatchNorm1d(4), (2, 3, 8)),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False), nn.BatchNorm2d(4), (2, 3, 8, 8)),
        (nn.Conv3d(3, 4, 3, padding="same", bias=False), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
    ):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        model = nn.Sequential(conv, norm, nn.AdaptiveMaxPool1d(1) if len(shape) == 3 else nn.Flatten(), nn.Flatten())
        x = torch.randn(shape)
        model.append(nn.Linear(model.eval()(x).shape[1], 2))
        before = model.eval()(x)
        bias_only_(model, norm="folded")
        assert type(model[1]) is FoldedBatchNorm and type(model[0]) is type(conv)
        torch.testing.assert_close(model.eval()(x), before)


def test_bad_input_is_named() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))

        def forward(self, x: Tensor) -> Any:
            return self.layers(x) if x.sum() > 0 else self.layers(-x)

    model = Branches()
    keys = list(model.state_dict())
    with pytest.raises(odt.CaptureError, match=r"torch\.fx cannot follow Branches"):
        sparse_update_(model, Scheme(1), norm="folded")
    assert list(model.state_dict()) == keys
    # Where there is no norm, no code need be followed.
    model.layers[1] = nn.Identity()
    assert bias_only_(model, norm="folded").notes[-1] == "the model has no BatchNorm for norm='folded'"
    with pytest.raises(ValueError, match="norm='group': it is 'frozen' or 'folded'"):
        bias_only_(model, norm="group")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is 'frozen', 'folded', 'detached' or 'group'"):
        tinytl_(model, norm="fold")  # type: ignore[arg-type]


def test_a_state_dict_of_the_other_form_is_refused() -> None:
    model, folded = MOBILENET_V2.model(), MOBILENET_V2.model()
    bias_only_(folded, norm="folded")
    with pytest.raises(RuntimeError, match="Missing key"):
        folded.load_state_dict(model.state_dict())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_state_dict_has_the_norm_for_another_process(affine: bool, bias: bool) -> None:
    def make(seed: int) -> tuple[nn.Module, Adaptation]:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=affine), nn.Flatten(), nn.Linear(64, 2)
        )
        with_statistics(model) if affine else model.double()[1].running_mean.uniform_(-1, 1)  # type: ignore[index]
        if bias:
            nn.init.normal_(model[0].bias)
            model[0].bias.requires_grad_(False)
        adaptation = sparse_update_(model, Scheme(0), norm="folded")
        return model, adaptation

    (trained, adaptation), (loaded, other) = make(0), make(1)
    assert type(trained[1]) is FoldedBatchNorm  # type: ignore[index]
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    x = torch.randn(5, 3, 6, 6).double()
    adapted = trained.eval()(x)
    adaptation.merge()
    other.merge()
    for mode in (False, True):
        torch.testing.assert_close(loaded.train(mode)(x), trained.train(mode)(x), rtol=1e-9, atol=1e-9)
        if not mode:
            torch.testing.assert_close(trained(x), adapted, rtol=1e-9, atol=1e-9)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)


def test_copies_have_the_norm_and_a_step_does_not_look_at_it() -> None:
    model = with_statistics(MOBILENET_V2.model())
    bias_only_(model, norm="folded")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found, wanted = copied.state_dict(), model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    folded = [module for module in model.modules() if isinstance(module, FoldedBatchNorm)]
    assert plain_values(folded).keys() == {id(module) for module in folded}


def test_norms_that_share_a_bias_that_trains_stay_tied() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 2))
    model[3].bias = model[1].bias  # type: ignore[assignment]
    for conv in (model[0], model[2]):
        conv.bias = None
    adaptation = bias_only_(model, norm="folded")
    assert adaptation.trained == ("1.bias", "5.weight", "5.bias")
    assert model[1].bias is model[3].bias


class ByMode(nn.Module):
    """What takes a convolution's output depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last((self.norm(x) if self.training else x).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_one_mode_goes_without_stays(training: bool) -> None:
    model = ByMode().train(training)
    nn.init.constant_(model.norm.weight, 2.0)
    x = torch.randn(2, 3, 5, 5)
    expected = model.eval()(x)
    with Adapting(model.train(training)) as adapting:
        adapting.train_only(["last.weight"])
        freeze_batch_norms(adapting)
        fold_frozen_norms(adapting)
    assert isinstance(model.norm, FrozenBatchNorm) and model.norm.training is training
    torch.testing.assert_close(model.eval()(x), expected)
