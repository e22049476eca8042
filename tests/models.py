"""The models that the tests train: one table, from torchvision's networks to modules that are awkward to capture.

Images and batches are small, so that a step of any of them takes a fraction of a second; the structure is the real one.
A new case is one more entry of `CASES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import awkward
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Batch = tuple[Args, Kwargs]
MakeBatch = Callable[[int, torch.Generator], Batch]

CLASSES = 10
VOCABULARY = 97


@dataclass(frozen=True)
class ModelCase:
    """A model, batches for it and what the package is to make of it.

    Attributes:
        name: the name that the test has.
        make: builds the model, in training mode, from torch's global random numbers.
        batch: `batch(n, generator)` returns positional and keyword arguments of a step over n samples. Positional ones
            are the model's inputs and then the target; keyword ones are what the model takes by name.
        loss_fn: called as `loss_fn(outputs, target)`; None when the model returns its own loss.
        captured: whether a step of it can be captured as one graph; the others train through the fallback.
        micro_batchable: whether splitting the batch leaves loss, gradients and buffers what they are.
        random: whether a step draws random numbers.
        batch_size: samples in a batch of the tests.
        doors: how it can be trained: "step" (`TrainStep`), "wrap" (`odt.wrap`).
        large: a batch size, and batches of the kind with which half of what keeping everything takes is enough. None
            where gradients, the optimizer's state and the largest operator are more at any size a test can afford.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: MakeBatch
    loss_fn: Callable[..., torch.Tensor] | None = field(default_factory=nn.CrossEntropyLoss)
    captured: bool = True
    micro_batchable: bool = False
    random: bool = False
    batch_size: int = 4
    doors: tuple[str, ...] = ("step", "wrap")
    large: tuple[int, MakeBatch] | None = None

    def enlarged(self) -> ModelCase | None:
        """The case with the batches of `large`."""
        return self.large and replace(self, batch_size=self.large[0], batch=self.large[1])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss as a user's own loop computes it."""
        args, kwargs = batch
        if kwargs:
            outputs = model(*args, **kwargs)
            return outputs.loss if self.loss_fn is None else self.loss_fn(outputs, kwargs)
        assert self.loss_fn is not None
        return self.loss_fn(model(*args[:-1]), args[-1])

    def model(self, seed: int = 0) -> nn.Module:
        """A model in its initial state; the same seed gives the same state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().train()

    def batches(self, count: int, seed: int = 1) -> list[Batch]:
        """`count` different batches; the same seed gives the same batches."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(self.batch_size, generator) for _ in range(count)]


def image_batch(
    size: int, memory_format: torch.memory_format = torch.contiguous_format, channels: int = 3
) -> MakeBatch:
    """Makes batches of square images."""

    def make(n: int, generator: torch.Generator) -> Batch:
        images = torch.randn(n, channels, size, size, generator=generator).contiguous(memory_format=memory_format)
        return (images, torch.randint(CLASSES, (n,), generator=generator)), {}

    return make


def _vectors(features: int, inputs: int = 1) -> MakeBatch:
    def make(n: int, generator: torch.Generator) -> Batch:
        vectors = tuple(torch.randn(n, features, generator=generator) for _ in range(inputs))
        return (*vectors, torch.randint(CLASSES, (n,), generator=generator)), {}

    return make


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return functools.partial(torchvision.models.get_model, name, weights=None, num_classes=CLASSES, **options)


def _image_case(name: str, *, size: int = 64, options: Mapping[str, Any] | None = None, **flags: Any) -> ModelCase:
    return ModelCase(name, _torchvision(name, **(options or {})), image_batch(size), **flags)


def _channels_last(case: ModelCase, size: int = 64) -> ModelCase:
    def make() -> nn.Module:
        return case.make().to(memory_format=torch.channels_last)

    batch = image_batch(size, torch.channels_last)
    large = case.large and (case.large[0], image_batch(96, torch.channels_last))
    return replace(case, name=f"{case.name}-channels_last", make=make, batch=batch, large=large)


def _narrow(name: str, linear: tuple[int, int], units: int) -> Callable[[], nn.Module]:
    """A network whose two hidden linear layers have `units` in place of 4096: millions of parameters less to compare.

    Args:
        linear: where in the classifier they are; its last layer follows them.
    """

    def make() -> nn.Module:
        model = _torchvision(name)()
        first, second = linear
        model.classifier[first] = nn.Linear(model.classifier[first].in_features, units)
        model.classifier[second] = nn.Linear(units, units)
        model.classifier[6] = nn.Linear(units, CLASSES)
        return model

    return make


def _googlenet_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """GoogLeNet's loss with its two auxiliary classifiers."""
    auxiliary = F.cross_entropy(outputs.aux_logits1, target) + F.cross_entropy(outputs.aux_logits2, target)
    return F.cross_entropy(outputs.logits, target) + 0.3 * auxiliary


