"""Small language models for tests, a smaller one that drafts, and a drafter that is almost always wrong."""

from __future__ import annotations

import torch

from mmdec.core.tree import trees_from_lists
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict
from tests.support.tiny_text import VOCABULARY, language_model

MODELS = {"llama": language_model("llama"), "qwen2": language_model("qwen2", 1)}
SMALL = language_model("llama", 2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


class Wrong:
    """A drafter that proposes random trees of random tokens."""

    name = "wrong"
    needs = Needs()

    def check(self, target: Target) -> None: ...

    def start(self, context: Context) -> torch.Generator:
        return torch.Generator().manual_seed(5)

    def propose(self, state: torch.Generator, roots: torch.Tensor, plan: Plan) -> Draft:
        trees = []
        for _ in range(len(roots)):
            count = int(torch.randint(plan.nodes + 1, (), generator=state))
            tokens = torch.randint(VOCABULARY, (count,), generator=state).tolist()
            trees.append((tokens, [int(torch.randint(node + 1, (), generator=state)) for node in range(count)]))
        return trees_from_lists(roots, trees)

    def update(self, state: torch.Generator, draft: Draft, scores: Scores, verdict: Verdict) -> None: ...

    def select(self, state: torch.Generator, live: torch.Tensor) -> None: ...
