"""Records the rounds of a decoding: what they cost, how many tokens were accepted, and what the budget learns."""

from __future__ import annotations

from itertools import count
from typing import Any, final

import torch
from torch import Tensor

from mmdec.core.budget import DraftBudget, RoundCosts
from mmdec.core.sampling import Sequences
from mmdec.core.steps import PassResult
from mmdec.core.timing import RoundTimer
from mmdec.core.tree import bool_list, height, int_list, int_rows
from mmdec.types import Draft, Plan, Round, Scores, Verdict


@final
class RoundRecorder:
    """Times the rounds of one decoding, describes each, and tells the budget what it cost.

    A round begins with `plan` and ends with `finish`; the first one, which has no draft, begins with the prompt's pass.

    Args:
        device: The target's device.
        sequences: The texts; `finish` is called before rows that have ended leave `sequences.live`.
        budget: Chooses draft sizes.
        report: What the target reports of the prompt's pass, for the first round.
    """

    def __init__(self, device: torch.device, sequences: Sequences, budget: DraftBudget, report: object) -> None:
        self.timer = RoundTimer(device)
        self._sequences, self._budget, self._report = sequences, budget, report
        self._indices = count()
        self._rows_of_others = 0  # rows of other decodings that shared the last pass

    def plan(self) -> Plan:
        """Begin a round: return the maximum size of its draft."""
        self.timer.start()
        plan = self._budget.plan(len(self._sequences.live) + self._rows_of_others)
        self.timer.lap("core")
        return plan

    def add_pass(self, result: PassResult[Any]) -> None:
        """Record what the target's pass of this round has cost."""
        self.timer.add_pass(result.seconds, result.cpu_seconds)
        self._rows_of_others = max(result.rows - len(self._sequences.live), 0)

    def finish(self, draft: Draft, scores: Scores, verdict: Verdict) -> Round:
        """End a round: return its description, and tell the budget what it cost and gained."""
        index, rows, done = next(self._indices), self._sequences.live, bool_list(verdict.done)
        sizes = int_list(draft.size)
        drafted = [size - 1 - sum(soft) for size, soft in zip(sizes, draft.soft_nodes, strict=True)]
        accepted = [sum(node > 0 for node in path) for path in int_rows(verdict.path)]
        logprobs = chosen_logprobs(scores.logits, verdict)
        self.timer.lap("core")

        batch = len(rows) + self._rows_of_others
        share_of_pass = len(rows) / batch
        if index > 0:
            mean_nodes = scores.mean_nodes_per_row
            target_seconds, draft_seconds, waited_for_cpu = self.timer.round_costs()
            # The budget compares drafting with the whole pass. The decodings that share a pass draft one after another,
            # so together they take about 1 / share_of_pass times as long as this one.
            self._budget.observe(
                RoundCosts(
                    batch=batch,
                    draft_sizes=[1 + nodes for nodes in drafted],
                    depth=height(draft),
                    accepted=accepted,
                    target_seconds=target_seconds,
                    draft_seconds=draft_seconds / share_of_pass,
                    waited_for_cpu=waited_for_cpu,
                    mean_nodes_per_row=max(sizes) if mean_nodes is None else mean_nodes,
                )
            )
        seconds = self.timer.seconds
        return Round(
            index,
            rows,
            tokens=verdict.new_tokens,
            drafted=drafted,
            accepted=accepted,
            done=done,
            target_seconds=seconds["target"] * share_of_pass,
            drafter_seconds=seconds["drafter"],
            core_seconds=seconds["core"],
            logprobs=logprobs,
            report=None if index else self._report,
            is_cut=[ended and self._sequences.is_cut(row) for row, ended in zip(rows, done, strict=True)],
        )


def chosen_logprobs(logits: Tensor, verdict: Verdict) -> Tensor:
    """Return the log-probabilities of a round's T new tokens, from the target's raw logits.

    The result stays on the device, without synchronisation. Entries after a row's last token are undefined.

    Args:
        logits: (B, N, V), the logits after each node of the draft.
        verdict: The verifier's decision about that draft.

    Returns:
        (B, T) float32.
    """
    tokens = verdict.tokens.clamp_min(0)
    nodes = verdict.path[:, : tokens.shape[1]].clamp_min(0)
    if len(tokens) == 1:
        rows = logits[0, nodes[0]][None]
    else:
        rows = logits[torch.arange(len(tokens), device=logits.device)[:, None], nodes]
    rows = rows.float()  # float32 before logsumexp: half precision would round probabilities near 1 to 1
    return rows.gather(2, tokens[..., None])[..., 0] - rows.logsumexp(2)
