"""Decoding methods and what is measured of a call, for all tasks.

`language_model.py`, `transcription.py` and `description.py` say how a batch of their task is decoded and measured.
`mmdec/bench/drafters.py` compares methods on the same inputs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from mmdec.core.budget import DraftSize
from mmdec.errors import InputError
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.hub.provenance import measurement_conditions

PLAN = re.compile(r"(\d+)(?:x(\d+))?")
GREEDY = "greedy"
CPU = torch.device("cpu")
Log = Callable[[str], None]  # receives a progress message
Input = TypeVar("Input")  # the input to decode: a recording, a question


def no_log(line: str) -> None:
    """Drop a progress message."""


def describe_measurement(
    network: nn.Module, batch: int | Sequence[int] = 1, threads: int | None = None
) -> dict[str, Any]:
    """Describe a measurement of this network: machine, versions, dtype, batch, threads, commit and date.

    Args:
        threads: None: torch's present number.
    """
    weight = next(network.parameters())
    count = torch.get_num_threads() if threads is None else threads
    return measurement_conditions(device=weight.device, dtype=weight.dtype, batch=batch, threads=count)


@dataclass(frozen=True)
class Method:
    """A decoding method: the library whose decoding loop runs, and the options of the call."""

    name: str
    loop: Literal["mmdec", "transformers"]
    options: Mapping[str, Any] = field(default_factory=dict)
    networks: Sequence[PreTrainedModel] = ()  # further networks besides the model, such as an assistant

    @classmethod
    def greedy(cls) -> Method:
        """Make the method of greedy decoding by transformers, the baseline."""
        return cls(GREEDY, "transformers")

    @classmethod
    def with_drafter(cls, name: str, drafter: DrafterChoice, nodes: DraftSize = None) -> Method:
        """Make the method of decoding by mmdec.

        Args:
            drafter: A name or the object; None: plain decoding.
            nodes: Draft size, nodes of a chain or (nodes, depth) of a tree; None: learned.
        """
        return cls(name, "mmdec", {"drafter": drafter, "num_speculative_tokens": nodes})


@dataclass(frozen=True)
class Measurement:
    """The output and the cost of one call on one batch; times are in seconds for the whole batch."""

    tokens: list[list[int]]  # the tokens generated for each input, without prompt and padding
    texts: list[str]
    features: float  # seconds of preprocessing: from samples or pixels to the model's inputs
    encoder: float
    decoder: float  # seconds of all the rest up to the text, the drafter's included
    drafter: float  # the drafter's seconds; 0 for transformers, whose loops do not report them
    total: float  # wall clock, from samples in memory to texts
    passes: int = 0  # number of passes of the model's decoder
    windows: int = 0  # number of passes of a speech model's encoder; 1 for other models
    rounds: int = 0  # number of mmdec's rounds, summed over the inputs, without the passes over prompts
    drafted_tokens: int = 0  # number of tokens from these rounds, bonus or correction token included
    accepted: int | None = None  # drafted tokens that were accepted in these rounds; None: not counted
    cpu_seconds: float = 0.0  # of all threads of this process, in the whole call

    @property
    def tokens_per_round(self) -> float:
        """The mean tokens per round of mmdec's loop, bonus or correction token included; 1 without a round."""
        return self.drafted_tokens / self.rounds if self.rounds else 1.0


# method's name -> for each batch of inputs, one measurement for each repeat
Measurements = Mapping[str, Sequence[Sequence[Measurement]]]


class Harness(ABC, Generic[Input]):
    """Decodes inputs with one model by any method.

    A subclass holds the model, and defines how one batch is decoded and measured.
    """

    @abstractmethod
    def measure(self, inputs: Sequence[Input], method: Method) -> Measurement:
        """Decode the inputs as one batch by this method, and measure tokens and seconds."""


@contextmanager
def count_passes(module: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets one entry for each pass through the module."""
    passes: list[int] = []
    hook = module.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()


def cut_at_end(row: list[int], model: Any) -> list[int]:
    """Return a row of tokens up to its first end token, without the padding after it.

    Args:
        model: Says which tokens end a text.
    """
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    return next((row[: index + 1] for index, token in enumerate(row) if token in ends), row)


@contextmanager
def transformers_errors_only() -> Iterator[None]:
    """Silence transformers: some of its loops print a line at each step, and printing would be timed, too."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def parse_language(language: str) -> str | None:
    """Convert "auto", which asks for detection, to None."""
    return None if language == "auto" else language


def parse_plan(plan: str) -> DraftSize:
    """Parse a draft size: "learned", "8" (a chain of 8 tokens), "16x6" (a tree of 16 tokens, at most 6 deep).

    Returns:
        None, 8 or (16, 6).
    """
    if plan == "learned":
        return None
    match = PLAN.fullmatch(plan)
    if match is None:
        raise InputError(
            f"`plan` must be 'learned', nodes of a chain or nodes x depth of a tree, but is {plan!r}. Try 16x6."
        )
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
