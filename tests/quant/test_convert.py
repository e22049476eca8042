"""Networks converted to int8 and back: they compute nearly the same, and say what was not converted."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import NETWORKS, calibration, images, relative_error, trained_a_little
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant.activation import Int8Activation
from torch_odt.quant.modules import Int8Layer, Quantize
from torch_odt.quant.qas import int8_layers
from torch_odt.quant.ranges import weight_steps

LAYERS = {
    "residual": ("stem", "depthwise", "pointwise"),
    "excited": ("conv.0", "squeeze.1", "attention"),
    "fire": ("squeeze", "narrow", "wide"),
    "mlp": ("1", "5"),
    "vgg": ("0", "1", "4"),
    "channels_behind": ("stem", "wide", "narrow"),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("classifier", ["fp32", "int8"])
def test_it_computes_nearly_the_same(name: str, classifier: Any) -> None:
    model = trained_a_little(name)
    x = images(16, 0)
    expected = model(x).detach()
    conversion = odt.quant.convert_(model, calibration(), classifier=classifier)
    assert conversion.model is model and type(model).__name__ == type(trained_a_little(name)).__name__
    assert conversion.layers[: len(LAYERS[name])] == LAYERS[name]
    assert len(conversion.layers) == len(LAYERS[name]) + (classifier == "int8")
    assert any("classifier" in reason for reason in conversion.kept.values()) == (classifier == "fp32")
    assert relative_error(model(x), expected) < 0.06
    for layer in int8_layers(model).values():
        assert layer.weight.dtype == torch.int8 and layer.weight_slot.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_is_within_a_step_of_its_float_reference(name: str) -> None:
    model = trained_a_little(name)
    odt.quant.convert_(model, calibration())
    seen: list[str] = []

    def compare(layer: Int8Layer, inputs: tuple[Int8Activation], output: Int8Activation) -> None:
        (x,) = inputs
        real = (x.values.double() - x.grid[1]) * x.grid[0].double()
        weight, bias, w = layer.float_weight().double(), layer.float_bias(), layer.windows
        wide = None if bias is None else bias.double()
        if weight.dim() == 2:
            truth = F.linear(real, weight, wide)
        else:
            truth = torch.conv2d(real, weight, wide, w.stride, w.padding, w.dilation, w.groups)
        truth = truth.detach().clamp(layer.low, layer.high) if layer.low is not None else truth.detach()
        expected = (truth / output.grid[0].double() + output.grid[1]).round().clamp(-128, 127)
        if w.pool is not None:
            p = w.pool
            expected = F.max_pool2d(expected, p.kernel_size, p.stride, p.padding, p.dilation, p.ceil_mode)
        assert float((output.values - expected).abs().max()) <= 1
        assert float((output.values - expected).abs().double().mean()) < 0.01
        seen.append(layer.extra_repr())

    for layer in int8_layers(model).values():
        layer.register_forward_hook(compare)
    model(images(16, 5))
    assert len(seen) == len(LAYERS[name])


def test_activations_are_int8_between_layers() -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    dtypes: list[torch.dtype] = []
    for module in model.modules():
        if module is not model:
            module.register_forward_hook(
                lambda _, inputs, __: dtypes.extend(
                    each.values.dtype if isinstance(each, Int8Activation) else each.dtype for each in inputs
                )
            )
    model(images())
    # The input and the classifier's input are float.
    assert dtypes.count(torch.float32) == 2 and dtypes.count(torch.int8) == len(dtypes) - 2 > 6


def test_what_stays_is_named() -> None:
    model = trained_a_little("excited")
    conversion = odt.quant.convert_(model, calibration())
    assert conversion.kept["softmax"] == "there is no int8 form of softmax"
    assert "operands have the shapes" not in str(conversion.kept.get("mul", ""))
    text = str(conversion)
    assert "softmax: there is no int8 form" in text and "calibrated over 3 batches" in text


@pytest.mark.parametrize(
    ("name", "layers"), [("mobilenet_v2", 52), ("resnet18", 20), pytest.param("vgg11_bn", 10, marks=pytest.mark.slow)]
)
def test_networks_of_torchvision_are_converted_whole(name: str, layers: int) -> None:
    import torchvision

    options = {"width_mult": 0.35} if name == "mobilenet_v2" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(torchvision.models, name)(num_classes=10, **options).train()
        x = torch.randn(8, 3, 64, 64)
        with torch.no_grad():
            for _ in range(4):
                model(x)
    expected = model.eval()(x).detach()
    conversion = odt.quant.convert_(model, [x])
    assert len(conversion.layers) == layers
    assert list(conversion.kept.values()) == ['it is the classifier (classifier="fp32")']
    assert conversion.weight_bytes < 0.31 * conversion.weight_bytes_before
    assert relative_error(model(x), expected) < 0.15


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.unused = nn.Sequential(nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 1e9:
            x = self.unused(x)
        return self.head(self.block(x).mean([2, 3]))


def test_of_a_model_that_branches_its_parts_are_converted() -> None:
    model = Branching().eval()
    expected = model(images(8, 0)).detach()
    conversion = odt.quant.convert_(model, calibration())
    assert conversion.layers == ("block.0",)
    assert "cannot be traced" in conversion.kept["first"] and "cannot be traced" in conversion.kept["head"]
    assert conversion.kept["unused"] == "no calibration batch has reached it"
    assert relative_error(model(images(8, 0)), expected) < 0.03
    model(images()).sum().backward()
    assert model.first.weight.grad is not None and model.first.weight.grad.any()
    odt.quant.dequantize_(model)
    assert type(model.block) is nn.Sequential and relative_error(model(images(8, 0)), expected) < 0.03


class Unasked(nn.Module):
    """Layers that the forward pass goes around by what Python knows when it is traced, and two names for one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.auxiliary, self.head = nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 1)), nn.Linear(400, 4)
        self.all = nn.ModuleList([self.first, self.head])
        self.weights = nn.Linear(400, 400)
        self.has_auxiliary = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.all[0](x).relu()
        x = (self.auxiliary(x) if self.has_auxiliary else x).flatten(1)
        return self.head(F.linear(x, self.weights.weight))


