"""What a drafter's recipe sets of its training, for all systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmdec.training.options import check_counts
from mmdec.types import InputError


@dataclass(frozen=True)
class DraftOptions:
    """What a recipe sets.

    network: changes to the network's configuration, which is otherwise like a layer of the target. start: a folder of a
    saved network to begin from. half_teacher: the target's products in bfloat16, whatever its weights are. unroll:
    steps in which the network reads its own features, the first one included; before step unroll_from it is one, which
    is quicker. unroll_decay: weight of a step over that of the one before; through: gradients flow through the steps.
    noise: moves the features by up to noise * 512 / length. tokens, features, distribution, ranks: the loss, see
    `Weights`; null takes the system's own. keep_features: on disk, 2 H bytes a column, so that samples that come again
    need no pass of the target. chain, tree_nodes: of the simulated drafts whose tokens per round are logged; decoded:
    questions that are decoded with trees of as many nodes.
    """

    network: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    half_teacher: bool = False
    unroll: int = 1
    unroll_from: int = 0
    unroll_decay: float = 1.0
    through: bool = True
    noise: float = 0.1
    features: float | None = None
    tokens: float | None = None
    distribution: float | None = None
    ranks: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Literal["trapezoid", "cosine"] = "trapezoid"
    warmup: int = 2000
    decay_from: int | None = None
    decay_steps: int = 800_000
    keep_features: bool = False
    chain: int = 7
    tree_nodes: int = 16
    decoded: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(unroll=self.unroll, chain=self.chain)
        if self.noise < 0:
            raise InputError(f"`noise` must be 0 or more, but is {self.noise}. 0.1 is EAGLE's.")
