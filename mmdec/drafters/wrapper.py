"""The base class of drafters that wrap another drafter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmdec.types import Context, Draft, Drafter, Plan, Scores, Target, Verdict


class ForwardingDrafter:
    """Forwards every call to another drafter and has its name. Subclasses override what they observe or change."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.needs = drafter, drafter.needs

    @property
    def name(self) -> str:
        return self.drafter.name

    def check(self, target: Target) -> None:
        self.drafter.check(target)

    def start(self, context: Context) -> Any:
        return self.drafter.start(context)

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        return self.drafter.propose(memory, roots, plan)

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.drafter.update(memory, draft, scores, verdict)

    def select(self, memory: Any, live: Tensor) -> None:
        self.drafter.select(memory, live)
