"""Speculative decoding, on one screen: draft, one pass of the target, verify, commit.

The loop does not depend on models, tokenizers or kinds of drafters. `mmdec.types` describes targets and drafters,
`verify.py` accepts tokens, `budget.py` chooses draft sizes, and `guard.py` handles drafters that fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmdec.core.drafter_runner import DrafterRunner
from mmdec.core.sampling import Sequences
from mmdec.core.timing import RoundTimer
from mmdec.core.tree import bool_list, height, int_list, int_rows
from mmdec.core.verify import Rule, verify
from mmdec.types import Drafter, Needs, Plan, Target, TreeShape, Verdict


class Planner(Protocol):
    """An object that chooses draft sizes for the loop. `plan` returns the size for the next round. `observe` receives
    the seconds of a round and the numbers of its accepted tokens."""

    def plan(self, batch: int) -> Plan: ...

    def observe(
        self,
        batch: int,
        sizes: list[int],
        depth: int,
        accepted: list[int],
        target: float,
        drafter: float,
        starved: bool,  # whether the thread waited for a free CPU; then the seconds are CPU time
        /,
    ) -> None: ...


@dataclass(frozen=True)
class Round:
    """The result of one round: one draft and one target pass. Its lists have one entry for each batch row that had not
    ended before."""

    index: int  # number of the round in this `generate` call; 0 is the pass over the prompt
    rows: list[int]  # indices in the batch of the rows that had not ended before
    tokens: list[list[int]]  # new tokens of each batch row, bonus or correction included
    drafted: list[int]  # number of each batch row's drafted nodes, root excluded
    accepted: list[int]  # number of each batch row's drafted nodes that were accepted
    done: list[bool]  # for each batch row, whether it has ended
    target: float = 0.0  # seconds in the target's pass
    drafter: float = 0.0  # seconds in the drafter
    core: float = 0.0  # seconds in everything else
    vision: float = 0.0  # seconds in the vision tower, which `target` includes
    text: list[str] = field(default_factory=lambda: [])  # each row's new text, if the tokens were decoded; else empty
    logprobs: Tensor | None = field(default=None, repr=False, compare=False)  # (rows, T), log-probability of each token
    summaries: Tensor | None = field(default=None, repr=False, compare=False)  # `Context.summaries`; only in round 0
    # for each batch row, whether it ended by the maximum length, without an end token
    cut: list[bool] = field(default_factory=lambda: [], repr=False, compare=False)


@torch.inference_mode()
def decode(
    target: Target,
    inputs: Mapping[str, Any],
    text: Sequences,
    rule: Rule,
    drafter: Drafter | None,
    budget: Planner,
    shape: TreeShape | None = None,
) -> Iterator[Round]:
    """Decode a batch speculatively. Yields each round, until every row has ended; close the iterator to cancel.

    A row's tokens are those of plain decoding with the same rule. They do not depend on drafter, budget or batch.

    inputs: model inputs for `target.prefill`. text: holds the prompts (B, P) and receives the new tokens.
    rule: decides which drafted tokens are accepted. drafter: None for plain decoding. budget: chooses draft sizes.
    shape: chooses the nodes of trees, for drafters that guess each depth independently (`Needs.prior`).
    """
    device = target.device  # read once, because it is slow: the property searches all submodules of a large model
    watch, guard = RoundTimer(device), DrafterRunner(drafter, target.vocab_size)
    session, context, draft, scores = target.prefill(inputs, drafter.needs if drafter else Needs())
    watch.lap("target")
    text.position_limits = None if context.room is None else int_list(context.room)
    guard.start(replace(context, shape=shape))
    watch.lap("drafter")
    index, vision, summaries = 0, context.vision_seconds, context.summaries
    while True:
        rows, sizes = text.live, int_list(draft.size)
        verdict = verify(draft, scores, rule, text)
        target.commit(session, verdict)
        watch.lap("core")
        guard.update(draft, scores, verdict)
        watch.lap("drafter")
        roots, done = verdict.next, bool_list(verdict.done)
        if any(done):
            live = verdict.done.logical_not().nonzero()[:, 0]
            text.live, roots = [row for row, ended in zip(rows, done, strict=True) if not ended], roots[live]
            if text.live:
                target.select(session, live)
                guard.select(live)
        report = replace(_round(index, rows, verdict, sizes, done), logprobs=chosen_logprobs(scores.logits, verdict))
        cut = [
            ended and text.is_cut(row)
            for row, ended in zip(rows, done, strict=True)
        ]
        watch.lap("core")
        if index:
            budget.observe(len(rows), sizes, height(draft), report.accepted, *watch.round_costs())
        yield replace(report, **watch.seconds, vision=vision, summaries=summaries, cut=cut)
        vision, summaries = 0.0, None
        if not text.live:
            return
        watch.start()
        plan = rule.drafting_plan(budget.plan(len(text.live)), device)
        watch.lap("core")
        draft = guard.propose(roots, plan, [text.round_limit(row) for row in text.live])
        watch.lap("drafter")
        scores = target.score(session, draft)
        watch.lap("target")
        index += 1


def chosen_logprobs(logits: Tensor, verdict: Verdict) -> Tensor:
    """Return the log-probabilities (B, T) float32 of the T new tokens of a round, from the target's raw logits (B, N,
    V).

    Entries after a batch row's last token are undefined. The result stays on the device, without synchronisation.
    """
    tokens = verdict.tokens.clamp_min(0)
    nodes = verdict.path[:, : tokens.shape[1]].clamp_min(0)
    if len(tokens) == 1:
        rows = logits[0, nodes[0]][None]
    else:
        rows = logits[torch.arange(len(tokens), device=logits.device)[:, None], nodes]
    rows = rows.float()  # float32 before logsumexp: half precision would round probabilities near 1 to 1
    return rows.gather(2, tokens[..., None])[..., 0] - rows.logsumexp(2)


def _round(index: int, rows: list[int], verdict: Verdict, sizes: list[int], done: list[bool]) -> Round:
    tokens = [row[:length] for row, length in zip(int_rows(verdict.tokens), int_list(verdict.lengths), strict=True)]
    accepted = [sum(node > 0 for node in path) for path in int_rows(verdict.path)]
    return Round(index, rows, tokens, [size - 1 for size in sizes], accepted, done)
