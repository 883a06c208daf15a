"""The cost of one input of a call: rounds, tokens, and its share of the batch's time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmdec.core.steps import ActiveTime
from mmdec.core.summary import cut_note
from mmdec.tasks.confidence import CUT_CONFIDENCE
from mmdec.types import Round


@dataclass(frozen=True)
class Cut:
    """The end of a text, or of one of its windows, that was cut at the maximum length."""

    tokens: int  # number of tokens before it
    raisable: bool = True  # whether the model could have written more


@dataclass
class Usage:
    """Counts of one input: its rounds and tokens, and its share of the batch's time."""

    rounds: int = 0  # number of rounds, passes over prompts included
    prompts: int = 0  # number of passes over prompts: one, or one for each window of a recording
    # number of tokens from the rounds after the passes over prompts, correction and bonus tokens included
    tokens_after_prompts: int = 0
    drafted: int = 0  # number of tokens that the drafter proposed
    accepted: int = 0  # number of drafted tokens that were accepted
    tokens: list[int] = field(default_factory=list)  # ids of all new tokens
    logprobs: list[float] = field(default_factory=list)  # ln P of the tokens from which the confidence is computed
    cut: Cut | None = None  # the longest window's; None: nothing was cut
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # stage of decoding -> seconds

    def add_round(self, round_: Round, index: int, drafts: bool) -> None:
        """Add one round.

        Args:
            index: The input's index among the rows of the round.
            drafts: Whether there is a drafter.
        """
        tokens = round_.tokens[index]
        self.rounds += 1
        self.tokens += tokens
        self.drafted += round_.drafted[index]
        self.accepted += round_.accepted[index]
        if round_.index:
            self.tokens_after_prompts += len(tokens)
        else:
            self.prompts += 1
        if drafts:  # without a drafter, these seconds are only the time that reading the clock takes
            self.seconds["drafter"] += round_.drafter_seconds / len(round_.rows)

    def add_timed_round(self, round_: Round, index: int, drafts: bool) -> None:
        """Add one round of a language model: counts, log-probabilities, and the seconds of each stage.

        Args:
            index: The input's index among the rows of the round.
            drafts: Whether there is a drafter.
        """
        self.add_round(round_, index, drafts)
        if any(round_.is_cut[index : index + 1]):
            self.note_cut(Cut(len(self.tokens)))
        if round_.logprobs is not None:
            self.logprobs += round_.logprobs[index, : len(round_.tokens[index])].tolist()
        self.seconds["decoder" if round_.index else "prompt"] += round_.target_seconds / len(round_.rows)
        self.seconds["core"] += round_.core_seconds / len(round_.rows)

    def note_cut(self, cut: Cut) -> None:
        """Note that the text, or one of its windows, was cut. The longest window counts."""
        if self.cut is None or cut.tokens > self.cut.tokens:
            self.cut = cut

    def add(self, other: Usage) -> None:
        """Add the counts and seconds of another part of the same input, such as a later window of a recording."""
        for name in ("rounds", "prompts", "tokens_after_prompts", "drafted", "accepted", "tokens", "logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.cut is not None:
            self.note_cut(other.cut)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds

    @property
    def finish_reason(self) -> str:
        """The reason for the end: "length" if the text was cut at the maximum length, else "stop"."""
        return "length" if self.cut else "stop"

    @property
    def note(self) -> str:
        """The note on a text that was cut; "" if it was not."""
        return "" if self.cut is None else cut_note(self.cut.tokens, self.cut.raisable)

    def limit_confidence(self, confidence: float, by_caller: bool) -> float:
        """Limit the confidence to `CUT_CONFIDENCE` if the text was cut at a length that the caller did not set.

        Args:
            confidence: The confidence of the text that was written.
            by_caller: Whether the caller set the length, and so knows that the text may be cut.
        """
        return min(confidence, CUT_CONFIDENCE) if self.cut and not by_caller else confidence

    @property
    def tokens_per_round(self) -> float:
        """The mean number of tokens per round, without the passes over prompts; 1 without other rounds."""
        rounds_after_prompts = self.rounds - self.prompts
        return self.tokens_after_prompts / rounds_after_prompts if rounds_after_prompts else 1.0


def count_round(round_: Round, usage: Sequence[Usage], drafts: bool) -> None:
    """Add one round of a language model to the counts of its inputs.

    Args:
        usage: One for each input of the batch.
        drafts: Whether there is a drafter.
    """
    for index, row in enumerate(round_.rows):
        usage[row].add_timed_round(round_, index, drafts)


def rest_seconds(time: ActiveTime, usage: Sequence[Usage]) -> float:
    """Return each input's share of the seconds that a decoding has worked outside the stages of `usage`."""
    stages = sum(entry.seconds["drafter"] + entry.seconds["core"] for entry in usage)
    return max(time.seconds - stages, 0.0) / len(usage)


def renumber_rows(round_: Round, indices: Sequence[int]) -> Round:
    """Return a round of a batch whose rows are indices in the whole call, for its `on_round`.

    Args:
        indices: Index in the call of each input of the batch.
    """
    return replace(round_, rows=[indices[row] for row in round_.rows])
