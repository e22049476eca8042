"""Weights as numbers of 256 values: near, the same everywhere, and a real quarter of the bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from adapted_steps import assert_trained_alike, train_both
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import torch_odt as odt
from torch_odt.adapt.chain import Chain
from torch_odt.adapt.stored_weights import StoredConv2d, StoredLinear
from torch_odt.adapt.weight_codebook import CENTROIDS, make_codebook, read_codebook


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), elements=st.integers(1, 2000), power=st.sampled_from([1, 3, 5]))
def test_every_element_stands_for_the_nearest_value(seed: int, elements: int, power: int) -> None:
    weight = drawn(elements, seed=seed) ** power
    codes, centroids = make_codebook(weight)
    assert codes.dtype == torch.uint8 and centroids.shape == (CENTROIDS,)
    assert bool((centroids.diff() >= 0).all())
    error = (read_codebook(codes, centroids) - weight).abs()
    nearest = (weight[:, None] - centroids).abs().amin(1)
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=1e-7)


@given(st.integers(1, CENTROIDS), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_few_values_are_exact(different: int, dtype: torch.dtype) -> None:
    weight = (torch.arange(2000) % different).reshape(20, 100).to(dtype)
    codes, centroids = make_codebook(weight)
    assert centroids.dtype == dtype
    assert torch.equal(read_codebook(codes, centroids), weight)


@pytest.mark.parametrize("draw", [lambda x: x, lambda x: x**3, lambda x: x.exp()], ids=["normal", "cubes", "skewed"])
def test_is_nearer_than_steps_of_each_row(draw: Callable[[Tensor], Tensor]) -> None:
    """Where rows are alike and long, 256 values that are chosen are better than 255 that are evenly spaced."""
    layer = nn.Linear(1000, 64)
    layer.weight.data = draw(drawn(64, 1000))
    affine, codebook = (StoredLinear(layer, code) for code in ("affine", "codebook"))  # type: ignore[arg-type]
    errors = [float((stored.weight - layer.weight.detach()).square().mean()) for stored in (affine, codebook)]
    assert errors[1] < 0.7 * errors[0]


def test_a_mean_is_the_best_value_of_what_is_nearest_to_it() -> None:
    """Lloyd's iterations have nearly converged: each value is the mean of what stands for it."""
    weight = drawn(200, 200).flatten()
    codes, centroids = make_codebook(weight)
    counts = torch.bincount(codes.int(), minlength=CENTROIDS)
    means = torch.zeros(CENTROIDS).index_add_(0, codes.int(), weight) / counts.clamp(min=1)
    step = float(weight.max() - weight.min()) / CENTROIDS
    assert float((means - centroids)[counts > 0].abs().max()) < step / 2


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        make_codebook(torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2), nn.Conv2d(6, 8, 1, bias=False), nn.Linear(30, 40)]
)
def test_a_layer_computes_with_what_its_codes_stand_for(layer: nn.Conv2d | nn.Linear) -> None:
    kind = StoredLinear if isinstance(layer, nn.Linear) else StoredConv2d
    stored = kind(layer, "codebook")  # type: ignore[arg-type]
    plain = copy.deepcopy(layer)
    plain.weight.data = stored.weight
    x = drawn(2, 30) if isinstance(layer, nn.Linear) else drawn(2, layer.in_channels, 7, 7)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    assert torch.equal(stored(ours), plain(theirs))
    stored(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def small_cnn(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 64, 3, bias=False)]
        return nn.Sequential(
            *body, nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
        )


def adapted(model: nn.Module) -> odt.adapt.Adaptation:
    return odt.adapt.tinytl_(model, mode="bias", classes=5, weight_bits=8, weight_code="codebook")


def test_trains_what_plain_training_of_the_same_model_does() -> None:
    model = small_cnn()
    adaptation = adapted(model)
    assert "1 weights are smaller than a codebook and stay: 0" in str(adaptation)
    assert "1 frozen weights are stored in 8 bits (codebook)" in str(adaptation)
    batches = [(drawn(4, 3, 12, 12, seed=seed), torch.arange(4)) for seed in range(2)]
    assert_trained_alike(train_both(model, batches))


