"""Targets whose logits are a hash of the whole text, mixed so that two of them agree partly."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmdec.core.budget import RoundCosts
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.tree import root_only
from mmdec.core.verify import MatchRule, Rule
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.types import Context, Draft, Needs, Plan, PrefillOutput, Round, Scores, Verdict


@dataclass
class ToySession:
    texts: list[list[int]]  # each row's tokens in the cache
    draft: Draft | None = None  # the draft that was scored and not yet committed
    passes: list[int] = field(default_factory=list)  # number of columns of each pass


class Toy:
    """A target whose logits are a hash of the whole text. blend: another target; the logits are then the mean of both,
    weighted by `share`, so that the two targets agree partly."""

    hidden_size = 1
    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 8, seed: int = 0, blend: Toy | None = None, share: float = 0.5) -> None:
        self.name = f"toy-{seed}"
        self.vocab_size, self.seed, self.blend, self.share = vocab_size, seed, blend, share
        self.session: ToySession | None = None
        self.cached: dict[tuple[int, ...], Tensor] = {}

    def logits(self, text: list[int]) -> Tensor:
        key = tuple(text)
        if key not in self.cached:
            self.cached[key] = self.computed(text)
        return self.cached[key]

    def computed(self, text: list[int]) -> Tensor:
        source = random.Random(f"{self.seed} {text}")
        own = torch.tensor([source.gauss(0, 2) for _ in range(self.vocab_size)])
        if self.blend is None:
            return own
        other = torch.nn.functional.pad(self.blend.logits(text), (0, self.vocab_size - self.blend.vocab_size))
        return self.share * own + (1 - self.share) * other

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[ToySession]:
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        texts = [row[row_mask].tolist() for row, row_mask in zip(ids, mask, strict=True)]
        self.session = ToySession(texts)
        logits = torch.stack([self.logits(text) for text in texts])[:, None]
        context = Context(ids, mask, mask.cumsum(1)[None], mask.sum(1))
        self.session.draft = root_only(ids[:, -1])
        return PrefillOutput(self.session, context, self.session.draft, Scores(logits))

    def score(self, session: ToySession, draft: Draft) -> Scores:
        assert session.draft is None, "scored twice without a commit"
        session.draft = draft
        session.passes.append(draft.tokens.shape[1])
        logits = torch.zeros(*draft.tokens.shape, self.vocab_size)
        for row, text in enumerate(session.texts):
            paths = [[int(draft.tokens[row, 0])]]
            for node in range(1, int(draft.size[row])):
                paths.append([*paths[int(draft.parents[row, node])], int(draft.tokens[row, node])])
            for node, path in enumerate(paths):
                logits[row, node] = self.logits(text + path)
        return Scores(logits)

    def commit(self, session: ToySession, verdict: Verdict) -> None:
        assert session.draft is not None, "nothing to commit"
        if session.passes:  # before the first pass the draft is the prompt's last token, which is in the cache
            for row, path in enumerate(verdict.path.tolist()):
                nodes = [node for node in path if node >= 0]
                parents = session.draft.parents[row, nodes].tolist()
                assert parents == [-1, *nodes][: len(nodes)], "no path from the root"
                session.texts[row] += session.draft.tokens[row, nodes].tolist()
        session.draft = None

    def select(self, session: ToySession, live: Tensor) -> None:
        session.texts = [session.texts[row] for row in live.tolist()]


def start(drafter: SmallModelDrafter, prompts: list[list[int]], tokens: list[int], vocab: int) -> Any:
    """Return a drafter's memory after the prompts' round. tokens: the token that this round gave each row."""
    ids = torch.tensor(prompts)
    state = drafter.start(Context(ids, torch.ones_like(ids).bool(), ids[None], ids[:, 0]))
    given = torch.tensor(tokens)
    zeros = torch.zeros_like(given)
    verdict = Verdict(zeros[:, None], given, zeros.bool(), given[:, None], zeros + 1)
    drafter.update(state, root_only(ids[:, -1]), Scores(torch.zeros(len(ids), 1, vocab)), verdict)
    return state


PROMPTS = [[1, 2, 3], [4], [5, 6], [1, 1, 1, 1]]


def run(
    target: Toy,
    drafter: SmallModelDrafter | None,
    budget: Any,
    prompts: list[list[int]],
    length: int = 16,
    rule: Rule | None = None,
    eos: int = 7,
) -> list[Round]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    text = Sequences(ids, Stop(width + length, frozenset({eos})))
    return list(decode(target, {"input_ids": ids, "attention_mask": mask}, text, rule or MatchRule(), drafter, budget))


class CyclingBudget:
    """A budget that goes through its plans in turn, rounds without drafts included."""

    plans = (Plan(3, 3), Plan(0, 0), Plan(6, 2), Plan(0, 0), Plan(0, 0), Plan(9, 3), Plan(1, 1))

    def __init__(self) -> None:
        self.round = 0

    def plan(self, batch: int) -> Plan:
        self.round += 1
        return self.plans[self.round % len(self.plans)]

    def observe(self, costs: RoundCosts) -> None: ...
