"""Decoding of masked diffusion models: a canvas of mask tokens is revealed, several positions in each pass.

A neighbour of `loop.py`: a draft here is a whole canvas, a verdict is over sets of positions, and nothing is appended
until a canvas is complete. A policy decides which positions a step reveals, and so defines the text. FreeDave drafts
the canvases of later steps, scores them in one pass and keeps those that the policy itself would have reached: the same
text in fewer passes. This module knows no models.

Letters in shapes: K canvases of a pass, L positions of a canvas, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeVar, final, get_args

import torch
from torch import Tensor

from mmdec.checks.arguments import check_choice, check_instance, check_whole, did_you_mean, format_value
from mmdec.errors import InputError

MAX_REVEALED = 1 << 20  # maximum of `TopK.tokens`
MAX_CANVASES = 64  # maximum number of canvases that a pass scores; its columns grow with this number

ScheduleKind = Literal["linear", "cosine", "exponential"]
Chosen = TypeVar("Chosen", bound="type[Policy]")


@dataclass(frozen=True)
class Predictions:
    """What a model predicts at each position of K canvases. Only what a policy reads is computed."""

    logits: Tensor  # (K, L, V), at the mask token -inf

    @cached_property
    def _wide(self) -> Tensor:
        return self.logits if self.logits.dtype == torch.float64 else self.logits.float()

    @cached_property
    def _logprobs(self) -> Tensor:
        return self._wide.log_softmax(-1)

    @cached_property
    def tokens(self) -> Tensor:
        """The best token of each position, (K, L) int64."""
        return self.logits.argmax(-1)

    @cached_property
    def confidence(self) -> Tensor:
        """The probability of the best token, (K, L)."""
        return self._logprobs.amax(-1).exp()

    @cached_property
    def entropy(self) -> Tensor:
        """The entropy of each position in nats, (K, L)."""
        probabilities = self._logprobs.exp()
        return -torch.where(probabilities > 0, probabilities * self._logprobs, 0.0).sum(-1)

    @cached_property
    def margin(self) -> Tensor:
        """How far the best logit is above the second, (K, L)."""
        best = self._wide.topk(2, -1).values
        return best[..., 0] - best[..., 1]


class Policy(ABC):
    """Decides which positions a step reveals, from one pass's predictions and the masked positions alone.

    So it is deterministic, and a canvas decides all that follows it.
    """

    @abstractmethod
    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        """Choose the positions that are revealed, with their best tokens.

        Args:
            predictions: Predictions for K canvases.
            masked: (K, L) bool, the positions that are still hidden.

        Returns:
            (K, L) bool: masked positions only, and at least one of each canvas that has any.
        """


POLICIES: dict[str, type[Policy]] = {}


def policy(name: str) -> Callable[[Chosen], Chosen]:
    """Register the decorated policy under a name, by which `mmdec.diffusion_generate` makes it with its defaults."""

    def register(kind: Chosen) -> Chosen:
        POLICIES[name] = kind
        return kind

    return register


def make_policy(choice: object) -> Policy:
    """Return a policy from its name, or the given one.

    Raises:
        InputError: If there is none of this name, or it cannot be made without arguments.
    """
    if isinstance(choice, str):
        if choice not in POLICIES:
            raise InputError(
                f"`policy` must be one of {', '.join(POLICIES)}, or a `Policy`, but is {format_value(choice)}."
                f"{did_you_mean(choice, POLICIES)}"
            )
        return POLICIES[choice]()
    return check_instance("policy", choice, Policy, f"one of {', '.join(POLICIES)}, or a `Policy`")


def _check_number(name: str, value: object, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise InputError(f"`{name}` must be a number from {minimum} to {maximum}, but is {format_value(value)}.")
    return float(value)


def _ranks(scores: Tensor, masked: Tensor) -> Tensor:
    """Return each masked position's rank by falling score, from 0. Of equal scores the leftmost comes first."""
    order = scores.masked_fill(~masked, -math.inf).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)


