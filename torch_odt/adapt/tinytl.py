"""TinyTL: frozen weights, biases that train, and lite residual modules that learn beside the blocks of a CNN.

H. Cai et al., "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.adaptation import Adaptation, Adapting
from torch_odt.adapt.add_lite_residuals import (
    blocks_beside_which,
    check_sizes,
    insert,
    lite_beside,
    lite_parameters,
)
from torch_odt.adapt.bias_only import NORMALIZES_ITS_INPUT, bias_names
from torch_odt.adapt.detached_batch_norm import detached_batch_norm
from torch_odt.adapt.fold_frozen_norms import freeze_norms
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm, freeze_batch_norms
from torch_odt.adapt.group_norm import group_batch_norms
from torch_odt.adapt.head import classifier_of
from torch_odt.adapt.lite_residual import LiteBranch, LiteResidual
from torch_odt.adapt.residual_blocks import Block, Blocks
from torch_odt.adapt.stored_weights import WEIGHT_CODES, WeightCode, store_frozen_weights
from torch_odt.adapt.weight_standardization import standardize_convolutions

Mode = Literal["full", "last", "norm+last", "bias", "lite", "lite+bias"]
MODES = ("full", "last", "norm+last", "bias", "lite", "lite+bias")
NORMS = (FrozenBatchNorm, _BatchNorm, *NORMALIZES_ITS_INPUT)


def tinytl_(
    model: nn.Module,
    *,
    mode: Mode = "lite+bias",
    classes: int | None = None,
    head: str | None = None,
    norm: Literal["frozen", "folded", "detached", "group"] = "frozen",
    weight_standardization: bool = False,
    weight_bits: Literal[32, 8] = 32,
    weight_code: WeightCode = "affine",
    blocks: Blocks | None = None,
    without: Collection[str] = (),
    kernel_size: int = 5,
    expand: float = 1.0,
    input_size: int | tuple[int, int] = 224,
    example: Any = None,
) -> Adaptation:
    """Freeze the weights of a pretrained CNN; let its biases and small branches beside its blocks train.

    Choose it to adapt a CNN to new data at nearly the accuracy of full fine-tuning and a fraction of its memory: for a
    bias no layer's input is kept, and a lite residual module works at half the resolution and without the expansion of
    an inverted residual. Just after the call the model computes what it computed before (`norm="frozen"` or "folded",
    `weight_bits=32`, and no new classifier).

    Modules that were pretrained with the network (`add_lite_residuals_`, or an earlier `tinytl_` whose modules `merge`
    has kept) train as they are; blocks without one get a new one. On new classes those that were pretrained
    adapt better.

    Args:
        model: changed in place. Blocks are found by their type: torchvision's and timm's ResNets, MobileNets and
            EfficientNets; others with `blocks`.
        mode: what trains beside the classifier. "lite+bias": lite residual modules and every bias (TinyTL-L+B); "lite":
            the modules alone (TinyTL-L); "bias": the biases alone (TinyTL-B); "norm+last": weights and biases of the
            norms; "last": nothing; "full": everything. "bias" and "norm+last" count those of lite modules that are
            there already. With "lite+bias" the bias of a module's last norm stays 0: the block's own does the same.
        classes: replace the classifier by a new one for so many classes; None keeps the one that there is.
        head: the classifier's name; by default it is the last linear layer.
        norm: "frozen" keeps BatchNorm's statistics (`FrozenBatchNorm`); "folded" does, too, and makes it a part of the
            convolution in front of it where that is frozen (see `bias_only_`); "detached" follows the batch in
            training, and keeps no input either (`DetachedBatchNorm`): better where data differ much from those of the
            pretraining, but batches cannot be cut then; "group" puts GroupNorm in its place, for models that were
            pretrained with it. GroupNorm keeps its input for the backward pass.
        weight_standardization: standardise convolutions without a bias; only with norm="group".
        weight_bits: 8 stores frozen weights as integers, and computes with what these stand for.
        weight_code: what they stand for: "affine", a multiple of the output channel's scale, or "codebook", one of 256
            values that k-means has found for the layer (`StoredLinear` says which to choose).
        blocks: further types of blocks: each with the attribute to whose result a lite module's is added, before the
            block's own shortcut; "" for a block without an activation at its end. Or a function of a module's name and
            the module that returns this attribute, or None where that is no block. Modes without lite modules take no
            notice of `blocks`, `without`, `kernel_size`, `expand`, `input_size` and `example`.
        without: names of blocks that get no lite module, or whose own does not train. The first block's input is the
            largest by far; the paper's own networks have none beside it.
        kernel_size, expand: of new lite residual modules: the convolution's k, odd, and its channels as a multiple of
            the block's input.
        input_size: height and width of images, in pixels; it decides where kernels must be smaller. An int is both.
        example: one sample with the batch dimension, for a model that takes something else than images of that size.

    Returns:
        What trains and what that saves; its `unload()` removes the modules and takes the change back, but not
        what biases have learnt; `merge()` keeps the modules and the new classifier.

    Raises:
        ValueError: an argument is wrong, or the model has no block of a known type, or no classifier that can be found.
        CaptureError: `norm="folded"`, and `torch.fx` cannot follow the model.

    Example:
        >>> import torch
        >>> from torchvision.models import mobilenet_v2
        >>> import torch_odt as odt
        >>> model = mobilenet_v2()
        >>> adaptation = odt.adapt.tinytl_(model, classes=5, weight_bits=8)
        >>> optimizer = torch.optim.Adam(adaptation.parameters(), lr=1e-3)
        >>> adaptation.trained[:2]
        ('features.0.1.bias', 'features.1.conv.0.1.bias')
    """
    _check(mode, norm, weight_standardization, weight_bits, weight_code)
    check_sizes(kernel_size, expand)
    with Adapting(model) as adapting:
        found: list[Block] = []
        if mode.startswith("lite"):
            found = blocks_beside_which(model, input_size, example, blocks, without)
        head_name = classifier_of(adapting, classes, head=head)
        of_head = [f"{head_name}.{local}" for local, _ in model.get_submodule(head_name).named_parameters()]
        of_model = [name for name in _selected(model, mode, found) if name not in of_head]
        # The last to be taken back: what other changes put in place has the flags of this one.
        adapting.train_only([*of_model, *of_head])
        if norm in ("frozen", "folded"):
            freeze_norms(adapting, norm)
        else:
            norms = (
                group_batch_norms(adapting)
                if norm == "group"
                else freeze_batch_norms(adapting, make=detached_batch_norm)
            )
            if not norms:
                adapting.notes.append(f"the model has no BatchNorm for norm={norm!r}")
            elif norm == "detached":
                adapting.notes.append(f"{norms} BatchNorms follow the batch in training, which cannot be cut then")
        if weight_standardization:
            standardize_convolutions(adapting, but=LiteResidual)
        bare = [block for block in found if lite_beside(model, block) is None]
        for block in bare:
            lite = LiteResidual(
                block.shape, kernel_size=kernel_size, expand=expand, weight_standardization=weight_standardization
            )
            lite.last_norm.bias.requires_grad_(mode == "lite")
            insert(adapting, block, lite)
        normalizing = sum(isinstance(module, NORMALIZES_ITS_INPUT) for module in model.modules())
        if norm == "group":
            adapting.notes.append(f"{normalizing} layers normalize, and keep their input for the gradient that goes on")
        for some, how in ((bare, ""), ([block for block in found if block not in bare], ", as they were pretrained")):
            if some:
                adapting.notes.append(f"{len(some)} lite residual modules, {some[0].name} to {some[-1].name}{how}")
        if weight_bits == 8:
            # The last change, because what it frees comes back rounded.
            stored = store_frozen_weights(adapting, weight_code)
            adapting.notes.append(f"{stored} frozen weights are stored in 8 bits ({weight_code})")
        if bare and adapting.gradients_grow():
            adapting.notes.append(
                "these modules have more gradients than all of the model had before, since its blocks are wide: a "
                "smaller expand= makes them smaller, and without= leaves blocks out"
            )
        return adapting.finish(f"tinytl ({mode})")


def _check(mode: str, norm: str, weight_standardization: bool, weight_bits: int, weight_code: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: it is one of {', '.join(MODES)}")
    if norm not in ("frozen", "folded", "detached", "group"):
        raise ValueError(f"norm={norm!r}: it is 'frozen', 'folded', 'detached' or 'group'")
    if weight_standardization and norm != "group":
        raise ValueError("weight_standardization changes what a frozen norm's statistics are of; use norm='group'")
    if weight_bits not in (8, 32):
        raise ValueError(f"weight_bits={weight_bits}: it is 8 or 32")
    if weight_code not in WEIGHT_CODES:
        raise ValueError(f"weight_code={weight_code!r}: it is one of {', '.join(WEIGHT_CODES)}")
    if weight_code != "affine" and weight_bits != 8:
        raise ValueError(f"weight_code={weight_code!r} is of weights in 8 bits: give weight_bits=8 as well")


def _selected(model: nn.Module, mode: Mode, blocks: list[Block]) -> list[str]:
    """Names of the model's own parameters that train, the classifier's apart."""
    if mode == "full":
        return [name for name, _ in model.named_parameters()]
    if mode == "norm+last":
        norms = [(name, module) for name, module in model.named_modules() if isinstance(module, NORMS)]
        return [f"{name}.{local}" for name, module in norms for local, _ in module.named_parameters()]
    biases = bias_names(model) if "bias" in mode else []
    if not mode.startswith("lite"):
        return biases
    trained = lite_parameters(model, blocks, last_bias=mode == "lite")
    of_lite = tuple(f"{name}.lite." for name, module in model.named_modules() if isinstance(module, LiteBranch))
    return [*trained, *(name for name in biases if not name.startswith(of_lite))]
