"""A base class for drafters that wrap another drafter: subclasses override the calls that they observe."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmdec.types import Context, Draft, Drafter, Plan, Scores, Target, Verdict


class ForwardingDrafter:
    """Forwards every call to `drafter` and has its name."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.needs = drafter, drafter.needs

    @property
    def name(self) -> str:
        return self.drafter.name

    def check(self, target: Target) -> None:
        """Check with the wrapped drafter."""
        self.drafter.check(target)

    def start(self, context: Context) -> Any:
        """Start the wrapped drafter."""
        return self.drafter.start(context)

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        """Return the wrapped drafter's draft."""
        return self.drafter.propose(memory, roots, plan)

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Pass the verdict to the wrapped drafter."""
        self.drafter.update(memory, draft, scores, verdict)

    def select(self, memory: Any, live: Tensor) -> None:
        """Select the rows of the wrapped drafter."""
        self.drafter.select(memory, live)
