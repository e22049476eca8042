"""Lite residual modules and biases: the model computes what it did, and trains what plain PyTorch would, in less."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
import torchvision
from adapted_steps import Both, assert_trained_alike, peak_bytes, train_both
from models import MOBILENET_V2, ModelCase, case_named
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50

import torch_odt as odt
from torch_odt.adapt import Adaptation, Scheme
from torch_odt.adapt.group_norm import group_count
from torch_odt.adapt.lite_residual import LiteResidual, LiteShape
from torch_odt.adapt.stored_weights import StoredConv2d, StoredLinear
from torch_odt.adapt.weight_standardization import StandardizedConv2d, standardized

SIZE = 64
# Blocks with a lite module, by the network whose they are.
FAMILIES = {
    "mobilenet_v2": 17,
    "mobilenet_v3_small": 11,
    "efficientnet_b0": 16,
    "resnet18": 8,
    "resnet50": 16,
}


def batches(case: ModelCase, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(args[0], args[1] % 5) for args, _ in case.batches(count)]


def lites(model: nn.Module) -> list[LiteResidual]:
    return [module for module in model.modules() if isinstance(module, LiteResidual)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_computes_what_it_did(name: str) -> None:
    model = torchvision.models.get_model(name, weights=None).eval()
    x = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        before = model(x)
        odt.adapt.tinytl_(model, input_size=SIZE)
        assert len(lites(model)) == FAMILIES[name]
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)
        for lite in lites(model):
            nn.init.normal_(lite.last_norm.weight, std=0.5)
        assert not torch.allclose(model(x), before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "mixnet_s"])
def test_blocks_of_timm(name: str) -> None:
    model = timm.create_model(name, num_classes=4).eval()
    x = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad():
        before = model(x)
        odt.adapt.tinytl_(model, input_size=SIZE)
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)
    assert len(lites(model)) >= 8


@pytest.mark.parametrize("mode", ["lite+bias", pytest.param("norm+last", marks=pytest.mark.slow)])
def test_trains_what_plain_training_of_the_same_selection_does(mode: str) -> None:
    model = MOBILENET_V2.model()
    odt.adapt.tinytl_(model, mode=mode, classes=5, input_size=SIZE)  # type: ignore[arg-type]
    for lite in lites(model):
        nn.init.normal_(lite.last_norm.weight, std=0.1)
    assert_trained_alike(train_both(model, batches(MOBILENET_V2)), rtol=5e-3)


def test_a_resnet_with_weights_in_8_bits_trains_alike() -> None:
    case = case_named("resnet18")
    model = case.model()
    odt.adapt.tinytl_(model, classes=5, weight_bits=8, input_size=SIZE)
    for lite in lites(model):
        nn.init.normal_(lite.last_norm.weight, std=0.1)
    # Folded BatchNorms round otherwise, and what lies on ReLU's edge falls to either side.
    assert_trained_alike(train_both(model, batches(case)), rtol=2e-2)


def test_each_mode_trains_what_it_says() -> None:
    trained = {}
    for mode in ("full", "last", "norm+last", "bias", "lite", "lite+bias"):
        adaptation = odt.adapt.tinytl_(MOBILENET_V2.model(), mode=mode, classes=5, input_size=SIZE)  # type: ignore[arg-type]
        trained[mode] = set(adaptation.trained)
        assert f"tinytl ({mode})" in str(adaptation)
    head = {"classifier.1.weight", "classifier.1.bias"}
    assert trained["last"] == head
    assert all(names > head for mode, names in trained.items() if mode != "last")
    assert all(name.endswith("bias") for name in trained["bias"] - head)
    assert all(".lite." in name for name in trained["lite"] - head)
    last_biases = {name for name in trained["lite"] if name.endswith("last_norm.bias")}
    assert len(last_biases) == 17
    # What a module's last norm adds, its block's own norm adds already.
    assert trained["lite+bias"] == (trained["lite"] | trained["bias"]) - last_biases
    assert {name.rpartition(".")[2] for name in trained["norm+last"]} == {"weight", "bias"}


def test_norms_that_are_more_than_norms_are_refused_or_kept_whole() -> None:
    model = timm.create_model("mobilenetv3_small_050", num_classes=4)
    with pytest.raises(ValueError, match=r"BatchNormAct2d, which is more than BatchNorm: .* norm='frozen'"):
        odt.adapt.tinytl_(model, norm="group", input_size=SIZE)

    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    other = nn.Sequential(nn.Conv2d(3, 4, 1), Doubled(4), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"1 is a .*Doubled, which may compute more than BatchNorm"):
        odt.adapt.bias_only_(other)
    assert isinstance(other[1], Doubled) and other[0].weight.requires_grad


@pytest.mark.slow
def test_takes_a_fraction_of_a_full_update_and_of_the_norms() -> None:
    batch = batches(MOBILENET_V2, 1)[0]
    peaks = {}
    for mode in ("full", "norm+last", "lite+bias"):
        model = MOBILENET_V2.model()
        odt.adapt.tinytl_(model, mode=mode, input_size=SIZE)  # type: ignore[arg-type]
        peaks[mode] = peak_bytes(model, batch)
    assert peaks["lite+bias"] < peaks["full"] / 2
    assert peaks["lite+bias"] < peaks["norm+last"] / 2


def test_weights_in_8_bits_take_a_quarter_and_come_back() -> None:
    plain = MOBILENET_V2.model()
    stored = copy.deepcopy(plain)
    small = odt.adapt.tinytl_(stored, mode="last", weight_bits=8)
    large = odt.adapt.tinytl_(copy.deepcopy(plain), mode="last")
    assert small.after.parameters == large.after.parameters
    assert small.after.weight_bytes < 0.32 * large.after.weight_bytes
    assert any(isinstance(module, StoredConv2d) for module in stored.modules())
    small.unload()
    for (name, ours), theirs in zip(stored.named_parameters(), plain.parameters(), strict=True):
        assert ours.requires_grad and ours.shape == theirs.shape
        step = theirs.detach().abs().amax(list(range(1, theirs.dim())), keepdim=True) / 127 if theirs.dim() > 1 else 0.0
        assert bool(((ours - theirs).abs() <= 0.51 * step + 1e-9).all()), name


def test_a_weight_of_zeros_is_stored_as_zeros() -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    assert bool((StoredLinear(layer).weight == 0).all())


def test_a_state_dict_goes_from_one_adapted_model_to_another() -> None:
    first, second = (MOBILENET_V2.model(seed) for seed in (0, 1))
    for model in (first, second):
        odt.adapt.tinytl_(model, classes=5, weight_bits=8, input_size=SIZE)
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad():
        assert torch.equal(first.eval()(x), second.eval()(x))


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "mobilenet_v3_small"])
def test_unload_gives_the_structure_back(name: str) -> None:
    model = torchvision.models.get_model(name, weights=None)
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    odt.adapt.tinytl_(model, weight_bits=8, input_size=SIZE).unload()
    assert sorted(model.state_dict()) == sorted(keys)
    assert [type(module) for module in model.modules()] == kinds
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    model(torch.randn(2, 3, SIZE, SIZE)).sum().backward()


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "result"),
    [
        (LiteShape(16, (32, 32), 24, (16, 16)), 5, 2, (8, 8)),
        (LiteShape(16, (8, 8), 24, (8, 8)), 3, 1, (4, 4)),
        (LiteShape(16, (4, 4), 24, (2, 2)), 1, 2, (1, 1)),
        (LiteShape(16, (2, 2), 24, (2, 2)), 1, 1, (1, 1)),
        (LiteShape(3, (9, 12), 5, (9, 12)), 3, 1, (4, 6)),
    ],
)
def test_a_module_fits_its_block(shape: LiteShape, kernel: int, stride: int, result: tuple[int, int]) -> None:
    lite = LiteResidual(shape)
    assert lite.conv.kernel_size == (kernel, kernel)
    assert lite.conv.stride == (stride, stride)
    assert lite.conv.groups == (2 if shape.in_channels % 2 == 0 else 1)
    made = lite(torch.randn(2, shape.in_channels, *shape.in_size))
    assert made.shape == (2, shape.out_channels, *result)
    assert not made.any()


def test_norms_become_group_norms_and_weights_are_standardized() -> None:
    model = MOBILENET_V2.model()
    weight = model.features[0][0].weight.detach().clone()
    adaptation = odt.adapt.tinytl_(model, norm="group", weight_standardization=True, input_size=SIZE)
    norm = model.features[0][1]
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == group_count(32) == 4
    torch.testing.assert_close(model.features[0][0].weight, standardized(weight))
    assert all(isinstance(lite.conv, StandardizedConv2d) for lite in lites(model))
    norms = sum(isinstance(module, nn.GroupNorm) for module in model.modules())
    assert norms == 52 + 2 * len(lites(model))
    assert f"{norms} layers normalize" in str(adaptation)
    adaptation.unload()
    torch.testing.assert_close(model.features[0][0].weight.detach(), weight, rtol=1e-5, atol=1e-6)
    assert isinstance(model.features[0][1], nn.BatchNorm2d)


def test_standardized_weights_in_8_bits_are_held_nowhere_in_32() -> None:
    model = MOBILENET_V2.model()
    whole = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    adaptation = odt.adapt.tinytl_(
        model, mode="bias", norm="group", weight_standardization=True, weight_bits=8, input_size=SIZE
    )
    undo = pickle.dumps([change.undo for change in adaptation._changes])
    assert len(undo) < sum(whole.values()) / 2


def test_a_convolution_of_one_weight_a_channel_is_not_standardized() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, 2))
    weight = model[0].weight.detach().clone()
    adaptation = odt.adapt.tinytl_(model, mode="bias", norm="group", weight_standardization=True)
    assert torch.equal(model[0].weight, weight)
    assert "0 has one weight an output channel" in str(adaptation)
    assert bool(model(torch.ones(1, 1, 4, 4)).isfinite().all())
    assert torch.equal(standardized(weight), weight)


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def own_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), OwnBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def test_blocks_of_ones_own() -> None:
    model = own_model()
    with pytest.raises(ValueError, match=r"Sequential has no block of a known type; it has .*OwnBlock.*blocks="):
        odt.adapt.tinytl_(model, input_size=16)
    assert not lites(model) and all(parameter.requires_grad for parameter in model.parameters())
    odt.adapt.tinytl_(model, blocks={OwnBlock: "branch"}, input_size=16)
    assert len(lites(model)) == 1
    with pytest.raises(ValueError, match="which has branch, but no 'stem'"):
        odt.adapt.tinytl_(own_model(), blocks={OwnBlock: "stem"}, input_size=16)


def test_trains_one_sample_at_a_time_in_channels_last() -> None:
    model = own_model().double().to(memory_format=torch.channels_last)
    odt.adapt.tinytl_(model, blocks={OwnBlock: "branch"}, input_size=16)
    nn.init.normal_(lites(model)[0].last_norm.weight)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert_trained_alike(train_both(model, [(x, torch.tensor([0, 1, 1, 0]))], micro_batch=1))


def test_blocks_are_left_out_by_name() -> None:
    two = nn.Sequential(
        nn.Conv2d(3, 4, 1), OwnBlock(), OwnBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    with pytest.raises(ValueError, match=r"without=3: the blocks are 1, 2"):
        odt.adapt.tinytl_(two, blocks={OwnBlock: "branch"}, without=["3"], input_size=16)
    odt.adapt.tinytl_(two, blocks={OwnBlock: "branch"}, without=iter(["1"]), input_size=16)
    assert not lites(two[1]) and len(lites(two[2])) == 1


def test_wrong_arguments_are_named() -> None:
    model = MOBILENET_V2.model()
    for options, text in (
        ({"mode": "some"}, "mode='some'"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"weight_bits": 4}, "weight_bits=4"),
        ({"kernel_size": 4}, "kernel_size=4"),
        ({"weight_standardization": True}, "norm='group'"),
        ({"expand": 0}, "expand=0"),
        ({"expand": float("nan")}, "expand=nan"),
        ({"input_size": 0}, "input_size=0"),
        ({"input_size": "224"}, "input_size='224'"),
        ({"input_size": (64,)}, r"input_size=\(64,\)"),
        ({"blocks": {"BasicBlock": "branch"}}, "its keys are the types of blocks"),
        ({"without": "features.1"}, "give a list of names"),
        ({"classes": 0}, "classes=0"),
        ({"classes": "5"}, "classes='5'"),
        ({"classes": True}, "classes=True"),
        ({"classes": 2.0}, r"classes=2\.0"),
    ):
        with pytest.raises(ValueError, match=text):
            odt.adapt.tinytl_(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no 2-D convolution"):
        odt.adapt.tinytl_(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(TypeError, match="kernel_size='5': it is a whole number"):
        odt.adapt.tinytl_(model, kernel_size="5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the model is a str"):
        odt.adapt.tinytl_("mobilenet_v2")  # type: ignore[arg-type]


def test_modules_that_take_more_than_the_model_say_so() -> None:
    model = resnet50(num_classes=3)
    adaptation = odt.adapt.tinytl_(model, input_size=64)
    assert adaptation.after.gradient_bytes > adaptation.before.gradient_bytes
    assert "a smaller expand=" in adaptation.notes[-1]
    adaptation.unload()
    assert not any("expand=" in note for note in odt.adapt.tinytl_(model, input_size=64, expand=1 / 16).notes)


def test_layers_that_are_in_int8_are_named_as_such() -> None:
    model = MOBILENET_V2.model().eval()
    odt.quant.convert_(model, [torch.randn(2, 3, SIZE, SIZE)])
    for adapt in (odt.adapt.tinytl_, lambda m: odt.adapt.sparse_update_(m, Scheme(0, {"features.17.conv.0.0": 1.0}))):
        with pytest.raises(ValueError, match=r"convert_'s: take that back first, by odt\.quant\.dequantize_"):
            adapt(model)
    model = MOBILENET_V2.model().eval()
    adaptation = odt.adapt.bias_only_(model)
    with pytest.raises(ValueError, match=r"It is adapted: call merge\(\)"):
        odt.quant.convert_(model, [torch.randn(2, 3, SIZE, SIZE)])
    adaptation.merge()
    assert odt.quant.convert_(model, [torch.randn(2, 3, SIZE, SIZE)]).layers


@pytest.mark.slow
def test_trains_through_wrap_within_a_budget() -> None:
    model = MOBILENET_V2.model()
    odt.adapt.tinytl_(model, classes=5, input_size=SIZE)
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (model, plain)]
    wrapped = odt.wrap(model, budget=odt.Budget("1GiB", of="training"))
    for x, y in batches(MOBILENET_V2):
        for call, optimizer in zip((wrapped, plain), optimizers, strict=True):
            torch.manual_seed(7)
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
    assert_trained_alike(Both(model, plain, start), rtol=5e-3)
    assert all((parameter.grad is not None) is parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("channels", "expand", "middle"), [(4, 1, 8), (12, 1, 16), (20, 1, 24), (28, 1, 32), (16, 0.7, 8)]
)
def test_channels_between_are_the_nearest_multiple_of_8(channels: int, expand: float, middle: int) -> None:
    shape = LiteShape(channels, (8, 8), 8, (8, 8))
    assert LiteResidual(shape, expand=expand).conv.out_channels == middle


class OwnSequence(nn.Sequential):
    """A block as a whole, whose class a module that runs beside it does not keep."""


def pretrained_with_modules(name: str) -> tuple[nn.Module, dict[type[nn.Module], str]]:
    if name == "own":
        block = OwnSequence(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        layers = (nn.Conv2d(3, 4, 3, padding=1), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        return nn.Sequential(*layers), {OwnSequence: ""}
    if name.startswith("timm."):
        return timm.create_model(name.removeprefix("timm."), num_classes=4), {}
    return torchvision.models.get_model(name, weights=None, num_classes=4), {}


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "timm.mobilenetv3_small_050", "own"])
def test_modules_that_were_pretrained_train_on(name: str) -> None:
    torch.manual_seed(0)
    model, blocks = pretrained_with_modules(name)
    x = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        before = model.eval()(x)
        added = odt.adapt.add_lite_residuals_(model.train(), blocks=blocks, input_size=SIZE)
        count = len(lites(model))
        assert count > 0
        torch.testing.assert_close(model.eval()(x), before)
    assert added.trained == tuple(dict(model.named_parameters()))
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for lite in lites(model):
        nn.init.normal_(lite.last_norm.weight, std=0.1)
        nn.init.normal_(lite.last_norm.bias, std=0.1)
    on_device, _ = pretrained_with_modules(name)
    odt.adapt.add_lite_residuals_(on_device, blocks=blocks, input_size=SIZE)
    on_device.load_state_dict(model.state_dict())
    with torch.no_grad():
        known = model.eval()(x)
        adaptation = odt.adapt.tinytl_(on_device.eval(), blocks=blocks, input_size=SIZE)
        torch.testing.assert_close(on_device(x), known, rtol=1e-3, atol=1e-4)
    assert len(lites(on_device)) == count
    of_lite = {each for each in dict(on_device.named_parameters()) if ".lite." in each}
    kept = {each for each in of_lite if each.endswith(".lite.last_norm.bias")}
    assert len(kept) == count
    assert set(adaptation.trained) & of_lite == of_lite - kept
    assert any("as they were pretrained" in note for note in adaptation.notes)
    adaptation.unload()
    assert len(lites(on_device)) == count
    assert set(odt.adapt.tinytl_(on_device, mode="lite", blocks=blocks, input_size=SIZE).trained) > of_lite
    added.unload()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), before)


def test_modules_that_were_pretrained_train_as_in_plain_pytorch() -> None:
    model = MOBILENET_V2.model()
    odt.adapt.add_lite_residuals_(model, input_size=SIZE)
    for lite in lites(model):
        nn.init.normal_(lite.last_norm.weight, std=0.1)
    odt.adapt.tinytl_(model, classes=5, input_size=SIZE)
    assert_trained_alike(train_both(model, batches(MOBILENET_V2)))


def test_blocks_without_a_module_get_one_beside_those_that_have() -> None:
    model = own_model()
    model.insert(2, OwnBlock())
    options = {"blocks": {OwnBlock: "branch"}, "input_size": 16}
    odt.adapt.add_lite_residuals_(model, without=["1"], **options)  # type: ignore[arg-type]
    assert not lites(model[1]) and len(lites(model[2])) == 1
    adaptation = odt.adapt.tinytl_(model, **options)  # type: ignore[arg-type]
    assert adaptation.notes[:2] == (
        "1 lite residual modules, 1 to 1",
        "1 lite residual modules, 2 to 2, as they were pretrained",
    )
    # Blocks this small are smaller than modules of eight channels.
    [note] = adaptation.notes[2:]
    assert "more gradients than all of the model" in note
    adaptation.merge()
    with pytest.raises(ValueError, match=r"each of the 2 blocks of Sequential has a lite residual module"):
        odt.adapt.add_lite_residuals_(model, **options)  # type: ignore[arg-type]
    left_out = odt.adapt.tinytl_(model, without=["2"], **options)  # type: ignore[arg-type]
    assert len(lites(model)) == 2
    assert not any(name.startswith("2.branch.lite.") for name in left_out.trained)
    assert any(name.startswith("1.branch.lite.conv") for name in left_out.trained)


def test_what_cannot_be_given_modules_says_why() -> None:
    with pytest.raises(ValueError, match="kernel_size=4"):
        odt.adapt.add_lite_residuals_(MOBILENET_V2.model(), kernel_size=4)
    with pytest.raises(ValueError, match="no block of a known type"):
        odt.adapt.add_lite_residuals_(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match=r"without=9: the blocks are 1"):
        odt.adapt.add_lite_residuals_(own_model(), blocks={OwnBlock: "branch"}, without=["9"], input_size=16)


@pytest.mark.parametrize(
    "first",
    [
        partial(odt.adapt.tinytl_, mode="bias", weight_bits=8),
        partial(odt.adapt.sparse_update_, scheme=Scheme(2, {"conv1": 1 / 3}), weight_bits=8),
    ],
)
def test_modules_go_beside_layers_that_an_earlier_method_has_replaced(first: Callable[..., Adaptation]) -> None:
    model = resnet18(num_classes=3)
    first(model)
    assert not any(isinstance(module, nn.Conv2d) for module in model.modules())
    adaptation = odt.adapt.tinytl_(model, input_size=SIZE)
    assert len(lites(model)) == 8 and model(torch.ones(2, 3, SIZE, SIZE)).shape == (2, 3)
    adaptation.unload()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_what_was_put_there_before_is_taken_back_last(name: str) -> None:
    model = torchvision.models.get_model(name, weights=None)
    classes = [type(module) for module in model.modules()]
    added = odt.adapt.add_lite_residuals_(model, input_size=SIZE)
    adaptation = odt.adapt.tinytl_(model, input_size=SIZE, weight_bits=8)
    with pytest.raises(ValueError, match="stands where add_lite_residuals has found a"):
        added.unload()
    assert adaptation.unload() is added.unload()
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mobilenet_v2", "timm.mobilenetv3_small_050", "own"])
def test_modes_of_layers_stay_what_they_are(name: str) -> None:
    model, blocks = pretrained_with_modules(name)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()
    added = odt.adapt.add_lite_residuals_(model, blocks=blocks, input_size=SIZE)
    assert not any(norm.training for norm in norms) and all(lite.relu.training for lite in lites(model))
    added.unload()
    assert model.training and not any(norm.training for norm in norms)


def test_pretrained_modules_are_standardized_where_they_were_made_so() -> None:
    for standardized_modules in (False, True):
        model = MOBILENET_V2.model()
        odt.adapt.add_lite_residuals_(model, input_size=SIZE, weight_standardization=standardized_modules)
        odt.adapt.tinytl_(model, norm="group", weight_standardization=True, input_size=SIZE)
        kinds = {type(conv) for lite in lites(model) for conv in (lite.conv, lite.pointwise)}
        assert kinds == {StandardizedConv2d if standardized_modules else nn.Conv2d}
