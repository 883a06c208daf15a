"""Speculative decoding in one function, `decode_steps`: draft, one pass of the target, verify, commit.

The loop knows no models, tokenizers or kinds of drafters. `mmdec.types` describes targets and drafters, `verify.py`
decides which tokens are accepted, `budget.py` chooses draft sizes, `drafter_runner.py` handles drafters that fail, and
`round_recorder.py` does the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mmdec.core.budget import DraftBudget
from mmdec.core.drafter_runner import DrafterRunner
from mmdec.core.round_recorder import RoundRecorder
from mmdec.core.sampling import Sequences
from mmdec.core.steps import Prefill, Score, Steps, run_steps
from mmdec.core.tree import int_list
from mmdec.core.verify import Rule, verify
from mmdec.types import Drafter, Needs, PrefillOutput, Round, SharedPassTarget, Target, TreeShape


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
    needs = Needs() if drafter is None else drafter.needs
    prompt_tokens = target.prompt_tokens(inputs) if isinstance(target, SharedPassTarget) else None
    result: Any = yield Prefill(target, device, inputs, needs, prompt_tokens)
    prompt: PrefillOutput[Any] = result.value
    session, context, draft, scores = prompt.session, prompt.context, prompt.draft, prompt.scores
    recorder = RoundRecorder(device, sequences, budget, prompt.report)
    try:
        recorder.add_pass(result)
        sequences.position_limits = None if context.room is None else int_list(context.room)
        runner = DrafterRunner(drafter, replace(context, tree_shape=shape), target.vocab_size, recorder.timer)
        while True:
            verdict = verify(draft, scores, rule, sequences)
            target.commit(session, verdict)
            runner.update(draft, scores, verdict)
            round_ = recorder.finish(draft, scores, verdict)
            sequences.live = [row for row, ended in zip(round_.rows, round_.done, strict=True) if not ended]
            yield round_
            if not sequences.live:
                return

            plan = rule.drafting_plan(recorder.plan(), sequences)
            roots = verdict.next
            if any(round_.done):
                live = verdict.done.logical_not().nonzero()[:, 0]
                roots = roots[live]
                target.select(session, live)
                runner.select(live)
            draft = runner.propose(roots, plan, [sequences.round_limit(row) for row in sequences.live])
            recorder.timer.lap("core")
            result = yield Score(target, device, session, draft)
            recorder.add_pass(result)
            scores = result.value
    finally:
        if isinstance(target, SharedPassTarget):
            target.release(session)
