"""BatchNorms that become part of the convolutions in front of them, in a traced forward pass."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from torch_odt.adapt.adaptation import Adapting


def fold_batch_norms(adapting: Adapting, graph: fx.Graph, names: Collection[str]) -> None:
    """Take each BatchNorm whose input is a convolution of these names, and nobody else's, out of the graph.

    Running statistics are taken as they are. When it is undone, the convolution has the folded weight, and the
    BatchNorm adds the folded bias and does nothing else.

    Args:
        adapting: of the model; records what was done.
        graph: of its forward pass; changed in place.
        names: of convolutions that may be folded into.
    """
    model = adapting.model
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.all_input_nodes) != 1:
            continue
        norm, (source,) = model.get_submodule(str(node.target)), node.all_input_nodes
        if type(norm) is not nn.BatchNorm2d or norm.running_mean is None or norm.bias is None:
            continue
        if source.op != "call_module" or str(source.target) not in names or len(source.users) != 1:
            continue
        conv = model.get_submodule(str(source.target))
        if not isinstance(conv, nn.Conv2d):
            continue
        folded = _folded(conv, norm)
        adapting.replace(str(source.target), folded)
        adapting.also_undo(_Unfold(conv, norm, folded))
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    folded = copy.deepcopy(conv)
    of_norm: Any = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    weight, bias = fuse_conv_bn_weights(conv.weight, conv.bias, *of_norm)
    folded.weight, folded.bias = (
        nn.Parameter(tensor.detach().clone(), requires_grad=conv.weight.requires_grad) for tensor in (weight, bias)
    )
    return folded


class _Unfold:
    """Writes what was trained back into a convolution and the BatchNorm behind it."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, folded: nn.Conv2d) -> None:
        self._conv, self._norm, self._folded = conv, norm, folded

    @torch.no_grad()
    def __call__(self) -> None:
        norm = self._norm
        self._conv.weight.copy_(self._folded.weight)
        if self._conv.bias is not None:
            self._conv.bias.zero_()
        norm.running_mean.zero_()  # type: ignore[union-attr]
        norm.running_var.fill_(1 - norm.eps)  # type: ignore[union-attr]
        norm.weight.fill_(1)
        norm.bias.copy_(self._folded.bias)  # type: ignore[arg-type]
