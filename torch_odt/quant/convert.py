"""Post-training quantization to a network that computes and trains in int8, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.sparse_layers import SparseLayer
from torch_odt.quant.modules import MASTERS, Int8Conv2d, Int8Layer, Int8Linear, Masters
from torch_odt.quant.one_way import require_plain
from torch_odt.quant.qas import int8_layers, scale_gradients_
from torch_odt.quant.ranges import OBSERVERS, Observer
from torch_odt.quant.rewrite import ROOM, Classifier, Options, Rewritten, rewrite
from torch_odt.quant.trace import TracedModule, calibrate, trace_parts
from torch_odt.runtime.budget import format_bytes

CLASSIFIERS: tuple[Classifier, ...] = ("fp32", "int8")


@dataclass(frozen=True)
class Conversion:
    """What `convert_` has made of a model.

    Attributes:
        model: the same object.
        layers: names of the convolutions and linear layers that are int8 now.
        kept: what stays float32, by name, with the reason; layers that `forward` does not call are among it.
        operators: how many int8 operators there are besides: sums, pools that are no part of a layer, and conversions
            from float32.
        weight_bytes_before, weight_bytes: of all parameters and buffers.
        batches: how many the ranges were seen over.
    """

    model: nn.Module
    layers: tuple[str, ...]
    kept: dict[str, str]
    operators: int
    weight_bytes_before: int
    weight_bytes: int
    batches: int

    def __str__(self) -> str:
        before, after = format_bytes(self.weight_bytes_before), format_bytes(self.weight_bytes)
        lines = [f"{type(self.model).__name__} in int8"]
        lines += [f"  layers     {len(self.layers)}, and {self.operators} other operators"]
        lines += [f"  weights    {after} instead of {before}"]
        lines += [f"  calibrated over {self.batches} batches"]
        lines += [f"  float32    {name}: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)


def convert_(
    model: nn.Module,
    calibration_batches: Iterable[Any],
    *,
    observer: Observer = "minmax",
    classifier: Classifier = "fp32",
    masters: Masters = "none",
    qas: bool = True,
    headroom: float = 0.0,
    seed: int = 0,
) -> Conversion:
    """Make a trained CNN or MLP compute and train in int8.

    Choose it for a network that was trained in float32 and is to be fine-tuned, or only run, in a quarter of the bytes.
    Convolutions and linear layers hold int8 weights, with a step for each output channel; BatchNorm is folded into
    them as it is in evaluation mode, a ReLU or another clamp is a bound of their output, and a max-pool behind that,
    whose windows do not overlap, is a part of them: a hook on such a layer sees its pooled output. Activations are
    int8 from layer to layer, residual sums, pools, and SiLU and its kind included, on asymmetric grids that are fixed
    here. Gradients are bfloat16 between layers, and int8 inside them. What has no int8 form stays float32 and is named,
    with conversions around it.

    The model is then trained like any other, by `TrainStep`, `wrap` or a plain loop, after `train_int8_`: parameters
    and gradients are real numbers, as in float32 with BatchNorm folded. Parameters that were frozen by
    `requires_grad_(False)` before stay so, which makes a sparse update of it (TTE); a weight in which a BatchNorm is
    folded is frozen where both are. Its state_dict holds everything, and loads into a model that was converted the same
    way, whatever batches that was calibrated on.

    Args:
        model: in float32, on the CPU; changed in place. Its code must be traceable by torch.fx (no branches on data),
            or that of its parts. It cannot be pickled as a whole afterwards: save its state_dict.
        calibration_batches: inputs as the model is to see, some hundred samples in all; each a tensor, a tuple that
            begins with it, or a dict of keyword arguments.
        observer: how ranges are put together over batches, see `Range`.
        classifier: the layer that makes the scores, in "fp32", as in TTE, or in "int8" with an output in float32. It is
            a last layer, behind which scores may be averaged, scaled or made probabilities.
        masters: "none" holds weights in int8 alone, which `train_int8_` updates; "fp32" holds float32 masters beside
            them, for any optimizer: four more bytes a weight.
        qas: quantization-aware scaling, see `scale_gradients_`; False is for comparisons.
        headroom: how much larger than now a channel's largest weight may become, in parts of it; steps grow by it.
        seed: of the rounding of updates.

    Returns:
        What was converted and what was not. `dequantize_(model)` goes back.

    Raises:
        ValueError: there are no batches, or one in place of a list, nothing can be converted, a range or a weight is
            not finite, the model has been converted or quantized in another way, or an option is not one of those.

    Example:
        >>> import torch
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> conversion = odt.quant.convert_(model, [torch.randn(4, 3, 8, 8)])
        >>> conversion.layers, list(conversion.kept)
        (('0',), ['4'])
        >>> model(torch.randn(2, 3, 8, 8)).dtype
        torch.float32
    """
    _check(model, observer, classifier, masters, headroom)
    before = _nbytes(model)
    kept: dict[str, str] = {}
    parts = trace_parts(model, kept)
    batches = calibrate(model, parts, calibration_batches, observer)
    if not batches:
        raise ValueError("calibration_batches is empty: give some batches of inputs as the model is to see")
    options = Options(classifier, masters, headroom, seed)
    shared = _shared_parameters(model)
    found: list[tuple[TracedModule, Rewritten]] = []
    for part in parts:
        if part.ranges:
            found.append((part, rewrite(part, options, shared)))
            kept |= found[-1][1].kept
        else:
            kept[part.name] = "no calibration batch has reached it"
    layers = tuple(layer for _, rewritten in found for layer in rewritten.layers)
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5]) or "it has no layers"
        raise ValueError(
            f"nothing in {type(model).__name__} can be converted to int8 ({reasons}){_adapted_hint(model)}"
        )
    kept |= _beside_the_graphs(model, parts, layers, kept)
    # Whatever can fail has not: the model changes from here on.
    for part, rewritten in found:
        if rewritten.layers:
            part.module.__class__ = _computing(type(part.module), rewritten.install())
    scale_gradients_(model, qas)
    operators = sum(rewritten.operators for _, rewritten in found if rewritten.layers)
    return Conversion(model, layers, kept, operators, before, _nbytes(model), batches)


def _beside_the_graphs(
    model: nn.Module, parts: list[TracedModule], layers: tuple[str, ...], kept: dict[str, str]
) -> dict[str, str]:
    """Layers that no graph calls under their name, with the reason why they stay as they are."""
    seen = set(layers) | set(kept)
    for part in parts:
        prefix = f"{part.name}." if part.name else ""
        for node in part.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                target = str(node.target)
                seen.add(prefix + (target if node.op == "call_module" else target.rpartition(".")[0]))
    named = dict(model.named_modules(remove_duplicate=False))
    names = {id(named[name]): name for name in seen if name in named}
    reasons = {}
    for name, module in named.items():
        if not isinstance(module, (nn.Conv2d, nn.Linear)) or any(f"{name}.".startswith(f"{each}.") for each in seen):
            continue
        other = names.get(id(module))
        if other is None:
            reasons[name] = "forward has not called it, and will not"
        elif other in layers:
            reasons[name] = f"it is another name of {other}, and of that as it was before"
    return reasons


def dequantize_(model: nn.Module) -> nn.Module:
    """Make a plain float32 model of a converted one.

    Choose it to save, export or compare what was trained in int8: weights are the real numbers that their integers
    stand for, with masters those of the masters; BatchNorms that were folded are identities. Activations are not
    rounded any more.

    Args:
        model: a converted one; changed in place. Make the optimizer anew.

    Returns:
        The model, of the class that it had before, with ordinary layers.

    Raises:
        ValueError: the model has not been converted.

    Example:
        >>> import torch
        >>> import torch_odt as odt
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = odt.quant.convert_(model, [torch.randn(16, 4)])
        >>> odt.quant.dequantize_(model)[0]
        Linear(in_features=4, out_features=8, bias=True)
    """
    layers = int8_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no int8 layers: there is nothing to go back from")
    for name, layer in layers.items():
        parent, _, local = name.rpartition(".")
        setattr(model.get_submodule(parent), local, _float_layer(layer))
    for module in list(model.modules()):
        original = type(module).__dict__.get(_ORIGINAL)
        if original is not None:
            module.__class__ = original
            module._modules.pop(ROOM, None)
    return model


_ORIGINAL = "_torch_odt_before_int8"


def _computing(kind: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A class like another one, whose modules compute something else. Copies of modules stay of it."""
    members = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__, _ORIGINAL: kind}
    return type(kind.__name__, (kind,), members)


