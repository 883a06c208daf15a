"""Stores a drafter's memory with the target's cache, from one turn of a chat to the next.

A drafter that reads hidden states needs a state for every column of the target's cache. A new turn computes only the
states of new columns; those of old columns are in the memory of the previous run. The memory belongs to the cache
object and is dropped with it. A copied or cropped cache, or one that another model or drafter has written to, starts
without a memory. Tokens are the same either way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor

from mmdec.types import Context, Draft, Drafter, Plan, Scores, Target, Verdict


@dataclass(frozen=True)
class _StoredMemory:
    """A drafter's memory at the end of a run over a cache."""

    target: str
    drafter: str
    memory: Any


_memories: WeakKeyDictionary[Any, _StoredMemory] = WeakKeyDictionary()  # cache -> memory
_lock = threading.Lock()


def forget(cache: Any) -> None:
    """Drop the memory of a cache that will be filled with text that the drafter does not read."""
    if cache is not None:
        with _lock:
            _memories.pop(cache, None)


@final
class ConversationTurn:
    """A drafter for one run: starts with the memory of the previous turn, and stores its own with the cache.

    The drafter itself decides whether a memory fits, by comparing columns with `Context.past`.
    """

    def __init__(self, drafter: Drafter, target: str, cache: Any) -> None:
        """cache: the caller's, at batch 1, which the run fills; None: no memory is stored."""
        self.memory: Any = None  # None before the run starts and after the drafter has failed
        self.needs = drafter.needs
        self._drafter, self._target = drafter, target
        self._cache = cache if drafter.needs.travels else None
        if self._cache is None:
            forget(cache)

    @property
    def name(self) -> str:
        return self._drafter.name

    def check(self, target: Target) -> None:
        self._drafter.check(target)

    def start(self, context: Context) -> Any:
        """Start the drafter with the previous turn's memory in its context."""
        stored = None
        if self._cache is not None:
            with _lock:
                stored = _memories.pop(self._cache, None)  # `pop`: two runs must not share a memory
        if stored is not None and (stored.target, stored.drafter) == (self._target, self._drafter.name):
            context = replace(context, carried=stored.memory)
        self.memory = self._drafter.start(context)
        self._store()
        return self.memory

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        return self._watched(self._drafter.propose, memory, roots, plan)

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._watched(self._drafter.update, memory, draft, scores, verdict)

    def select(self, memory: Any, live: Tensor) -> None:
        self._watched(self._drafter.select, memory, live)

    def _watched(self, call: Any, *arguments: Any) -> Any:
        """Drop the memory if the call fails, because it may be half written."""
        try:
            return call(*arguments)
        except Exception:
            self.memory = None
            forget(self._cache)
            raise

    def _store(self) -> None:
        if self._cache is not None:
            with _lock:
                _memories[self._cache] = _StoredMemory(self._target, self._drafter.name, self.memory)
