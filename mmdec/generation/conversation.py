"""A drafter's memory of a conversation: stored with the target's cache from one turn to the next.

A drafter that reads hidden states has a state of its own for every column that the target's cache holds. A new turn's
pass gives the states of the new columns alone; those of the old ones are in the memory that the run before it ended
with. It is stored by the cache object itself and is dropped with it: a copy of the cache, a cropped one, or one that
another model or drafter has written to since begins anew. Tokens are the same either way.
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


_memories: WeakKeyDictionary[Any, _StoredMemory] = WeakKeyDictionary()  # cache -> its conversation
_lock = threading.Lock()


def forget(cache: Any) -> None:
    """Drop the memory: what is written to this cache from here on is not the text that the drafter read."""
    if cache is not None:
        with _lock:
            _memories.pop(cache, None)


@final
class ConversationTurn:
    """A drafter for one run, which begins with the memory of the turn before and stores its own with the cache.

    Only the drafter knows whether a memory fits: it compares columns with `Context.past`.
    """

    def __init__(self, drafter: Drafter, target: str, cache: Any) -> None:
        """cache: the caller's, in a batch of one, which the run fills; None: nothing travels."""
        self.memory: Any = None  # as of now; None before the run starts and after the drafter has failed
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
        """The drafter's own, with the memory of the turn before in its context."""
        stored = None
        if self._cache is not None:
            with _lock:
                stored = _memories.pop(self._cache, None)  # two runs at once do not share it
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
        """A memory that an error has left half written is dropped."""
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
