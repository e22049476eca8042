"""Optimizers by name."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from torch_odt.commands import options

NAMES = ("sgd", "adam", "adamw")
DEFAULT_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which optimizer, and how fast it learns."""
    parser.add_argument("--optimizer", choices=NAMES, default="sgd", help="sgd has momentum 0.9 (default: sgd)")
    parser.add_argument("--lr", type=options.positive_float, help="learning rate (default: 0.05 for sgd, else 0.001)")


def make_optimizer(name: str, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """An optimizer of all the model's trainable parameters."""
    rate = DEFAULT_LR[name] if lr is None else lr
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate)
        case _:
            return torch.optim.AdamW(parameters, lr=rate)
