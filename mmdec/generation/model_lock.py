"""A read-write lock for each model: many calls decode with it at once, or one changes it for a while.

Every call of mmdec that decodes with a model reads it: `generate`, `stream`, `transcribe`, `translate_speech`,
`describe`, a `Chat`, `model.generate(custom_generate=mmdec.speculate(...))`. Whoever changes a model that others may
use (its attention implementation, hooks, device, dtype, train or eval) writes, and undoes a change for a while before
leaving:

    with model_lock(model).write():
        model.to("cuda")
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TypeVar, final
from weakref import WeakKeyDictionary

from torch import nn

from mmdec.types import InputError

T = TypeVar("T")


@final
class Hold:
    """One reader's or writer's hold on a lock, and the thread that it belongs to."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()

    def move(self) -> None:
        """Give the hold to the calling thread: a generator may be continued in another thread."""
        self.thread = threading.current_thread()


@final
class ModelLock:
    """A read-write lock. New readers wait while a writer waits.

    A thread that reads or writes may read again. A thread that writes may write again. A thread that reads may not
    write: it would wait for itself.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # several locks are always taken in this order, so that no two calls block each other
        # Reentrant: a generator may be collected, and leave, while its thread is inside one of the methods below.
        self._changed = threading.Condition(threading.RLock())
        self._readers: set[Hold] = set()
        self._writers: set[Hold] = set()  # of one thread
        self.waiting = 0  # how many ask to write; for others to read, not to set

    @contextmanager
    def read(self) -> Generator[Hold]:
        """Shared with other readers. Any thread may release it."""
        with self._changed:
            if not self._held(self._readers | self._writers):
                self._changed.wait_for(lambda: not self._writers and not self.waiting)
            hold = Hold()
            self._readers.add(hold)
        try:
            yield hold
        finally:
            with self._changed:
                self._readers.discard(hold)
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Generator[Hold]:
        """Exclusive. Raises InputError if this thread is already reading the model."""
        with self._changed:
            if not self._held(self._writers):
                if self._held(self._readers):
                    raise InputError(
                        "`model` must not be decoding in the thread that changes it, but is. Finish or close its "
                        "stream first."
                    )
                self.waiting += 1
                try:
                    self._changed.wait_for(lambda: not self._writers and not self._readers)
                finally:
                    self.waiting -= 1
                    self._changed.notify_all()  # where the wait was broken off
            hold = Hold()
            self._writers.add(hold)
        try:
            yield hold
        finally:
            with self._changed:
                self._writers.discard(hold)
                self._changed.notify_all()

    @staticmethod
    def _held(holds: set[Hold]) -> bool:
        current = threading.current_thread()
        return any(hold.thread is current for hold in list(holds))  # a copy: one may leave meanwhile, see above


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_numbers = count()
_making = threading.Lock()


def model_lock(model: nn.Module) -> ModelLock:
    """The model's lock. Every call returns the same object, as long as the model exists."""
    with _making:
        if model not in _locks:
            _locks[model] = ModelLock(next(_numbers))
        return _locks[model]


@contextmanager
def reading(*models: nn.Module, writing: Sequence[nn.Module] = ()) -> Generator[list[Hold]]:
    """Hold several models: `models` for reading, `writing` for writing. A model named in both is only written. Locks
    are taken in one fixed order, so that two calls with the same models cannot block each other."""
    locks = {model_lock(model): model in writing for model in (*models, *writing)}
    with ExitStack() as stack:
        order = sorted(locks, key=lambda lock: lock.number)
        yield [stack.enter_context(lock.write() if locks[lock] else lock.read()) for lock in order]


def read_while(models: Sequence[nn.Module], items: Iterator[T]) -> Iterator[T]:
    """The items of a generator that uses the models: whoever asks for the next one is the reader. It reads no more once
    the generator is at its end, closed or collected, in whichever thread."""
    with reading(*models) as holds:
        for item in items:
            yield item
            for hold in holds:
                hold.move()
