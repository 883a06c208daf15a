"""What tests ask of a draft's tree."""

from __future__ import annotations

from mmdec.types import Draft


def is_chain(draft: Draft) -> bool:
    """Whether every node's parent is the node before it, padding left out."""
    rows = zip(draft.parents.tolist(), draft.size.tolist(), strict=True)
    return all(parents[:size] == list(range(-1, size - 1)) for parents, size in rows)
