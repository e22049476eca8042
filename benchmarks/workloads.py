"""What is trained: models, their batches, and each model as a chain of blocks for the peers that need one."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCHES = 2
VOCABULARY = 30522
SEQUENCE_LENGTH = 128

Batch = dict[str, torch.Tensor]
Block = Callable[[Any], Any]


@dataclass
class Workload:
    """A model and how it is trained.

    Attributes:
        name: as on the command line.
        model: in training mode.
        batches: a few batches, used in turn; tensors by name, the images or tokens first.
    """

    name: str
    model: nn.Module
    batches: list[Batch]

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        if "images" in batch:
            return F.cross_entropy(self.model(batch["images"]), batch["labels"])
        return self.model(**batch).loss

    def task(self) -> tuple[Callable[..., torch.Tensor] | None, tuple[torch.Tensor, ...] | Batch]:
        """The loss function and the first batch, as torch_odt's functions take them."""
        batch = self.batches[0]
        return (F.cross_entropy, tuple(batch.values())) if "images" in batch else (None, batch)

    def chain(self, batch: Batch) -> tuple[list[Block], torch.Tensor, Block]:
        """The same computation as a chain: blocks, the first one's input, and what makes a loss of the last output."""
        if "images" in batch:
            blocks = _IMAGE_CHAINS[self.name](self.model)
            return blocks, batch["images"], lambda logits: F.cross_entropy(logits, batch["labels"])
        return _bert_chain(self.model, batch)


MODELS = ("mobilenet_v2", "resnet18", "resnet50", "squeezenet1_1", "googlenet", "densenet121", "bert_small")
# How many blocks each model's chain has.
BLOCKS = {
    "mobilenet_v2": 20,
    "resnet18": 10,
    "resnet50": 18,
    "squeezenet1_1": 13,
    "googlenet": 17,
    "densenet121": 11,
    "bert_small": 4,
}


def make_workload(
    name: str,
    batch_size: int = 16,
    *,
    image_size: int = 224,
    channels_last: bool = False,
    data_dir: Path | None = None,
    **options: Any,
) -> Workload:
    """A model from seed 0 and two batches for it; `options` go to torchvision's builder."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if name == "bert_small":
        model, data = _bert_small(), [_token_batch(batch_size, generator) for _ in range(BATCHES)]
    else:
        model, data = _image_model(name, **options), _image_batches(batch_size, image_size, generator, data_dir)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            data = [{**b, "images": b["images"].contiguous(memory_format=torch.channels_last)} for b in data]
    return Workload(name, model.train(), data)


def _image_model(name: str, **options: Any) -> nn.Module:
    import torchvision

    if name == "googlenet":
        options |= {"aux_logits": False, "init_weights": False}
    return torchvision.models.get_model(name, weights=None, **options)


def _bert_small() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=SEQUENCE_LENGTH,
        num_labels=77,
    )
    return BertForSequenceClassification(config)


def _token_batch(n: int, generator: torch.Generator) -> Batch:
    lengths = torch.randint(SEQUENCE_LENGTH // 2, SEQUENCE_LENGTH + 1, (n, 1), generator=generator)
    return {
        "input_ids": torch.randint(VOCABULARY, (n, SEQUENCE_LENGTH), generator=generator),
        "attention_mask": (torch.arange(SEQUENCE_LENGTH) < lengths).long(),
        "labels": torch.randint(77, (n,), generator=generator),
    }


def _image_batches(n: int, size: int, generator: torch.Generator, data_dir: Path | None) -> list[Batch]:
    if data_dir is None:
        return [
            {
                "images": torch.randn(n, 3, size, size, generator=generator),
                "labels": torch.randint(10, (n,), generator=generator),
            }
            for _ in range(BATCHES)
        ]
    images, labels = load_fashion_mnist(data_dir, n * BATCHES)
    return [
        {"images": upscale(part, size), "labels": target}
        for part, target in zip(images.split(n), labels.split(n), strict=True)
    ]


def load_fashion_mnist(data_dir: Path, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first training images as bytes and their labels; gzipped files are unpacked into a temporary folder."""
    from torchvision.datasets import FashionMNIST

    raw = data_dir / "FashionMNIST" / "raw"
    with tempfile.TemporaryDirectory() as folder:
        root = data_dir
        if not (raw / "train-images-idx3-ubyte").exists():
            root = Path(folder)
            unpacked = root / "FashionMNIST" / "raw"
            unpacked.mkdir(parents=True)
            for archive in raw.glob("*.gz"):
                with gzip.open(archive) as source, (unpacked / archive.stem).open("wb") as target:
                    shutil.copyfileobj(source, target)
        dataset = FashionMNIST(str(root), train=True)
        return dataset.data[:count].clone(), dataset.targets[:count].clone()


def upscale(images: torch.Tensor, size: int) -> torch.Tensor:
    """Grey images of bytes as normalised colour images of another size."""
    grey = images.unsqueeze(1).float().div_(255).sub_(0.2860).div_(0.3530)
    return F.interpolate(grey, size=size, mode="bilinear", antialias=False).repeat(1, 3, 1, 1)


def _mobilenet_v2(model: Any) -> list[Block]:
    return [*model.features, lambda x: model.classifier(_pooled(x))]


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def _resnet(model: Any) -> list[Block]:
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    return [stem, *blocks, lambda x: model.fc(model.avgpool(x).flatten(1))]


def _squeezenet(model: Any) -> list[Block]:
    # The activation works in place: it may not begin a segment, whose input must stay as it is.
    return [model.features[:2], *model.features[2:], lambda x: model.classifier(x).flatten(1)]


def _googlenet(model: Any) -> list[Block]:
    names = "conv1 maxpool1 conv2 conv3 maxpool2 inception3a inception3b maxpool3 inception4a inception4b inception4c"
    names += " inception4d inception4e maxpool4 inception5a inception5b"
    blocks = [getattr(model, name) for name in names.split()]
    return [*blocks, lambda x: model.fc(model.dropout(model.avgpool(x).flatten(1)))]


def _densenet(model: Any) -> list[Block]:
    return [model.features[:3], *model.features[3:], lambda x: model.classifier(_pooled(F.relu(x)))]


_IMAGE_CHAINS: dict[str, Callable[[Any], Sequence[Block]]] = {
    "mobilenet_v2": _mobilenet_v2,
    "resnet18": _resnet,
    "resnet50": _resnet,
    "squeezenet1_1": _squeezenet,
    "googlenet": _googlenet,
    "densenet121": _densenet,
}


def _bert_chain(model: Any, batch: Batch) -> tuple[list[Block], torch.Tensor, Block]:
    mask = batch["attention_mask"][:, None, None, :].bool().expand(-1, 1, SEQUENCE_LENGTH, -1)

    def layer_block(layer: nn.Module) -> Block:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            outputs = layer(hidden, attention_mask=mask)
            return outputs[0] if isinstance(outputs, tuple) else outputs

        return run

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        logits = model.classifier(model.dropout(model.bert.pooler(hidden)))
        return F.cross_entropy(logits, batch["labels"])

    # A checkpointed block needs an input that requires a gradient; token ids have none.
    hidden = model.bert.embeddings(input_ids=batch["input_ids"])
    return [layer_block(layer) for layer in model.bert.encoder.layer], hidden, loss
