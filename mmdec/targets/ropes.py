"""Finds rotary positions (RoPE) that change with the text's length.

Beyond a certain length, "longrope" has other frequencies, and "dynamic" has new frequencies at each further token. Keys
in the cache keep the frequencies with which they were made.

With drafts, frequencies are right if the text stays below that length, or, with "longrope", if only the prompt is
longer. A text that crosses the length is decoded without drafts by transformers' own loop, which chooses the
frequencies of all rows by the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

from transformers import PreTrainedConfig


@final
@dataclass(frozen=True)
class GrowingRope:
    """Rotary positions (RoPE) whose frequencies depend on the length of the text."""

    kind: str  # `rope_type` of the configuration
    length: int  # longest text, in positions, at which the frequencies are still those of short texts
    changes_per_token: bool  # whether the frequencies change again at each token beyond that length

    def changes_within(self, prompt: int, cached: int, end: int) -> bool:
        """Return whether the frequencies change between the tokens of a text.

        Args:
            prompt: Number of prompt tokens, padding included, of which `cached` are in the cache.
            end: Number of tokens of the finished text.
        """
        beyond = not self.changes_per_token and prompt > self.length and not 0 < cached <= self.length
        return end > self.length and not beyond


def growing_ropes(config: PreTrainedConfig) -> tuple[GrowingRope, ...]:
    """Return those rotary positions of a model's layers that change with the text's length."""
    rope = cast(Mapping[str, Any], getattr(config, "rope_parameters", None) or {})
    ropes = set[GrowingRope]()
    for settings in (rope, *rope.values()):
        kind = settings.get("rope_type") if isinstance(settings, Mapping) else None
        if kind == "longrope":
            length = settings.get("original_max_position_embeddings") or cast(Any, config).max_position_embeddings
            ropes.add(GrowingRope(kind, int(length), False))
        elif isinstance(kind, str) and "dynamic" in kind:
            ropes.add(GrowingRope(kind, int(cast(Any, config).max_position_embeddings), True))
    return tuple(ropes)


def max_positions(config: Any) -> int | None:
    """Read the maximum number of positions from a language model's configuration; None if it has no such field.

    This number is the size of the model's table of positions, or the length to which its rotary positions are extended.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if type(positions) is not int or not isinstance(factor, int | float):
        return positions if type(positions) is int else None
    return max(positions, int(factor * (rope.get("original_max_position_embeddings") or positions)))
