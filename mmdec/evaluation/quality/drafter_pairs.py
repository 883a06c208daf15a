"""Compares two kinds of drafters, several seeds of each, on the same questions: tokens per round, paired by picture.

python -m mmdec.evaluation.quality.drafter_pairs --a runs/msd-1 runs/msd-2 --b runs/eagle-1 runs/eagle-2

Each drafter is also run with its visual tokens in another order, while the target sees the picture unchanged. The loss
of tokens per round shows how much the drafter uses the picture. Intervals of 95 % come from drawing pictures with
replacement (Efron, "Bootstrap methods: another look at the jackknife", 1979).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdec.decode.budget import Nodes
from mmdec.decode.guard import ForwardingDrafter
from mmdec.evaluation.quality.description import PROMPT, QUESTIONS, DescriptionHarness, questions_of
from mmdec.evaluation.quality.harness import Log, Method, measured_on, no_log, parse_plan
from mmdec.hub.vlm import DEFAULT_MODEL, LoadedVlm, load_vlm
from mmdec.pipelines.call import as_drafter
from mmdec.pipelines.threads import keep_threads
from mmdec.training.corpora.image_text import ImageQuestion
from mmdec.types import Context, Drafter, InputError

DRAWS = 2000  # number of bootstrap samples
BATCH = 16  # questions at once. The draft size is fixed, so tokens per round do not depend on the batch
Counts = np.ndarray  # (pictures, 2): tokens after the first one, rounds after the prompt's


class ShuffledPicture(ForwardingDrafter):
    """Wraps a drafter, and shuffles the visual tokens that it gets, in one fixed order for each number of visual
    tokens."""

    def start(self, context: Context) -> Any:
        if context.visual is None or context.embeds is None:
            return self.drafter.start(context)
        order = torch.stack([_order(row) for row in context.visual])[..., None]
        features = {layer: _taken(values, order) for layer, values in context.features.items()}
        return self.drafter.start(replace(context, embeds=_taken(context.embeds, order), features=features))


def _order(visual: Tensor) -> Tensor:
    """Return indices (F,) that shuffle the visual tokens of F tokens and leave the other tokens in place.

    visual: (F,) bool, True for visual tokens.
    """
    order = torch.arange(len(visual))
    columns = visual.nonzero()[:, 0].cpu()
    order[columns] = columns[torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))]
    return order.to(visual.device)


def _taken(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(1, order.expand_as(values))


def counts(harness: DescriptionHarness, questions: Sequence[ImageQuestion], drafter: Drafter, plan: Nodes) -> Counts:
    """Decode the questions with a drafter. plan: draft size: nodes of a chain, or (nodes, depth) of a tree.

    Returns: (pictures, 2), tokens and rounds of each picture. The pass over the prompt, and its token, do not count.
    """
    method = Method("drafted", "mmdec", {"drafter": drafter, "num_speculative_tokens": plan})
    pictures = {name: index for index, name in enumerate(dict.fromkeys(map(_picture, questions)))}
    totals = np.zeros((len(pictures), 2))
    for start in range(0, len(questions), BATCH):
        batch = questions[start : start + BATCH]
        for question, answer in zip(batch, harness.describe(batch, method), strict=True):
            totals[pictures[_picture(question)]] += (len(answer.tokens) - 1, answer.rounds - 1)
    return totals


def _picture(question: ImageQuestion) -> tuple[str, ...]:
    return tuple(map(str, question.images))


def tokens_per_round(totals: Counts) -> float:
    """Divide all tokens by all rounds. totals: (pictures, 2), tokens and rounds of each picture."""
    tokens, rounds = totals.sum(0)
    return float(tokens / max(rounds, 1))


def difference(a: Counts, b: Counts, seed: int = 0) -> dict[str, float]:
    """Subtract b's tokens per round from a's, over the same pictures, with a bootstrap interval of 95 %.

    a, b: (pictures, 2), tokens and rounds of each picture. seed: random seed of the bootstrap.
    Returns: "value", and the interval's ends, "low" and "high".
    """
    draw = np.random.default_rng(seed)
    drawn = draw.integers(0, len(a), (DRAWS, len(a)))
    sides = [values[drawn].sum(1) for values in (a, b)]
    gaps = [side[:, 0] / np.maximum(side[:, 1], 1) for side in sides]
    low, high = np.percentile(gaps[0] - gaps[1], (2.5, 97.5))
    return {"value": tokens_per_round(a) - tokens_per_round(b), "low": float(low), "high": float(high)}


def compare_drafters(
    a: Sequence[str | Path],
    b: Sequence[str | Path],
    questions: str | Path = QUESTIONS,
    model: str | Path | LoadedVlm = DEFAULT_MODEL,
    *,
    plan: str = "16x6",
    limit: int | None = 20,
    threads: int = 1,
    log: Log = no_log,
) -> dict[str, Any]:
    """Compare two kinds of drafters. Returns a JSON-ready report.

    a, b: folders of drafters, one for each seed, as many for a as for b. limit: number of questions from each task.
    plan: draft size: a chain such as "8", or a tree such as "16x6" (16 nodes, at most 6 deep).
    Raises InputError.
    """
    if not a or len(a) != len(b):
        raise InputError(f"`a` and `b` must name as many drafters, at least one, but name {len(a)} and {len(b)}.")
    nodes = parse_plan(plan)
    if nodes is None:
        raise InputError("`plan` must be a fixed draft size here, but is 'learned'. Try 16x6.")
    keep_threads(threads)
    vlm = model if isinstance(model, LoadedVlm) else load_vlm(model, "cpu")
    asked = questions_of(str(questions), None, PROMPT, limit)
    harness = DescriptionHarness(vlm)
    sides: dict[str, list[Counts]] = {}
    for side, folders in (("a", a), ("b", b)):
        for folder in folders:
            drafter: Any = as_drafter(vlm, Path(folder))
            for name, seen in ((side, drafter), (f"{side} shuffled", ShuffledPicture(drafter))):
                log(f"{name}: {Path(folder).name}")
                sides.setdefault(name, []).append(counts(harness, asked, seen, nodes))
    sums = {name: np.sum(seeds, 0) for name, seeds in sides.items()}
    return {
        "plan": plan,
        "questions": len(asked),
        "pictures": len(sums["a"]),
        "tokens_per_round": {name: [tokens_per_round(totals) for totals in seeds] for name, seeds in sides.items()},
        "a_less_b": difference(sums["a"], sums["b"]),
        "a_less_a_shuffled": difference(sums["a"], sums["a shuffled"]),
        "b_less_b_shuffled": difference(sums["b"], sums["b shuffled"]),
        "hardware": measured_on(vlm.model, BATCH),
    }


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", nargs="+", required=True, help="folders of drafters")
    parser.add_argument("--b", nargs="+", required=True, help="as many of the other kind")
    parser.add_argument("--questions", default=QUESTIONS)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--plan", default="16x6", help="nodes x depth of a tree, or nodes of a chain")
    parser.add_argument("--limit", type=int, default=20, help="questions of each task")
    parser.add_argument("--threads", type=int, default=1)
    options = vars(parser.parse_args())
    print(json.dumps(compare_drafters(**options, log=print), indent=1))


if __name__ == "__main__":
    main()
