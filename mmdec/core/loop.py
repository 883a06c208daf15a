"""Speculative decoding in one function, `decode_steps`: draft, one pass of the target, verify, commit.

The loop knows no models, tokenizers or kinds of drafters. `mmdec.types` describes targets and drafters, `verify.py`
decides which tokens are accepted, `budget.py` chooses draft sizes, and `drafter_runner.py` handles drafters that fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from mmdec.core.drafter_runner import DrafterRunner
from mmdec.core.sampling import Sequences
from mmdec.core.steps import Prefill, Score, Steps, run_steps
from mmdec.core.timing import RoundTimer
from mmdec.core.tree import bool_list, height, int_list, int_rows
from mmdec.core.verify import Rule, verify
from mmdec.types import Drafter, Needs, Plan, PrefillOutput, Round, SharedPassTarget, Target, TreeShape, Verdict


class DraftBudget(Protocol):
    """Chooses the size of each draft from what earlier rounds cost and gained."""

    def plan(self, batch: int) -> Plan:
        """Return the maximum size of the next draft for `batch` rows."""
        ...

    def observe(
        self,
        batch: int,
        draft_sizes: list[int],
        depth: int,
        accepted: list[int],
        target_seconds: float,
        draft_seconds: float,
        waited_for_cpu: bool,
        nodes_per_row: int,
    ) -> None:
        """Record a round.

        Args:
            batch: Number of rows.
            draft_sizes: Number of each row's nodes, root included.
            depth: Depth of the deepest tree.
            accepted: Number of each row's accepted nodes, root excluded.
            target_seconds: Seconds of the target's pass.
            draft_seconds: Seconds of the drafter.
            waited_for_cpu: Whether the thread waited for a free CPU; the seconds are then CPU time.
            nodes_per_row: Number of nodes that the pass computed for each row, on average.
        """
        ...


def decode(
    target: Target,
    inputs: Mapping[str, Any],
    sequences: Sequences,
    rule: Rule,
    drafter: Drafter | None,
    budget: DraftBudget,
    shape: TreeShape | None = None,
) -> Iterator[Round]:
    """Decode a batch speculatively.

    A row's tokens are those of plain decoding with the same rule. They do not depend on drafter, budget or batch.
    Close the iterator to cancel.

    Args:
        target: The model that decides.
        inputs: Model inputs for `target.prefill`.
        sequences: Holds the prompts (B, P) and receives the new tokens.
        rule: Decides which drafted tokens are accepted.
        drafter: Proposes tokens; None for plain decoding.
        budget: Chooses draft sizes.
        shape: Chooses the nodes of trees, for drafters that guess each depth independently (`Needs.prior`).

    Yields:
        Each round, until every row has ended.
    """
    return run_steps(decode_steps(target, inputs, sequences, rule, drafter, budget, shape))


@torch.inference_mode()
def decode_steps(
    target: Target,
    inputs: Mapping[str, Any],
    sequences: Sequences,
    rule: Rule,
    drafter: Drafter | None,
    budget: DraftBudget,
    shape: TreeShape | None = None,
) -> Steps[None]:
    """Decode as `decode` does, but ask for each pass of the target by yielding it.

    So the caller can run the pass together with passes of other decodings.

    Yields:
        Each pass, which is answered by `send` with a `PassResult`; and each round, until every row has ended.
    """
    device = target.device  # read once, because it is slow: the property searches all submodules of a large model
    timer, runner = RoundTimer(device), DrafterRunner(drafter, target.vocab_size)
    prompt_tokens = target.prompt_tokens(inputs) if isinstance(target, SharedPassTarget) else None
    result: Any = yield Prefill(target, device, inputs, drafter.needs if drafter else Needs(), prompt_tokens)
    timer.add("target", result.seconds, result.cpu_seconds)
    prompt: PrefillOutput[Any] = result.value
    session, context, draft, scores = prompt.session, prompt.context, prompt.draft, prompt.scores
    try:
        sequences.position_limits = None if context.room is None else int_list(context.room)
        runner.start(replace(context, tree_shape=shape))
        timer.lap("drafter")
        for index in count():
            rows, sizes = sequences.live, int_list(draft.size)
            verdict = verify(draft, scores, rule, sequences)
            target.commit(session, verdict)
            timer.lap("core")
            runner.update(draft, scores, verdict)
            timer.lap("drafter")

            roots, done = verdict.next, bool_list(verdict.done)
            if any(done):
                live = verdict.done.logical_not().nonzero()[:, 0]
                roots = roots[live]
                sequences.live = [row for row, ended in zip(rows, done, strict=True) if not ended]
                if sequences.live:
                    target.select(session, live)
                    runner.select(live)
            round_ = Round(
                index,
                rows,
                tokens=[
                    row[:length]
                    for row, length in zip(int_rows(verdict.tokens), int_list(verdict.lengths), strict=True)
                ],
                drafted=[size - 1 - sum(soft) for size, soft in zip(sizes, draft.soft_nodes, strict=True)],
                accepted=[sum(node > 0 for node in path) for path in int_rows(verdict.path)],
                done=done,
                logprobs=chosen_logprobs(scores.logits, verdict),
                cut=[ended and sequences.is_cut(row) for row, ended in zip(rows, done, strict=True)],
            )
            timer.lap("core")
            share_of_pass = len(rows) / (result.rows or len(rows))
            if index > 0:
                target_seconds, draft_seconds, waited_for_cpu = timer.round_costs()
                # The budget compares drafting with the whole pass. The decodings that share a pass draft one after
                # another, so together they take about 1 / share_of_pass times as long as this one.
                budget.observe(
                    batch=max(result.rows, len(rows)),
                    draft_sizes=[1 + count for count in round_.drafted],
                    depth=height(draft),
                    accepted=round_.accepted,
                    target_seconds=target_seconds,
                    draft_seconds=draft_seconds / share_of_pass,
                    waited_for_cpu=waited_for_cpu,
                    nodes_per_row=scores.nodes_per_row or max(sizes),
                )
            else:
                round_ = replace(round_, report=prompt.report)
            seconds = timer.seconds
            yield replace(
                round_, target=seconds["target"] * share_of_pass, drafter=seconds["drafter"], core=seconds["core"]
            )
            if not sequences.live:
                return

            timer.start()
            rows_of_others = max(result.rows - len(rows), 0)  # rows of other decodings that shared the last pass
            plan = rule.drafting_plan(budget.plan(len(sequences.live) + rows_of_others), sequences)
            timer.lap("core")
            draft = runner.propose(roots, plan, [sequences.round_limit(row) for row in sequences.live])
            timer.lap("drafter")
            result = yield Score(target, device, session, draft)
            timer.add("target", result.seconds, result.cpu_seconds)
            scores = result.value
    finally:
        if isinstance(target, SharedPassTarget):
            target.release(session)


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
