"""Stores a drafter's state between the turns of a chat, which use the same cache."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor

from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.types import Context, Draft, Drafter, Plan, Scores, Verdict

# cache object of a chat -> (target's name, drafter's name, drafter's state after the last turn). The state is not an
# attribute of the cache object, because a copy of the cache would copy it, too.
_chat_states: WeakKeyDictionary[Any, tuple[str, str, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def drop_chat_state(cache: Any) -> None:
    """Drop the drafter's state that is stored for a chat's cache.

    Called if the state does not cover all of the cache's text.
    """
    if cache is not None:
        with _lock:
            _chat_states.pop(cache, None)


def in_conversation(drafter: Drafter | None, target: str, cache: Any) -> Drafter | None:
    """Return a drafter that begins with its state of the previous turn, if it has one to keep.

    Args:
        drafter: The drafter; None for plain decoding.
        target: The name of the target model's weights.
        cache: The caller's cache, with one batch row; None: there is none.
    """
    if cache is not None and drafter is not None and drafter.needs.keeps_state_between_turns:
        return ConversationTurn(drafter, target, cache)
    drop_chat_state(cache)
    return drafter


@final
class ConversationTurn(ForwardingDrafter):
    """Wraps a drafter for one turn of a chat, which begins with the drafter's state of the previous turn.

    The new state is stored for the next turn. A drafter that reads hidden states needs those of every token in the
    target's cache. A new turn computes only the hidden states of its new tokens; the drafter's old state has the
    others. The state is stored under the cache object and dropped with it. The state is not used for a copy of the
    cache, or after another model or drafter has written to the cache. The drafter itself checks that the state has as
    many tokens as the cache. The output is the same with and without the state.

    Args:
        drafter: The drafter to wrap.
        target: The name of the target model's weights.
        cache: The caller's cache, with one batch row, which is filled while decoding.
    """

    def __init__(self, drafter: Drafter, target: str, cache: Any) -> None:
        super().__init__(drafter)
        self._target, self._cache = target, cache

    def start(self, context: Context) -> Any:
        """Start the drafter with its state of the previous turn, if there is one; store and return the new state."""
        with _lock:
            stored = _chat_states.pop(self._cache, None)  # `pop`, so that two calls never share it
        if stored is not None and stored[:2] == (self._target, self.name):
            context = replace(context, previous_state=stored[2])
        state = super().start(context)
        with _lock:
            _chat_states[self._cache] = self._target, self.name, state
        return state

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        with self._forget_on_error():
            return super().propose(state, roots, plan)

    def update(self, state: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        with self._forget_on_error():
            super().update(state, draft, scores, verdict)

    def select(self, state: Any, live: Tensor) -> None:
        with self._forget_on_error():
            super().select(state, live)

    @contextmanager
    def _forget_on_error(self) -> Generator[None]:
        """Context manager: if its block raises, drop the drafter's stored state, because it may be incomplete."""
        try:
            yield
        except Exception:
            drop_chat_state(self._cache)
            raise
