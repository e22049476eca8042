"""Ways to adapt a CNN to other classes: what trains, and by whom; and steps of each, to measure what they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torch_odt as odt
from recipes.common.mcunet import InvertedResidual
from recipes.common.process_bytes import ROOMY, Training
from recipes.common.proxyless_mobile import ProxylessMobile
from torch_odt.adapt.head import find_head
from torch_odt.adapt.tinytl import Mode

NETWORKS = ("proxyless_mobile", "mobilenet_v2")
CLASSES = 10
BLOCKS: dict[type[nn.Module], str] = {InvertedResidual: "conv"}


@dataclass(frozen=True)
class Pretraining:
    """How a network is pretrained: see `transfer_task.pretrained`."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    rate: float = 0.1
    label_smoothing: float = 0.1


# With SGD MobileNetV2 diverges at the other's rate, and is a worse start at lower ones. Features that label smoothing
# has pressed together serve other classes worse where they stay frozen (S. Kornblith et al., "Why Do Better Loss
# Functions Lead to Less Transferable Features?", NeurIPS 2021).
PRETRAINING = {"proxyless_mobile": Pretraining(), "mobilenet_v2": Pretraining("adamw", 3e-3, label_smoothing=0.0)}


@dataclass(frozen=True)
class Way:
    """How a network is adapted.

    Attributes:
        trains: what does, beside the classifier; "LoRA" is peft's, of rank 8 at the pointwise convolutions, in
            torch_odt behind an adaptation whose classifier alone trains.
        engine: "plain" is PyTorch as it is, in which BatchNorm follows the batch where something of it may train.
        weight_code: how frozen weights are stored: in float32, or in 8 bits.
        pretrained_modules: the network was pretrained with lite residual modules beside its blocks.
        norm: what BatchNorm becomes in torch_odt: frozen, or one that follows the batch and keeps no input.
    """

    trains: Mode | Literal["LoRA"]
    engine: Literal["plain", "torch_odt"] = "torch_odt"
    weight_code: Literal["float32", "affine", "codebook"] = "float32"
    pretrained_modules: bool = False
    norm: Literal["frozen", "detached"] = "frozen"

    def __str__(self) -> str:
        bits = "" if self.weight_code == "float32" else f", 8 bits ({self.weight_code})"
        modules = ", pretrained modules" if self.pretrained_modules else ""
        norms = f", {self.norm} norms" if self.norm != "frozen" else ""
        return f"{self.engine} {self.trains}{bits}{modules}{norms}"


def make_network(name: str, classes: int, width: float = 1.0, *, modules_for: int | None = None) -> nn.Module:
    """A network of random weights.

    Args:
        modules_for: with lite residual modules beside its blocks, for images of that size; None for none.
    """
    if name == "proxyless_mobile":
        model: nn.Module = ProxylessMobile(classes, width=width)
    else:
        from torchvision.models import mobilenet_v2

        model = mobilenet_v2(weights=None, num_classes=classes, width_mult=width)
    if modules_for is not None:
        odt.adapt.add_lite_residuals_(model, blocks=BLOCKS, without=[_first_block(model)], input_size=modules_for)
    return model


def adapt(model: nn.Module, way: Way, classes: int, input_size: int) -> list[nn.Parameter]:
    """Change a network in place so that it learns so many classes in that way.

    Returns:
        What trains, for the optimizer.
    """
    model.train()
    is_lora = way.trains == "LoRA"
    if way.engine == "torch_odt":
        options = {} if way.weight_code == "float32" else {"weight_bits": 8, "weight_code": way.weight_code}
        adaptation = odt.adapt.tinytl_(
            model,
            mode="last" if is_lora else way.trains,  # type: ignore[arg-type]
            norm=way.norm,
            classes=classes,
            input_size=input_size,
            blocks=BLOCKS,
            without=[_first_block(model)] if "lite" in way.trains else (),
            **options,
        )
        return [*adaptation.parameters(), *_add_lora(model)] if is_lora else adaptation.parameters()
    return select(model, way.trains, classes)


def select(model: nn.Module, trains: Mode | Literal["LoRA"], classes: int) -> list[nn.Parameter]:
    """Give a network a new classifier, and let that and what is said train, in plain PyTorch or by peft.

    Returns:
        What trains, for the optimizer.
    """
    head = find_head(model, None)
    parent, _, attribute = head.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Linear(model.get_submodule(head).in_features, classes))
    if trains == "LoRA":
        _add_lora(model)
    norms = {p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        is_selected = {
            "full": True,
            "norm+last": parameter in norms,
            "last": False,
            "bias": name.endswith("bias"),
            "LoRA": ".lora_" in name,
        }[trains]
        parameter.requires_grad_(is_selected or name.startswith(f"{head}."))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _add_lora(model: nn.Module) -> list[nn.Parameter]:
    """As peft does it, and nothing else changes; a depthwise convolution has no rank that could be lower.

    Returns:
        The factors.
    """
    from peft import LoraConfig, inject_adapter_in_model

    pointwise = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=pointwise), model)
    for parameter in trained:
        parameter.requires_grad_(True)
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def _first_block(model: nn.Module) -> str:
    """The block whose input is the largest by far: no lite module runs beside it, as in TinyTL's networks."""
    return "blocks.0" if isinstance(model, ProxylessMobile) else "features.1"


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    way: Way,
    micro_batch: int,
    *,
    cache: Path | Literal[False] = False,
) -> Callable[[Tensor, Tensor], object]:
    """A step of that way.

    Args:
        micro_batch: samples that run at once; plain PyTorch accumulates their gradients.
        cache: where torch_odt remembers what it has measured.
    """
    if way.engine == "torch_odt":
        return odt.TrainStep(model, cross_entropy, optimizer, budget=ROOMY, cache=cache, micro_batch=micro_batch)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part, labels in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
            (cross_entropy(model(part), labels) * (len(part) / len(x))).backward()
        optimizer.step()

    return step


def training(network: str, way: Way, size: int, batch: int, micro_batch: int) -> Training:
    """Steps of Adam on random images, for `training_bytes`."""
    model = make_network(network, 1000, modules_for=size if way.pretrained_modules else None).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.Adam(adapt(model, way, CLASSES, size), lr=1e-4)
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return Training(make_step(model, optimizer, way, micro_batch), optimizer, (x, torch.randint(CLASSES, (batch,))))
