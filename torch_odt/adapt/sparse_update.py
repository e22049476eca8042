"""Sparse update: the last biases, slices of chosen weights, and the classifier (TTE).

J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.2.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.channels import ChannelChoice, check_choice, kept_channels
from torch_odt.adapt.fold_frozen_norms import FrozenNorms, check_norm, freeze_norms
from torch_odt.adapt.head import classifier_of
from torch_odt.adapt.scheme import Scheme, body_biases
from torch_odt.adapt.sparse_layers import SparseConv, SparseLinear
from torch_odt.adapt.stored_weights import store_frozen_weights


def sparse_update_(
    model: nn.Module,
    scheme: Scheme,
    *,
    classes: int | None = None,
    head: str | None = None,
    channels: ChannelChoice = "largest",
    norm: FrozenNorms = "frozen",
    weight_bits: Literal[8, 32] = 32,
    seed: int = 0,
) -> Adaptation:
    """Let a scheme's selection train: the last biases, some input channels of chosen weights, and the classifier.

    Choose it for the fewest bytes at a given accuracy, where a scheme can be searched for once (`search_scheme`) and
    used on many devices. Of a chosen layer's input a captured step keeps only the channels whose weights train (a plain
    loop keeps the whole input beside them); back-propagation stops at the earliest layer of which anything trains;
    gradients and the optimizer's state exist for the slices alone. A BatchNorm keeps its statistics and its weight
    (`FrozenBatchNorm`).

    Args:
        model: changed in place.
        scheme: what trains; it is checked against the model.
        classes: replace the classifier by a new one for so many classes; None keeps the one that there is.
        head: the classifier's name; by default it is the last linear layer.
        channels: which input channels train where not all do: those whose weights have the "largest" norm, the
            "smallest", or "random" ones. They are chosen here, once.
        norm: what a frozen BatchNorm becomes. "frozen": a `FrozenBatchNorm`. "folded": a part of the convolution in
            front of it, where that is frozen, too. Planned steps have fewer operators and hold less then; in a plain
            loop such a convolution keeps its input for the gradient of its bias. Biases that train are new parameters
            then. What `unload()` and `merge()` give back is within rounding what it was.
        weight_bits: 8 stores the weights that are frozen as a whole in 8 bits, which rounds them (`StoredConv2d`). Of a
            layer that trains in part the whole weight stays in 32.
        seed: of random channels.

    Returns:
        What trains and what that saves. Its `unload()` writes the trained slices into the ordinary weights, bit for
        bit, and takes the model's structure back to what it was; `merge()` keeps the new classifier. Weights that were
        stored in 8 bits or took over a norm come back rounded. The model's `state_dict` has what was trained under the
        names of ordinary weights, too, which with `norm="folded"` have a norm in them.

    Raises:
        ValueError: the scheme does not fit the model, the model has no classifier that can be found, `channels` or
            `norm` is no such choice, or `weight_bits` is neither 8 nor 32.
        TypeError: `scheme` is none.
        CaptureError: `norm="folded"`, and `torch.fx` cannot follow the model.

    Example:
        >>> from torchvision.models import mobilenet_v2
        >>> import torch_odt as odt
        >>> model = mobilenet_v2(width_mult=0.35)
        >>> scheme = odt.adapt.Scheme(biases=12, weights={"features.13.conv.0.0": 1 / 4, "features.14.conv.0.0": 1})
        >>> adaptation = odt.adapt.sparse_update_(model, scheme, classes=5)
        >>> adaptation.trained[0]
        'features.13.conv.0.0.trained_weight'
        >>> _ = adaptation.unload()
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme is a {type(scheme).__name__}: give a Scheme; Scheme.load(path) reads one from a file")
    layers = scheme.check(model, head=head)
    if weight_bits not in (8, 32):
        raise ValueError(f"weight_bits={weight_bits}: it is 8 or 32")
    check_norm(norm)
    check_choice(channels)
    with Adapting(model) as adapting:
        name = classifier_of(adapting, classes, head=head)
        biases = body_biases(model, head=name)
        selected = biases[len(biases) - scheme.biases :]
        for layer_name, ratio in scheme.weights.items():
            selected.append(_train_weight(adapting, layer_name, layers[layer_name], ratio, channels, seed))
        head_parameters = [f"{name}.{local}" for local, _ in model.get_submodule(name).named_parameters()]
        adapting.train_only(dict.fromkeys([*selected, *head_parameters]))
        freeze_norms(adapting, norm)
        adapting.notes.append(f"the scheme: {scheme}")
        if weight_bits == 8:
            # The last change, because what it frees comes back rounded.
            adapting.notes.append(f"{store_frozen_weights(adapting)} frozen weights are stored in 8 bits")
        return adapting.finish("sparse_update")


def _train_weight(
    adapting: Adapting, name: str, layer: nn.Module, ratio: float, channels: ChannelChoice, seed: int
) -> str:
    """Make the kept part of a layer's weight a parameter; returns its name."""
    if ratio == 1:
        return f"{name}.weight"
    kept = kept_channels(layer, ratio, choice=channels, seed=seed)
    sparse: SparseLinear | SparseConv
    if isinstance(layer, nn.Linear):
        sparse = SparseLinear(layer, kept)
    else:
        sparse = SparseConv(layer, kept)  # type: ignore[arg-type]
    adapting.replace(name, sparse)
    adapting.also_undo(sparse.merge)
    return f"{name}.trained_weight"