def test_merged_it_is_an_ordinary_model_with_these_weights() -> None:
    model = small_cnn().eval()
    adaptation = adapted(model)
    x = drawn(2, 3, 12, 12)
    with torch.no_grad():
        before = model(x)
        adaptation.merge()
        torch.testing.assert_close(model(x), before)
    assert [type(layer) for layer in model] == [type(layer) for layer in small_cnn()]
    assert len(model[3].weight.unique()) <= CENTROIDS
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_unloaded_the_weights_are_within_a_step() -> None:
    model, plain = small_cnn(), small_cnn()
    adapted(model).unload()
    weight = plain[3].weight.detach()
    step = float(weight.max() - weight.min()) / CENTROIDS
    assert float((model[3].weight - weight).detach().abs().max()) <= 4 * step
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[-1].out_features == 4


def test_a_state_dict_goes_from_one_adapted_model_to_another(tmp_path) -> None:  # type: ignore[no-untyped-def]
    first, second = small_cnn(0), small_cnn(1)
    for model in (first, second):
        adapted(model)
    torch.save(first.state_dict(), tmp_path / "model.pt")
    second.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x = drawn(2, 3, 12, 12)
    assert torch.equal(first.eval()(x), second.eval()(x))


def test_the_bytes_of_a_weight_are_a_quarter() -> None:
    model = nn.Sequential(nn.Conv2d(64, 256, 3, bias=False), nn.BatchNorm2d(256), nn.Flatten(), nn.Linear(256, 2))
    weight = model[0].weight
    adaptation = adapted(model)
    assert weight.untyped_storage().nbytes() == 0
    stored = model[0]
    assert isinstance(stored, StoredConv2d)
    held = sum(tensor.nbytes for tensor in stored.state_dict().values())
    assert held == 64 * 256 * 9 + 4 * CENTROIDS
    assert adaptation.after.weight_bytes < 0.3 * adaptation.before.weight_bytes


def test_a_code_needs_8_bits() -> None:
    for options, text in (({"weight_code": "codebook"}, "give weight_bits=8"), ({"weight_code": "huffman"}, "huffman")):
        with pytest.raises(ValueError, match=text):
            odt.adapt.tinytl_(small_cnn(), mode="bias", **options)  # type: ignore[arg-type]


def test_codes_keep_the_memory_format() -> None:
    conv = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last)
    stored = StoredConv2d(conv, "codebook")
    assert stored.codes.stride() == stored.weight.stride() == conv.weight.stride()
    assert torch.equal(stored.weight, stored.centroids[stored.codes.long()])


@given(st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99), st.floats(-7, 3))
def test_sixteen_bits_are_stored_within_their_own_rounding(dtype: torch.dtype, seed: int, power: float) -> None:
    weight = (drawn(64, 32, seed=seed) * drawn(64, 1, seed=seed + 1) * 10**power).to(dtype)
    layer = nn.Linear(32, 64, dtype=dtype)
    layer.weight.data = weight
    stored = StoredLinear(layer)
    assert stored.weight.dtype == dtype and int(stored.codes.min()) >= -127
    largest = weight.double().abs().amax(1, keepdim=True)
    # Half a step, which rounding makes larger, and the rounding of what is computed with.
    allowed = largest * (1 / 254 + 1.25 * torch.finfo(dtype).eps) + torch.finfo(dtype).smallest_normal * 2**-9
    assert bool(((stored.weight.double() - weight.double()).abs() <= allowed).all())


def test_a_model_may_ask_for_the_type_of_a_stored_weight() -> None:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    model, x = ViTForImageClassification(config).eval(), torch.randn(2, 3, 16, 16)
    before = model(x).logits
    adaptation = odt.adapt.tinytl_(model, mode="bias", weight_bits=8)
    assert "frozen weights are stored in 8 bits" in str(adaptation)
    torch.testing.assert_close(model(x).logits, before, atol=0.02, rtol=0.1)


def test_traces_see_layers_and_leave_nothing_in_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model.append(nn.Linear(128, 4))
    odt.adapt.tinytl_(model, mode="bias", weight_bits=8)
    batch = (torch.randn(2, 3, 8, 8), torch.tensor([0, 3]))
    odt.adapt.bias_only_(model, norm="folded")
    blocks = odt.adapt.blockwise(model, nn.functional.cross_entropy, batch, blocks=2, cache=False)
    assert len(blocks) == 2
    assert not [name for name in vars(model) if "constant" in name]
    assert_trained_alike(train_both(blocks.stages[0].module, [batch]))


def test_a_cut_between_stored_layers_knows_which_dimension_holds_the_channels() -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3))

    stored = made()
    stored[0], stored[2] = StoredLinear(stored[0]), StoredLinear(stored[2])
    dims = [[cut.channel_dim for cut in Chain(model, torch.zeros(4, 5, 6)).cuts] for model in (made(), stored)]
    assert dims[0] == dims[1] and 2 in dims[0]
