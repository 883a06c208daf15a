"""What a drafter's recipe sets of its training and of its data, for all systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmdec.checks.errors import InputError
from mmdec.training.vlm_drafters.ramp import Ramp


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
        for name in ("unroll", "chain"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` must be at least 1, but is {getattr(self, name)}. Raise it.")
        if self.noise < 0:
            raise InputError(f"`noise` must be 0 or more, but is {self.noise}. 0.1 is EAGLE's.")


@dataclass(frozen=True)
class DraftDataOptions:
    """What a recipe sets of the data.

    samples: questions to train on, `long_share` of them with long answers; null takes all. dev_split: null takes the
    last of training's questions. max_tokens: of an answer. frames: of a video. ramp: MSD's stages; where the corpus has
    no conversations without pictures, the first reads the same questions and answers without their pictures; null takes
    the samples in their order. base_dtype: of the target. kept: a folder for answers and features. answer_batch:
    questions that are answered at once.
    """

    train_split: str = "train"
    dev_split: str | None = "dev"
    samples: int | None = None
    dev_samples: int = 64
    long_share: float | None = None
    batch_size: int = 16
    steps_per_epoch: int | None = None
    max_tokens: int = 256
    frames: int = 8
    ramp: Ramp | None = None
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kept: str = "runs/vlm_drafters/kept"
    answer_batch: int = 32
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "dev_samples", "max_tokens", "frames", "answer_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` must be at least 1, but is {getattr(self, name)}. Raise it.")
