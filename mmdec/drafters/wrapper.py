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

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        return self.drafter.propose(state, roots, plan)

    def update(self, state: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.drafter.update(state, draft, scores, verdict)

    def select(self, state: Any, live: Tensor) -> None:
        self.drafter.select(state, live)
