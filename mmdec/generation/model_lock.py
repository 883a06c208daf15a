"""Who may use a model at once: many who leave it as it is, or one who changes it for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final
from weakref import WeakKeyDictionary

from torch import nn


@final
class Turns:
    """One model's. Whoever waits to be alone comes before those who ask for a share later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = self._waiting = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Together with others that share."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With nobody else."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._alone and not self._sharing)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


_all: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_asking = threading.Lock()


def turns(model: nn.Module) -> Turns:
    """The same for every caller, for as long as the model lives."""
    with _asking:
        return _all.setdefault(model, Turns())
