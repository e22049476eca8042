"""The ways of `int8_training.py`: one network, trained in float32, bf16 and int8."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

MODELS = ("mobilenet_v2", "resnet18", "vgg11")
# What int8 is compared with, and int8.
EAGER = ("eager contiguous", "eager channels_last")
PLANNED = (" planned", "8GiB")  # behind a way's name, and within what budget
INT8 = ("qas", "niti", "qas planned", "niti planned")
CLASSES = 10
# Batches that are trained in turn: one alone is soon learnt by heart, and its gradients vanish.
BATCHES = 8
# NITI's rate, at which losses fall; at 2^3 times it ResNet-18's does not, and scales are looked at far more often.
GRADIENT_BITS = -2

Step = Callable[[], None]
Batch = tuple[Tensor, Tensor]


def ways_on(used: str) -> list[str]:
    """The ways that are measured on a set: bf16 where the processor multiplies it (AMX)."""
    return [*EAGER, "folded", *(["bf16"] if used == "amx" else []), *INT8]


def network(name: str, images: Tensor) -> nn.Module:
    """A network from seed 0 whose BatchNorms have seen the batch, so that they can be folded."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    with torch.no_grad():
        for _ in range(4):
            model(images)
    return model.train()


def batches_of(batch: int, pixels: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, 3, pixels, pixels, generator=generator),
            torch.randint(CLASSES, (batch,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


def make_step(way: str, model: nn.Module, batches: list[Batch]) -> Step:
    """A training step, of the batches in turn; the model is used up."""
    loss_fn: Callable[..., Tensor] = F.cross_entropy
    is_planned = way.endswith(PLANNED[0])
    way = way.removesuffix(PLANNED[0])
    if way != "eager contiguous":
        batches = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
    if way in ("eager channels_last", "bf16"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if way == "folded":
        model = fuse(model.eval()).train().to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if way == "qas":
        from torch_odt.quant import convert_, train_int8_

        convert_(model.eval(), [images for images, _ in batches])
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.001)
        train_int8_(model, optimizer, in_backward=True)
    elif way == "niti":
        from torch_odt.quant import NitiSGD, niti_, niti_cross_entropy

        niti_(model, batch_norm="fold", gradient_bits=GRADIENT_BITS)
        optimizer, loss_fn = NitiSGD(model, lr=0.001, in_backward=True), niti_cross_entropy
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    in_turn = cycle(batches)
    if is_planned:
        import torch_odt as odt

        planned = odt.TrainStep(model, loss_fn, optimizer, budget=PLANNED[1], cache=False)

        def planned_step() -> None:
            planned(*next(in_turn))

        return planned_step

    def step() -> None:
        images, labels = next(in_turn)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()

    return step