@policy("threshold")
@final
class Threshold(Policy):
    """Reveals each position whose best token has at least this probability, else the most confident one.

    Args:
        threshold: From 0 to 1.

    References:
        Wu et al. 2025, Fast-dLLM, arXiv 2505.22618, section 3.3.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        self.threshold = _check_number("threshold", threshold, 0, 1)

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        confident = predictions.confidence >= self.threshold
        return masked & (confident | (_ranks(predictions.confidence, masked) == 0))


@policy("top_k")
@final
class TopK(Policy):
    """Reveals a fixed number of positions in each step, the most confident ones.

    Args:
        tokens: Positions a step; 1 is the slow, careful order with which other policies are compared.

    References:
        Nie et al. 2025, LLaDA, arXiv 2502.09992 (low-confidence remasking).
    """

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = check_whole("tokens", tokens, 1, MAX_REVEALED, "It is the number of positions a step.")

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        return masked & (_ranks(predictions.confidence, masked) < self.tokens)


@policy("entropy_bound")
@final
class EntropyBound(Policy):
    """Reveals positions by rising entropy, as long as the entropies before a position sum to at most the bound.

    The sum bounds how far the joint distribution of the revealed tokens is from the product of their own.

    Args:
        bound: Maximum summed entropy, in nats; 0 reveals a single position, or several that are certain.

    References:
        Ben-Hamu et al. 2025, Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking, arXiv
        2505.24857.
    """

    def __init__(self, bound: float = 0.1) -> None:
        self.bound = _check_number("bound", bound, 0, 1e6)

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        entropy = predictions.entropy.masked_fill(~masked, math.inf)
        ordered, order = entropy.sort(dim=-1, stable=True)
        before = ordered.cumsum(-1).roll(1, -1)
        before[..., 0] = 0.0
        return masked & torch.zeros_like(masked).scatter(-1, order, before <= self.bound)


@policy("schedule")
@final
class ProgressSchedule(Policy):
    """Reveals all at once as soon as the mean margin between the two best logits reaches a falling threshold.

    Until then it reveals `tokens` positions a step. Progress is the share of the canvas that is revealed.

    Args:
        high, low: The threshold in logits at the beginning and at the end of a canvas.
        kind: How it falls: "linear", "cosine" or "exponential".
        tokens: Positions a step.
        rate: Decay rate of the exponential schedule.

    References:
        SchED, arXiv 2512.02892: early exit by a progress-aware confidence schedule.
    """

    def __init__(
        self, high: float = 7.5, low: float = 2.5, kind: ScheduleKind = "linear", tokens: int = 1, rate: float = 4.0
    ) -> None:
        check_choice("kind", kind, get_args(ScheduleKind))
        self.high, self.low = _check_number("high", high, 0, 1e6), _check_number("low", low, 0, 1e6)
        self.kind, self.rate, self.step = kind, _check_number("rate", rate, 0, 1e6), TopK(tokens)

    def threshold(self, progress: Tensor) -> Tensor:
        """Return the threshold for each share of a canvas that is revealed."""
        falling = {
            "linear": 1 - progress,
            "cosine": (1 + torch.cos(math.pi * progress)) / 2,
            "exponential": torch.exp(-self.rate * progress),
        }[self.kind]
        return self.low + (self.high - self.low) * falling

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        progress = 1 - masked.float().mean(-1)
        ends = predictions.margin.mean(-1) >= self.threshold(progress)
        return masked & (ends[..., None] | self.step.reveal(predictions, masked))


class RevealFilter(torch.nn.Module):
    """The network of `LearnedFilter`: two layers that read the confidence of all positions of a canvas.

    Args:
        length: Number of positions. 32 gives the paper's 2,112 weights.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = check_whole("length", length, 1, 1024, "It is the number of positions of a canvas.")
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(length, length), torch.nn.ReLU(), torch.nn.Linear(length, length)
        )

    def forward(self, confidence: Tensor) -> Tensor:
        """Return the logits (K, L) of "this prediction is the final token" from the confidence (K, L)."""
        return self.layers(confidence)


@final
class LearnedFilter(Policy):
    """Reveals the positions that a small network takes for final, else the most confident one.

    Args:
        network: A trained filter for canvases of its length.
        threshold: Reveals from this probability on.

    References:
        Bao et al. 2025, Learning to Parallel, arXiv 2509.25188.
    """

    def __init__(self, network: RevealFilter, threshold: float = 0.96) -> None:
        self.network = check_instance("network", network, RevealFilter, "a `RevealFilter`", "Train one.").eval()
        self.threshold = _check_number("threshold", threshold, 0, 1)

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        if masked.shape[-1] != self.network.length:
            raise InputError(
                f"`block_length` must be {self.network.length}, the length of the filter's canvases, but is "
                f"{masked.shape[-1]}. Train a filter for this length."
            )
        confidence = predictions.confidence
        final_tokens = self.network.to(confidence.device)(confidence.float()).sigmoid() >= self.threshold
        return masked & (final_tokens | (_ranks(confidence, masked) == 0))


