"""How deep drafts are accepted: a drafter that counts, around the drafter that drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from mmdec.decode.forwarding import ForwardingDrafter
from mmdec.decode.tree import depths, int_list, int_rows
from mmdec.drafters.registry import named_drafter
from mmdec.evaluation.quality.harness import Method
from mmdec.types import Draft, Drafter, Scores, Verdict


@final
class DepthRecorder(ForwardingDrafter):
    """A drafter that proposes what another one does, and counts at which depths that was accepted."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._reached: Counter[int] = Counter()  # drafts that had a node at this depth
        self._accepted: Counter[int] = Counter()

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        rows = zip(int_rows(draft.parents), int_list(draft.size), int_rows(verdict.path), strict=True)
        for parents, size, path in rows:
            for depth in range(1, max(depths(parents[:size])) + 1):
                self._reached[depth] += 1
            for depth in range(1, sum(node > 0 for node in path) + 1):
                self._accepted[depth] += 1
        super().update(memory, draft, scores, verdict)

    def shares(self) -> list[float]:
        """For the depths 1, 2, ...: the share accepted there, of the drafts that had a node there."""
        return [self._accepted[depth] / self._reached[depth] for depth in sorted(self._reached)]


def recorded(methods: Sequence[Method]) -> tuple[list[Method], dict[str, DepthRecorder]]:
    """The same methods, with a recorder around each drafter of mmdec's loop; the recorders by the method's name."""
    recorders: dict[str, DepthRecorder] = {}
    watched = []
    for method in methods:
        drafter: Any = method.options.get("drafter")
        if method.loop == "mmdec" and drafter is not None:
            chosen = named_drafter(drafter) if isinstance(drafter, str) else drafter
            recorders[method.name] = DepthRecorder(chosen)
            method = replace(method, options={**method.options, "drafter": recorders[method.name]})
        watched.append(method)
    return watched, recorders
