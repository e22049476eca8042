"""Distillation: a small model learns what a large one has answered, besides what is right.

G. Hinton, O. Vinyals and J. Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2: logits divided by a
temperature, whose gradients shrink with its square. A. Romero et al., "FitNets: Hints for Thin Deep Nets", ICLR 2015,
equation 3: the outputs of intermediate layers, through a regressor where their sizes differ. R. Venkatesan and B. Li,
"Diving Deeper into Mentee Networks", 2016, call the large one the mentor and the small one the mentee, and weigh
labels, logits and hints in one loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from torch_odt.adapt.arguments import require_numbers
from torch_odt.adapt.layer_outputs import logits_of


def distillation_loss(
    logits: Tensor, labels: Tensor, mentor_logits: Tensor, *, temperature: float = 4.0, soft_weight: float = 0.9
) -> Tensor:
    """How far a mentee is from its mentor's answers and from the labels, as the mean over samples.

    `soft_weight * temperature^2 * KL(mentor || mentee) + (1 - soft_weight) * cross_entropy`, where the divergence is
    between the softmaxes of logits / temperature. Samples are weighted alike, so that a step may be cut into
    micro-batches.

    Args:
        logits: the mentee's, `(n, classes, ...)`, with gradients.
        labels: `(n, ...)`, int64. A label of -100 is none: such a sample learns from the mentor alone.
        mentor_logits: as `logits`; in another type of floating point they are converted.
        temperature: above 0; the higher, the more of it the mentor's wrong classes are.
        soft_weight: the mentor's share of the loss, 0 to 1 (alpha, elsewhere).

    Raises:
        ValueError: a number is out of its range, or the two have different shapes.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> float(distillation_loss(logits, torch.tensor([0]), logits, soft_weight=1.0))
        0.0
    """
    _check_range(temperature, soft_weight)
    if logits.shape != mentor_logits.shape:
        raise ValueError(
            f"the mentee's logits are {tuple(logits.shape)} and the mentor's {tuple(mentor_logits.shape)}: they must "
            "have the same classes"
        )
    ours = F.log_softmax(logits / temperature, dim=1)
    theirs = F.log_softmax(mentor_logits.to(logits.dtype) / temperature, dim=1)
    soft = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1).mean()
    # Not the mean over labels that are not ignored: that is another one than that over samples.
    hard = F.cross_entropy(logits, labels, reduction="none").mean()
    return soft_weight * temperature**2 * soft + (1 - soft_weight) * hard


class DistillationLoss(nn.Module):
    """The loss of a mentee, as a `loss_fn` of `TrainStep` or of a loop: labels, stored logits and, if any, hints.

    Choose it where a large model knows the task already (trained elsewhere, too large to be trained or even run here),
    and `store_outputs` has kept what it answers.

    Args:
        temperature, soft_weight: as for `distillation_loss`.
        hint_weight: that of the mean squared differences of hints, which are added up. FitNets trains on hints alone
            first and on logits afterwards; here, as with mentees, one loss holds both.

    Shapes:
        outputs: logits `(n, classes)`, or a model's output that has `logits`; from `WithHints` a tuple of them and the
            hints.
        target: `(labels, mentor_logits, *hints)`, a tuple or a list, as `StoredOutputs.beside` yields it.

    Raises:
        ValueError: a number is out of its range; at a call, where outputs and target do not belong together.

    Example:
        >>> import torch, torch_odt as odt
        >>> mentee = nn.Linear(4, 2)
        >>> step = odt.TrainStep(mentee, DistillationLoss(), torch.optim.SGD(mentee.parameters(), lr=0.1),
        ...                      budget=odt.Budget("64MiB", of="training"), cache=False)
        >>> step(torch.ones(3, 4), (torch.tensor([0, 1, 1]), torch.zeros(3, 2))).shape
        torch.Size([])
    """

    def __init__(self, *, temperature: float = 4.0, soft_weight: float = 0.9, hint_weight: float = 1.0) -> None:
        super().__init__()
        _check_range(temperature, soft_weight)
        require_numbers(hint_weight=hint_weight)
        if not 0 <= hint_weight < math.inf:
            raise ValueError(f"hint_weight={hint_weight}: it is a number that is not below 0")
        self.temperature = temperature
        self.soft_weight = soft_weight
        self.hint_weight = hint_weight

    def forward(self, outputs: Any, target: Sequence[Tensor]) -> Tensor:
        """The loss, a tensor with one element."""
        if not isinstance(target, (tuple, list)) or len(target) < 2:
            raise ValueError("the target is (labels, mentor_logits, *hints), as StoredOutputs.beside yields it")
        logits, hints = (outputs[0], outputs[1:]) if isinstance(outputs, (tuple, list)) else (logits_of(outputs), ())
        labels, mentor_logits, *mentor_hints = target
        if len(hints) != len(mentor_hints):
            raise ValueError(
                f"the mentee gives {len(hints)} hints and the target holds {len(mentor_hints)}: wrap the mentee in "
                "WithHints with the layers that were stored, or store as many"
            )
        loss = distillation_loss(
            logits, labels, mentor_logits, temperature=self.temperature, soft_weight=self.soft_weight
        )
        for ours, theirs in zip(hints, mentor_hints, strict=True):
            if ours.shape != theirs.shape:
                raise ValueError(f"a hint is {tuple(ours.shape)} and the mentor's {tuple(theirs.shape)}")
            loss = loss + self.hint_weight * F.mse_loss(ours, theirs.to(ours.dtype))
        return loss

    def extra_repr(self) -> str:
        """For `print`."""
        return f"temperature={self.temperature}, soft_weight={self.soft_weight}, hint_weight={self.hint_weight}"


def _check_range(temperature: float, soft_weight: float) -> None:
    require_numbers(temperature=temperature, soft_weight=soft_weight)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: it is a number above 0")
    if not 0 <= soft_weight <= 1:
        raise ValueError(f"soft_weight={soft_weight}: it is a share, from 0 to 1")
