"""Small modules, each with one habit that makes capturing, recomputing or splitting a step difficult."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

_CLASSES = 10


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Sigmoid()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(images))


class SequenceClassifier(nn.Module):
    """A bidirectional LSTM of two layers and a linear layer over its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, _CLASSES)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(sequences)
        return self.head(outputs[:, -1])


class TiedLanguageModel(nn.Module):
    """A causal transformer whose output layer is its embedding."""

    def __init__(self, vocabulary: int = 97, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return self.output(x + self.mlp(self.norm(x)))


class Dropouts(nn.Module):
    """Dropout as a module and as a function, and noise drawn in between; all as in a float64 run from the same seed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(64, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(F.relu(self.first(x)))
        noise = torch.rand(x.shape, dtype=torch.float32).to(x.dtype) * 0.01
        return self.second(F.dropout(x + noise, 0.1, self.training))


class InPlace(nn.Module):
    """Changes activations and slices of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.convolution(images), inplace=True)
        y = self.second(x)
        y += x
        y[:, :2].mul_(0.5)
        y = F.hardtanh(y, -1.0, 6.0, inplace=True)
        y[:, 3] = x[:, 4]
        return self.head(y.mean(dim=(2, 3)))


class Frozen(nn.Module):
    """The body is frozen, one of its BatchNorms in evaluation mode; a part after the frozen head is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.trained = nn.Conv2d(8, 8, 3, padding=1)
        self.frozen = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, _CLASSES)
        for parameter in [*self.body.parameters(), *self.frozen.parameters(), self.head.weight]:
            parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.frozen[1].eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.trained(self.body(images)))
        return self.head(x.mean(dim=(2, 3)))


class UsedTwice(nn.Module):
    """A linear layer and a BatchNorm are called twice in one pass: two updates of the same statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.relu(self.norm(self.layer(x)))
        return self.head(x)


class SeveralInputs(nn.Module):
    """Two tensors, and a number that keeps its default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 32)
        self.head = nn.Linear(32, _CLASSES)

    def forward(self, left: torch.Tensor, right: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(left, right) * scale))


class DictOutputs(nn.Module):
    """Returns a dictionary with tensors of several shapes and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)
        self.head = nn.Linear(32, _CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = F.gelu(self.layer(x))
        return {"logits": self.head(hidden), "penalty": hidden.square().sum(dim=1), "layers": 2}


class ChangingBuffers(nn.Module):
    """Keeps a running mean and a counter of its own, and uses the mean that it has just changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.detach().mean(dim=0), alpha=0.1)
            self.count += 1
        return self.head(hidden - self.mean)


class ViewsAndAliases(nn.Module):
    """Views of one storage that overlap, expand and outlive it, and an output that is a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).unflatten(1, (4, 8))
        left, right = hidden[:, :3], hidden[:, 1:]
        mixed = torch.einsum("bij,bkj->bik", left, right) * self.scale.expand(3, 3)
        flat = torch.cat([hidden.transpose(1, 2).flatten(1), mixed.flatten(1), x, x[:, :7]], dim=1)
        return self.head(flat)


class ControlFlow(nn.Module):
    """Which layers run depends on the data, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)
        self.positive = nn.Linear(32, 32)
        self.negative = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.layer(x)))
        x = self.positive(x) if x[0].sum().item() > 0 else self.negative(x) + self.positive(x)
        return self.head(torch.tanh(x))


class _NumpySoftSign(torch.autograd.Function):
    """x / (1 + |x|) computed by NumPy, which no tracer sees through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        array = x.detach().numpy()
        return torch.from_numpy(array / (1 + np.abs(array)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() / np.square(1 + np.abs(x.detach().numpy())))


class Clamp(torch.autograd.Function):
    """max(x, 0) by a Function of torch's own operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class WithCustomFunction(nn.Module):
    """An autograd.Function whose two directions are written outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(_NumpySoftSign.apply(self.norm(self.layer(x))))