def test_what_the_forward_pass_goes_around_is_named() -> None:
    conversion = odt.quant.convert_(Unasked(), calibration())
    assert conversion.layers == ("first",)
    assert conversion.kept.keys() == {"auxiliary.0", "head", "linear", "all.0"}
    assert conversion.kept["auxiliary.0"] == "forward has not called it, and will not"
    assert conversion.kept["all.0"] == "it is another name of first, and of that as it was before"


class Scores(nn.Module):
    def __init__(self, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4))
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layers(x))


@pytest.mark.parametrize(
    "behind",
    [
        nn.LogSoftmax(1),
        nn.Softmin(1),
        lambda scores: scores / 2.5,
        lambda scores: torch.true_divide(scores, 2.5),
        lambda scores: scores.mul_(2),
        lambda scores: torch.log(torch.softmax(scores, 1)),
        lambda scores: F.logsigmoid(scores.squeeze(-1)),
        lambda scores: scores.sigmoid_(),
        lambda scores: -scores,
        lambda scores: scores * torch.full((1,), 0.5).exp(),
        lambda scores: (scores.softmax(1), scores.argmax(1))[0],
    ],
)
@pytest.mark.parametrize("classifier", ["fp32", "int8"])
def test_what_is_made_of_scores_is_float32(behind: Any, classifier: Any) -> None:
    model = Scores(behind)
    expected = model(images(8, 0))
    conversion = odt.quant.convert_(model, calibration(), classifier=classifier)
    assert ("classifier" in conversion.kept.get("layers.3", "")) == (classifier == "fp32")
    if classifier == "int8":
        assert model.layers[3].output_grid is None
    assert relative_error(model(images(8, 0)), expected) < 0.05


def test_products_of_activations_are_none_of_scores() -> None:
    assert odt.quant.convert_(Scores(lambda x: x * x), calibration()).layers == ("layers.0", "layers.3")


class Odd(nn.Module):
    """Layers that cannot be converted, each for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reflected = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.twice = nn.Conv2d(4, 4, 1)
        self.tied = nn.Conv2d(4, 4, 1)
        self.other = nn.Conv2d(4, 4, 1)
        self.other.weight = self.tied.weight
        self.zero = nn.Conv2d(4, 4, 1, bias=False)
        self.dead = nn.Conv2d(4, 4, 1)
        self.fine = nn.Conv2d(4, 4, 1)
        with torch.no_grad():
            self.zero.weight.zero_()
            self.dead.bias.fill_(-1e3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.reflected(x)))
        x = self.other(self.tied(x)) + self.zero(x) + F.relu(self.dead(x))
        return torch.amax(self.fine(x), (2, 3))


def test_reasons() -> None:
    model = Odd()
    conversion = odt.quant.convert_(model, calibration())
    assert conversion.layers == ("fine",)
    assert conversion.kept["reflected"] == "it is padded by 'reflect'"
    assert conversion.kept["twice"] == "it is called more than once"
    assert conversion.kept["tied"] == conversion.kept["other"] == "its weight is shared by tied, other"
    assert conversion.kept["zero"] == "its weight is 0"
    assert "output is 0 in all calibration batches" in conversion.kept["dead"]
    assert conversion.kept["amax"] == "there is no int8 form of amax"


class InPlace(nn.Module):
    """What is written in place is read under its old name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)
        self.third = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(self.relu(x))
        x += y
        same = x
        y = self.third(F.relu(same) - 0.5)
        return (x + y).mean([2, 3])