@dataclass(frozen=True)
class CanvasPass:
    """One pass of the model over a block's canvases, and what it gained."""

    block: int  # index of the block
    scored: int  # number of canvases that the pass scored; 1 without drafts
    steps: int  # number of the policy's steps that it decided, at least 1
    revealed: int  # number of positions that these steps revealed


class CanvasSession(Protocol):
    """A model's state in the decoding of one text, with a key-value cache or without."""

    text: Tensor  # (N,), the prompt and the complete blocks, but for given tokens of the canvas
    canvas: Tensor  # (L,), the next block: tokens that are given, and mask tokens

    def score(self, canvases: Tensor) -> Tensor:
        """Return the logits (K, L, V) of K canvases (K, L) of the current block, each as if it were alone."""
        ...

    def commit(self, block: Tensor) -> None:
        """Append a complete block (L,) to the text, and begin the next."""
        ...


@torch.inference_mode()
def reveal_block(
    session: CanvasSession, mask_token: int, policy: Policy, drafts: int = 1, block: int = 0
) -> Iterator[CanvasPass]:
    """Reveal the session's canvas and commit it.

    FreeDave: a pass scores a canvas, which decides the policy's next step, and further canvases that the policy would
    reach if the predictions did not change. Where the step from one of them is another of them, that one's own score
    decides the step after it. So each pass decides one step or more, and each is the policy's own.

    Args:
        session: Scores canvases.
        mask_token: The id that hides a position; no policy reveals it.
        policy: Defines the text.
        drafts: Canvases that a pass scores; 1 is the policy alone.
        block: The block's index, for the passes.

    Yields:
        Each pass.

    Raises:
        InputError: If the policy reveals nothing.

    References:
        FreeDave, arXiv 2510.00294.
    """
    canvas = session.canvas
    last_predictions: Predictions | None = None  # the predictions from which the last step was taken
    while bool((canvas == mask_token).any()):
        chain = _draft(policy, last_predictions, canvas, mask_token, drafts)
        logits = session.score(chain).clone()
        logits[..., mask_token] = -math.inf
        successors = _step(policy, Predictions(logits), chain, mask_token)
        hidden, canvas_index, steps = int((canvas == mask_token).sum()), 0, 1
        while len(matches := (chain[canvas_index + 1 :] == successors[canvas_index]).all(1).nonzero()):
            canvas_index, steps = canvas_index + 1 + int(matches[0]), steps + 1
        canvas, last_predictions = successors[canvas_index], Predictions(logits[canvas_index : canvas_index + 1])
        yield CanvasPass(block, len(chain), steps, hidden - int((canvas == mask_token).sum()))
    session.commit(canvas)


def _step(policy: Policy, predictions: Predictions, canvases: Tensor, mask_token: int) -> Tensor:
    """Return the canvases (K, L) after a step of the policy.

    Raises:
        InputError: If the policy reveals nothing.
    """
    masked = canvases == mask_token
    revealed = policy.reveal(predictions, masked) & masked
    if not bool(revealed.any(1).all()):
        raise InputError(
            f"`policy` must reveal at least one masked position in each step, but {type(policy).__name__} revealed "
            "none of a canvas. Let it fall back on the most confident one."
        )
    return torch.where(revealed, predictions.tokens, canvases)


def _draft(
    policy: Policy, last_predictions: Predictions | None, canvas: Tensor, mask_token: int, drafts: int
) -> Tensor:
    """Return (K, L): the canvas, and the incomplete canvases of further steps, as if the predictions did not change."""
    chain = [canvas[None]]
    while last_predictions is not None and len(chain) < drafts:
        later = _step(policy, last_predictions, chain[-1], mask_token)
        if not bool((later == mask_token).any()):
            break
        chain.append(later)
    return torch.cat(chain)