def _float_layer(layer: Int8Layer) -> nn.Module:
    weight, bias, w = layer.float_weight(), layer.float_bias(), layer.windows
    made: nn.Module
    if isinstance(layer, Int8Linear):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    else:
        assert isinstance(layer, Int8Conv2d)
        made = nn.Conv2d(
            weight.shape[1] * w.groups, weight.shape[0], tuple(weight.shape[2:]), w.stride, w.padding, w.dilation,  # type: ignore[arg-type]
            w.groups, bias is not None,
        )  # fmt: skip
    made.train(layer.training)
    made.weight = nn.Parameter(weight, requires_grad=layer.trained.requires_grad)
    if bias is not None:
        assert layer.bias is not None
        made.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    return made


def _check(model: nn.Module, observer: str, classifier: str, masters: str, headroom: float) -> None:
    for option, value, known in (
        ("observer", observer, OBSERVERS),
        ("classifier", classifier, CLASSIFIERS),
        ("masters", masters, MASTERS),
    ):
        if value not in known:
            raise ValueError(f"{option} is {value!r}; choose one of {', '.join(known)}")
    if not 0 <= headroom < float("inf"):
        raise ValueError(f"headroom is {headroom}; it is a part of the largest weight, such as 0.5, and not negative")
    require_plain(model, "convert_")
    if int8_layers(model):
        raise ValueError(f"{type(model).__name__} has been converted before; dequantize_ it first")


def _adapted_hint(model: nn.Module) -> str:
    if not any(isinstance(module, (FrozenBatchNorm, SparseLayer)) for module in model.modules()):
        return ""
    return (
        ". It is adapted: call merge() or unload() of that adaptation first, or convert the model before and let "
        "requires_grad_(False), before convert_, say what does not train"
    )


def _nbytes(model: nn.Module) -> int:
    """Of what is in memory: slots have none."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for storage in storages.values())


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Of parameters that several modules hold: by their id, the names of these."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    return {parameter: names for parameter, names in holders.items() if len(names) > 1}