def test_what_is_written_in_place_is_seen_under_its_old_name() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = InPlace()
    expected = model(images(8, 0)).detach()
    conversion = odt.quant.convert_(model, calibration())
    assert conversion.layers == ("first", "second", "third")
    assert relative_error(model(images(8, 0)), expected) < 0.03


@pytest.mark.parametrize("name", NETWORKS)
def test_there_and_back(name: str) -> None:
    model = trained_a_little(name)
    x = images(16, 0)
    expected, kind = model(x).detach(), type(model)
    odt.quant.convert_(model, calibration())
    converted = {each: layer.float_weight() for each, layer in int8_layers(model).items()}
    back = odt.quant.dequantize_(model)
    assert back is model and type(model) is kind
    for each, weight in converted.items():
        layer = model.get_submodule(each)
        assert type(layer) in (nn.Conv2d, nn.Linear) and torch.equal(layer.weight, weight)
    assert relative_error(model(x), expected) < 0.03
    # A plain model, which can be saved as a whole, trained, and converted again.
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    model(x).sum().backward()
    again = odt.quant.convert_(model, calibration())
    assert again.layers
    for each, layer in int8_layers(model).items():
        torch.testing.assert_close(layer.float_weight(), converted[each], rtol=1e-5, atol=1e-7)


def test_masters_hold_what_the_weights_were() -> None:
    plain = trained_a_little("mlp")
    model = copy.deepcopy(plain)
    odt.quant.convert_(model, calibration(), masters="fp32")
    odt.quant.dequantize_(model)
    torch.testing.assert_close(model(images(8, 0)), plain(images(8, 0)), rtol=1e-4, atol=1e-5)


def test_the_state_is_complete() -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert "stem.weight" in model.state_dict() and not any("slot" in name for name in model.state_dict())
    other = NETWORKS["residual"]().eval()
    odt.quant.convert_(other, [images(4, 77) * 3])
    x = images(8, 1)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_copy_and_another_memory_format_bring_no_floats() -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    x = images(8, 1)
    expected = model(x)
    for other in (copy.deepcopy(model), model.to(memory_format=torch.channels_last)):
        slots = [layer.weight_slot for layer in int8_layers(other).values()]
        assert [slot.untyped_storage().nbytes() for slot in slots] == [4] * len(slots)
        assert torch.equal(other(x), expected)


def test_dropout_follows_the_mode() -> None:
    model = trained_a_little("residual").train()
    odt.quant.convert_(model, calibration())
    x = images(8, 1)
    assert model.training and not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


