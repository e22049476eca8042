"""Bias-only training: every weight frozen, every bias trains, and a classifier (TinyTL-B; BitFit).

H. Cai et al., "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", NeurIPS 2020, section 3.1: the
gradient of a bias is a sum of the output's gradients, so that no layer's input has to be kept for it. E. Ben Zaken et
al., "BitFit", ACL 2022, does the same to transformers.
"""

from __future__ import annotations

from torch import nn

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.fold_frozen_norms import FrozenNorms, check_norm, freeze_norms
from torch_odt.adapt.head import classifier_of

NORMALIZES_ITS_INPUT = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def bias_only_(
    model: nn.Module, *, classes: int | None = None, head: str | None = None, norm: FrozenNorms = "frozen"
) -> Adaptation:
    """Let biases and the classifier train, and nothing else.

    Choose it where memory is everything: it trains in the fewest bytes short of the classifier alone, and learns less
    than lite residual modules (`tinytl_`) do. Biases of convolutions, linear layers and norms train; a BatchNorm keeps
    its statistics and its weight (`FrozenBatchNorm`). LayerNorm and GroupNorm need their normalised input for the
    gradient that goes on through them, so that transformers save less than CNNs; a note says so.

    Args:
        model: changed in place.
        classes: replace the classifier by a new one for so many classes; None keeps the one that there is.
        head: the classifier's name; by default it is the last linear layer.
        norm: what a frozen BatchNorm becomes. "frozen": a `FrozenBatchNorm`. "folded": a part of the convolution in
            front of it, where that is frozen, too. Planned steps have fewer operators and hold less then; in a plain
            loop such a convolution keeps its input for the gradient of its bias. Biases that train are new parameters
            then. What `unload()` and `merge()` give back is within rounding what it was.

    Returns:
        What trains and what that saves; its `unload()` takes the change back, but not what biases have learnt;
        `merge()` keeps the new classifier.

    Raises:
        ValueError: the model has no classifier that can be found, or no biases outside of it.
        CaptureError: `norm="folded"`, and `torch.fx` cannot follow the model.

    Example:
        >>> import torch
        >>> from torchvision.models import mobilenet_v2
        >>> import torch_odt as odt
        >>> model = mobilenet_v2()
        >>> adaptation = odt.adapt.bias_only_(model, classes=5)
        >>> optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
        >>> len(adaptation.trained)
        54
    """
    check_norm(norm)
    with Adapting(model) as adapting:
        name = classifier_of(adapting, classes, head=head)
        biases = bias_names(model)
        head_names = [f"{name}.{local}" for local, _ in model.get_submodule(name).named_parameters()]
        if not set(biases) - set(head_names):
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"no layer but the classifier {name!r} has a bias; the model has {', '.join(kinds)}")
        adapting.train_only(dict.fromkeys([*biases, *head_names]))
        freeze_norms(adapting, norm)
        normalizing = sum(isinstance(module, NORMALIZES_ITS_INPUT) for module in model.modules())
        if normalizing:
            adapting.notes.append(f"{normalizing} layers normalize, and keep their input for the gradient that goes on")
        return adapting.finish("bias_only")


def bias_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are added to something: those which their modules call a bias."""
    return [name for name, _ in model.named_parameters() if _is_bias(name.rpartition(".")[2])]


def _is_bias(local: str) -> bool:
    # Recurrent layers call theirs bias_ih_l0 and bias_hh_l0.
    return local.endswith("bias") or local.startswith(("bias_ih", "bias_hh"))
