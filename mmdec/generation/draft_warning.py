"""Warns if the drafts of a call brought nothing, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from transformers import PreTrainedModel

from mmdec.generation.auto_drafter import warn_once
from mmdec.types import Drafter, Round

MIN_WARNING_ROUNDS = 20  # a call of at least this many rounds warns if its drafts brought nothing
# a drafter that may find nothing causes a warning only after this many rounds with drafts
MIN_SELECTIVE_ROUNDS = 10
# accepted tokens per row and round below which a half-precision dtype on a CPU is named as the cause
LOW_ACCEPTANCE = 0.1


@final
@dataclass
class DraftCounts:
    """Counts what the drafts of one call brought."""

    drafter: Drafter
    model: PreTrainedModel
    rounds: int = 0  # rounds after the pass over the prompt
    rounds_with_drafts: int = 0
    rows: int = 0  # rows of all these rounds
    drafted: int = 0
    accepted: int = 0

    def add(self, round_: Round) -> None:
        if round_.index:
            self.rounds += 1
            self.rounds_with_drafts += any(round_.drafted)
            self.rows += len(round_.rows)
            self.drafted += sum(round_.drafted)
            self.accepted += sum(round_.accepted)

    def warn(self) -> None:
        """Warn if the drafts brought nothing, once for each model and reason."""
        halved = self.model.device.type == "cpu" and self.model.dtype in (torch.float16, torch.bfloat16)
        enough = LOW_ACCEPTANCE * self.rows if halved else 0
        if self.rounds < MIN_WARNING_ROUNDS or self.accepted > enough:
            return
        if self.drafter.needs.may_find_nothing and self.rounds_with_drafts < MIN_SELECTIVE_ROUNDS and not halved:
            return
        if halved:
            dtype = str(self.model.dtype).removeprefix("torch.")
            reason = (
                f"in {dtype} most CPUs take as long for a pass over several tokens as for as many passes over one, so "
                'that drafts cannot pay: load the model with dtype="float32"'
            )
        elif not self.drafted:
            reason = "it proposed nothing: the text may hold nothing that it can continue"
        elif self.drafter.needs.has_other_vocabulary:
            reason = "it has another vocabulary, and its text, in the model's tokens, was never the model's own"
        else:
            reason = "it may have been made for another model, or for other texts"
        name = self.drafter.name
        message = (
            f"drafter '{name}' brought {self.accepted} tokens in {self.rounds} rounds, of {self.drafted} drafted: "
            f"{reason}"
        )
        warn_once(self.model, message, f"{name}: {reason}")