class AlwaysDropping(nn.Module):
    """Functions with a mode of their own, among them a BatchNorm that standardizes weights (timm's ScaledStdConv)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        even = F.batch_norm(weight.view(1, 8, -1), None, None, training=True).view_as(weight)
        x = F.dropout(self.head(F.conv2d(x, even).relu().mean((2, 3))), 0.5, training=True)
        return F.dropout(x, 0.5, self.training)


def test_functions_with_a_mode_of_their_own_keep_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), AlwaysDropping())
    odt.quant.convert_(model.eval(), calibration())
    x = images(8, 1)
    dropped = [float((model.train(training)(x) == 0).float().mean()) for training in (False, True)]
    assert 0.2 < dropped[0] < 0.8 < 0.9 * dropped[1] + 0.3
    assert not model.training or not torch.equal(model(x), model(x))


def test_what_was_frozen_stays_so() -> None:
    model = trained_a_little("residual")
    model.stem.requires_grad_(False)
    model.norm.requires_grad_(False)
    odt.quant.convert_(model, calibration())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["stem.weight_slot", "stem.bias"] or frozen == ["stem.bias", "stem.weight_slot"]


def test_headroom_makes_steps_larger() -> None:
    tight, roomy = trained_a_little("mlp"), trained_a_little("mlp")
    odt.quant.convert_(tight, calibration())
    odt.quant.convert_(roomy, calibration(), headroom=0.5)
    assert int(tight[1].weight.abs().max()) == 127 and int(roomy[1].weight.abs().max()) == 85
    # Steps are rounded up to 17 bits.
    torch.testing.assert_close(roomy[1].weight_scale, 1.5 * tight[1].weight_scale, rtol=2.0**-16, atol=0.0)


def test_steps_times_any_number_of_them_are_exact() -> None:
    weight = torch.randn(2000, 3) * torch.logspace(-27, 27, 2000).view(-1, 1)
    for headroom in (0.0, 0.3):
        steps = weight_steps(weight, headroom)
        numbers = torch.arange(-127.0, 128.0)
        real = numbers * steps.view(-1, 1)
        assert torch.equal(real.double(), numbers.double() * steps.double().view(-1, 1))
        assert torch.equal(real / steps.view(-1, 1), numbers.expand(2000, -1))
        assert bool((weight.abs().amax(1) / steps <= 127).all())
        torch.testing.assert_close(weight.abs().amax(1) * (1 + headroom) / 127, steps, rtol=2.0**-16, atol=0.0)


def test_biases_outweigh_channels_of_tiny_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(800, 4))
    with torch.no_grad():
        model[0].weight[:4] *= torch.tensor([1e-12, 1e-9, 1e-7, 1e-5]).view(-1, 1, 1, 1)
        model[0].bias[:4] = torch.tensor([0.5, -0.5, 0.7, 3.0])
    expected = model[0](images(8, 0)).detach()
    odt.quant.convert_(model, calibration())
    layer, seen = model[0], []
    layer.register_forward_hook(lambda _, inputs, output: seen.append(output.dequantize()))
    model(images(8, 0))
    (found,) = seen
    assert float((found - expected).detach().abs().max()) < 1.5 * float(layer.output_grid[0])


def test_the_mean_of_ranges_cares_less_for_outliers() -> None:
    batches = [*calibration(), 50 * images(16, 9)]
    by_bounds, by_mean = trained_a_little("mlp"), trained_a_little("mlp")
    odt.quant.convert_(by_bounds, batches)
    odt.quant.convert_(by_mean, batches, observer="mean")
    steps = [
        float(next(m for m in model.modules() if isinstance(m, Quantize)).grid[0]) for model in (by_mean, by_bounds)
    ]
    assert steps[0] < 0.4 * steps[1]


def test_batches_come_as_loaders_give_them() -> None:
    plain, pairs, named = (trained_a_little("residual") for _ in range(3))
    odt.quant.convert_(plain, calibration())
    odt.quant.convert_(pairs, [(x, torch.zeros(16)) for x in calibration()])
    odt.quant.convert_(named, [{"x": x} for x in calibration()])
    for other in (pairs, named):
        assert all(torch.equal(a, b) for a, b in zip(other.buffers(), plain.buffers(), strict=True))


def test_bad_input_is_named() -> None:
    model = trained_a_little("mlp")
    with pytest.raises(ValueError, match="calibration_batches is empty"):
        odt.quant.convert_(model, [])
    with pytest.raises(ValueError, match="calibration_batches is a Tensor: give a list"):
        odt.quant.convert_(model, images(4))
    with pytest.raises(ValueError, match=r"not finite over the calibration batches"):
        odt.quant.convert_(model, [torch.full((2, 3, 12, 12), float("nan"))])
    with pytest.raises(ValueError, match="classifier is 'int4'"):
        odt.quant.convert_(model, calibration(), classifier="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="headroom is -1"):
        odt.quant.convert_(model, calibration(), headroom=-1)
    with pytest.raises(ValueError, match="nothing in Sequential can be converted"):
        odt.quant.convert_(nn.Sequential(nn.LSTM(4, 4)), [torch.randn(2, 3, 4)])
    with pytest.raises(ValueError, match="nothing to go back from"):
        odt.quant.dequantize_(model)
    odt.quant.convert_(model, calibration())
    with pytest.raises(ValueError, match="has been converted before"):
        odt.quant.convert_(model, calibration())
    with pytest.raises(TypeError, match="call the converted model as a whole"):
        model[1](torch.randn(2, 432))


def test_weights_that_are_not_finite_are_named() -> None:
    model = trained_a_little("mlp")
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        odt.quant.convert_(model, calibration())


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = trained_a_little("residual")
    x = images(8, 0)
    expected = model(x)
    with pytest.raises(ValueError, match="not finite"):
        odt.quant.convert_(model, [torch.full((2, 3, 12, 12), float("inf"))])
    assert torch.equal(model(x), expected) and type(model) is NETWORKS["residual"]
    assert isinstance(model.norm, nn.BatchNorm2d)


@pytest.mark.parametrize("classifier", ["fp32", "int8"])
def test_scores_of_a_convolution_may_outgrow_the_calibration(classifier: Any) -> None:
    model, x = trained_a_little("fire"), images(8, 0)
    most = float(model(x).detach().abs().max())
    conversion = odt.quant.convert_(model, [x], classifier=classifier)
    assert ("scores" in conversion.kept) == (classifier == "fp32")
    with torch.no_grad():
        layer = model.get_submodule("scores")
        if classifier == "fp32":
            layer.weight.mul_(10)  # type: ignore[operator, union-attr]
        else:
            layer.weight_scale.mul_(10)  # type: ignore[operator, union-attr]
        assert float(model(x).abs().max()) > 2 * most