def make_bert_small(vocabulary: int = VOCABULARY, **options: Any) -> nn.Module:
    """BERT of 4 layers, hidden size 512 and 8 heads, classifying sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=128,
        num_labels=CLASSES,
        # Otherwise the first forward pass notes it in the config, and every step after the first is another program.
        problem_type="single_label_classification",
        **options,
    )
    return BertForSequenceClassification(config)


def bert_batch(n: int, generator: torch.Generator, *, vocabulary: int = VOCABULARY, length: int = 128) -> Batch:
    """Sequences of different lengths, padded to one."""
    lengths = torch.randint(length // 2, length, (n, 1), generator=generator)
    return (), {
        "input_ids": torch.randint(vocabulary, (n, length), generator=generator),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "labels": torch.randint(CLASSES, (n,), generator=generator),
    }


def _token_batch(n: int, generator: torch.Generator, length: int = 16) -> Batch:
    tokens = torch.randint(VOCABULARY, (n, length + 1), generator=generator)
    return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}


def _sequence_batch(n: int, generator: torch.Generator, length: int = 12, features: int = 8) -> Batch:
    sequences = torch.randn(n, length, features, generator=generator)
    return (sequences, torch.randint(CLASSES, (n,), generator=generator)), {}


def _autoencoder_batch(n: int, generator: torch.Generator) -> Batch:
    images = torch.rand(n, 1, 32, 32, generator=generator)
    return (images, images), {}


def _token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _named_logits_loss(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"], target) + 1e-3 * outputs["penalty"].mean()


RESNET18 = _image_case("resnet18")
MOBILENET_V2 = _image_case("mobilenet_v2", random=True, large=(32, image_batch(96)))
SQUEEZENET = _image_case("squeezenet1_1", random=True, micro_batchable=True, large=(96, image_batch(96)))
VIT = _image_case("vit_b_16", size=32, options={"image_size": 32}, micro_batchable=True)

_GOOGLENET = _image_case("googlenet", options={"aux_logits": False, "init_weights": False}, random=True)

NETWORKS: tuple[ModelCase, ...] = (
    RESNET18,
    _channels_last(RESNET18),
    _image_case("resnet50"),
    MOBILENET_V2,
    _channels_last(MOBILENET_V2),
    _image_case("mobilenet_v3_small", random=True, large=(16, image_batch(160))),
    SQUEEZENET,
    _channels_last(SQUEEZENET),
    _GOOGLENET,
    replace(
        _GOOGLENET,
        name="googlenet-auxiliary",
        make=_torchvision("googlenet", aux_logits=True, init_weights=False),
        loss_fn=_googlenet_loss,
        large=None,
    ),
    _image_case("densenet121", large=(8, image_batch(128))),
    _image_case("shufflenet_v2_x0_5"),
    _image_case("efficientnet_b0", random=True, large=(16, image_batch(112))),
    _image_case("convnext_tiny", random=True, micro_batchable=True),
    ModelCase("vgg11_bn", _narrow("vgg11_bn", (0, 3), 64), image_batch(32), random=True),
    ModelCase("alexnet", _narrow("alexnet", (1, 4), 256), image_batch(64), random=True, micro_batchable=True),
    VIT,
    ModelCase(
        "bert_small",
        make_bert_small,
        bert_batch,
        None,
        random=True,
        micro_batchable=True,
        large=(16, functools.partial(bert_batch, length=64)),
    ),
    ModelCase("autoencoder", awkward.Autoencoder, _autoencoder_batch, nn.MSELoss(), micro_batchable=True),
    ModelCase("lstm", awkward.SequenceClassifier, _sequence_batch, micro_batchable=True),
    ModelCase("tied_language_model", awkward.TiedLanguageModel, _token_batch, _token_loss, micro_batchable=True),
)

AWKWARD: tuple[ModelCase, ...] = (
    ModelCase("dropout", awkward.Dropouts, _vectors(16), random=True, micro_batchable=True, batch_size=8),
    ModelCase("in_place", awkward.InPlace, image_batch(8), micro_batchable=True),
    ModelCase("frozen", awkward.Frozen, image_batch(16)),
    ModelCase("used_twice", awkward.UsedTwice, _vectors(16)),
    ModelCase("several_inputs", awkward.SeveralInputs, _vectors(16, inputs=2), micro_batchable=True),
    ModelCase("dict_outputs", awkward.DictOutputs, _vectors(16), _named_logits_loss, micro_batchable=True),
    ModelCase("changing_buffers", awkward.ChangingBuffers, _vectors(16)),
    ModelCase("views_and_aliases", awkward.ViewsAndAliases, _vectors(16), micro_batchable=True),
    ModelCase("control_flow", awkward.ControlFlow, _vectors(16), captured=False),
    ModelCase("custom_function", awkward.WithCustomFunction, _vectors(16), captured=False),
)

CASES: tuple[ModelCase, ...] = NETWORKS + AWKWARD


def case_named(name: str) -> ModelCase:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
