"""Rows of several `generate` calls that share the passes of one model.

Each call begins alone, with a session of its own. When the scheduler scores the drafts of several calls together, their
sessions move into one `SharedBatch`: a key-value cache in which each row has a slot. A row that joins is copied into a
free slot; the other rows stay where they are. When a row leaves, the last row takes its slot. So joining and leaving
cost a copy of one row, unless the cache is full and must grow.

Calls answer one after another between two passes, so what they say (accepted paths, rows that ended) is collected and
applied before the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch

from mmdec.core.tree import int_list
from mmdec.types import Draft, Scores

if TYPE_CHECKING:
    from mmdec.targets.decoder import DecoderSession, DecoderTarget


@final
class SharedBatch:
    """A batch that sessions join and leave between passes.

    It takes over the rows of the session `first`, which then has no cache of its own.
    """

    def __init__(self, first: DecoderSession) -> None:
        self.session = first.detach_rows()
        self._owners = [first] * len(self.session.rows.ends)  # [slot]: the session to which the row belongs
        self._paths: dict[int, list[int]] = {}  # slot -> accepted nodes of the last draft
        self._leaving = set[int]()  # slots whose rows have ended
        first.batch, first.slots = self, list(range(len(self._owners)))

    def commit(self, session: DecoderSession, path: torch.Tensor) -> None:
        """Record the accepted nodes of a session's rows: (B, A) int64, padded with -1."""
        self._paths.update(zip(session.slots, path.tolist(), strict=True))

    def select(self, session: DecoderSession, live: torch.Tensor) -> None:
        """Keep only the session's rows with the indices `live` (K,), in that order."""
        slots = [session.slots[row] for row in int_list(live)]
        self._leaving |= set(session.slots) - set(slots)
        session.slots = slots

    def release(self, session: DecoderSession) -> None:
        """Let all rows of a session leave."""
        self._leaving |= set(session.slots)
        session.slots = []

    def score(self, target: DecoderTarget, parts: Sequence[tuple[DecoderSession, Draft]]) -> list[Scores]:
        """Score the drafts of several sessions in one pass.

        Rows of the batch whose sessions do not take part compute a token that is not kept.

        Returns:
            The scores of each session.
        """
        self._settle(target)
        for session, _ in parts:
            if session.batch is None:
                self._join(session)
        self.session.layers = tuple(sorted({layer for owner in self._owners for layer in owner.layers}))
        columns, count = max(draft.tokens.shape[1] for _, draft in parts), len(self._owners)
        like = parts[0][1].tokens
        tokens, parents = like.new_zeros(count, columns), like.new_zeros(count, columns)
        sizes = like.new_ones(count)
        parents[:, 0] = -1
        for session, draft in parts:
            nodes = draft.tokens.shape[1]
            tokens[session.slots, :nodes], parents[session.slots, :nodes] = draft.tokens, draft.parents
            sizes[session.slots] = draft.size
        soft = None
        if any(draft.soft is not None for _, draft in parts):
            soft = torch.zeros(count, columns, target.hidden_size, dtype=target.model.dtype, device=like.device)
            for session, draft in parts:
                if draft.soft is not None:
                    soft[session.slots, : draft.soft.shape[1]] = draft.soft
        scores = target.score(self.session, Draft(tokens, parents, sizes, soft=soft))
        return [_rows_of(scores, session, draft.tokens.shape[1]) for session, draft in parts]

    def _settle(self, target: DecoderTarget) -> None:
        """Apply the accepted paths of the last pass, then let the rows leave that have ended."""
        if self.session.rows.tree:
            longest = max(map(len, self._paths.values()), default=1)
            paths = [self._paths.get(slot, []) for slot in range(len(self._owners))]
            target.keep(self.session, torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths]))
        self._paths = {}
        for slot in sorted(self._leaving, reverse=True):
            last = len(self._owners) - 1
            self.session.remove_row(slot)
            if slot < last:
                mover = self._owners[slot] = self._owners[last]
                mover.slots = [slot if other == last else other for other in mover.slots]
            self._owners.pop()
        self._leaving = set()

    def _join(self, session: DecoderSession) -> None:
        first = len(self._owners)
        rows = session.detach_rows()
        self.session.append(rows)
        self._owners += [session] * len(rows.rows.ends)
        session.batch, session.slots = self, list(range(first, len(self._owners)))


def _rows_of(scores: Scores, session: DecoderSession, nodes: int) -> Scores:
    """Return the scores of a session's rows, without the padding nodes of the batch."""
    first, count = session.slots[0], len(session.slots)
    contiguous = session.slots == list(range(first, first + count))
    rows = slice(first, first + count) if contiguous else session.slots
    features = {layer: scores.features[layer][rows, :nodes] for layer in session.layers}
    mean_nodes = scores.mean_nodes_per_row
    mean_nodes = scores.logits.shape[1] if mean_nodes is None else mean_nodes
    return Scores(scores.logits[rows, :nodes], features, mean_nodes)
