"""How far drafted features are from the target's, and the drafter's distribution from the target's. All are means over
columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from mmdec.types import InputError

CELLS = 1 << 26  # logits of either side in memory at a time
TOP = 10  # tokens that ListMLE ranks


@dataclass(frozen=True)
class Weights:
    """Of the parts of the loss: EAGLE's, MSD's and SpecVLM's are 1 and 0.1 of the first two.

    features: SmoothL1 of the features, its mean over channels. tokens: cross-entropy with the target's distribution.
    distribution: L1 between the two distributions, its sum over tokens. ranks: ListMLE of the target's ten best tokens.
    """

    features: float = 1.0
    tokens: float = 0.1
    distribution: float = 0.0
    ranks: float = 0.0

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 0 or not any(vars(self).values()):
            raise InputError(f"`weights` must be 0 or more, and one of them above 0, but are {vars(self)}.")


def feature_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """(P, H) each -> (P,)."""
    return smooth_l1_loss(predicted, expected, reduction="none").mean(-1)


def token_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Logits (P, V) each -> (P,)."""
    return -(expected.softmax(-1) * predicted.log_softmax(-1)).sum(-1)


def distribution_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Logits (P, V) each -> (P,)."""
    return (predicted.softmax(-1) - expected.softmax(-1)).abs().sum(-1)


def rank_loss(predicted: Tensor, expected: Tensor) -> Tensor:
    """Logits (P, V) each -> (P,): minus the log-probability, by Plackett and Luce, of the target's order of its best
    tokens, drawn one after the other from the drafter's scores of these (ListMLE, Xia et al. 2008)."""
    order = expected.topk(min(TOP, expected.shape[-1]), -1).indices
    scores = predicted.gather(-1, order)
    rest = scores.flip(-1).logcumsumexp(-1).flip(-1)  # of each and those after it
    return (rest - scores).sum(-1)


PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens": token_loss,
    "distribution": distribution_loss,
    "ranks": rank_loss,
}


def losses(
    predicted: Tensor, expected: Tensor, logits: Callable[[Tensor], Tensor], weights: Weights, cells: int = CELLS
) -> Mapping[str, Tensor]:
    """Features (P, H) each -> the weighted sum as "loss", its parts, and "right": how often both choose one token.

    logits: (P, H) -> (P, V). For large vocabularies a part of the columns is worked through at a time, and its logits
    are made again for the gradient.
    """
    parts: dict[str, Tensor] = {"features": feature_loss(predicted, expected).mean()}

    def logit_losses(predicted: Tensor, expected: Tensor) -> Tensor:
        drafted, teacher = logits(predicted), logits(expected)
        sums = [
            PARTS[name](drafted, teacher).sum() if getattr(weights, name) else drafted.new_zeros(()) for name in PARTS
        ]
        return torch.stack([*sums, (drafted.argmax(-1) == teacher.argmax(-1)).to(drafted.dtype).sum()])

    width = max(1, cells // logits(expected[:1]).shape[-1])
    pieces = list(zip(predicted.split(width), expected.split(width), strict=True))
    if len(pieces) == 1:
        sums = logit_losses(predicted, expected)
    else:
        sums = torch.stack([checkpoint(logit_losses, *piece, use_reentrant=False) for piece in pieces]).sum(0)  # type: ignore[arg-type] # undeclared by torch
    parts |= dict(zip((*PARTS, "right"), sums / len(predicted), strict=True))
    parts["right"] = parts["right"].detach()
    total = sum((getattr(weights, name) * parts[name] for name in ("features", *PARTS)), predicted.new_zeros(()))
    logged = {name: value for name, value in parts.items() if name == "right" or getattr(weights, name)}
    return {"loss": total, **logged}
