"""One read-write lock per model: many calls decode with a model at once, or one call changes it.

Every call of mmdec that decodes with a model takes the read lock: `generate`, `stream`, `transcribe`,
`translate_speech`, `describe`, a `Chat`, `model.generate(custom_generate=mmdec.speculate(...))`. Code that changes a
model that other threads may use (attention implementation, hooks, device, dtype, train or eval mode) takes the write
lock, and undoes a temporary change before it releases the lock:

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

from mmdec.errors import InputError

T = TypeVar("T")


@final
class Hold:
    """One acquisition of a model's lock, for reading or writing. It knows the thread that holds the lock."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()

    def move(self) -> None:
        """Make the calling thread the holder of the lock.

        A generator may be started in one thread and continued in another.
        """
        self.thread = threading.current_thread()


@final
class ModelLock:
    """A read-write lock of one model: many threads may read at once, or one may write.

    New readers wait while a writer waits. A thread that holds the lock may take it again for reading; a thread that
    writes may also take it for writing. A thread that reads may not write, because it would wait for itself.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # several locks are always taken in the order of their numbers, which prevents deadlocks
        # Reentrant, because the garbage collector may close a generator while this thread is in one of the methods
        # below. The generator then releases its lock.
        self._changed = threading.Condition(threading.RLock())
        self._readers: set[Hold] = set()
        self._writers: set[Hold] = set()  # the holders that write; all are in the same thread
        self.waiting = 0  # number of threads that wait to write

    @contextmanager
    def read(self) -> Generator[Hold]:
        """Hold the lock for reading, together with other readers.

        Any thread may leave the context.

        Yields:
            A `Hold`.
        """
        with self._changed:
            if not self._is_holder(self._readers | self._writers):
                self._changed.wait_for(lambda: not self._writers and not self.waiting)
            hold = Hold()
            self._readers.add(hold)
        try:
            yield hold
        finally:
            self.release(hold)

    def try_read(self) -> Hold | None:
        """Take the lock for reading, if no other thread writes or waits to write.

        Returns:
            A `Hold`, to give back by `release`; None if the caller would have to wait.
        """
        with self._changed:
            if self._writers or self.waiting:
                return None
            hold = Hold()
            self._readers.add(hold)
            return hold

    def release(self, hold: Hold) -> None:
        """Give back a lock for reading."""
        with self._changed:
            self._readers.discard(hold)
            self._changed.notify_all()

    @contextmanager
    def write(self) -> Generator[Hold]:
        """Hold the lock for writing, without other readers or writers.

        Yields:
            A `Hold`.

        Raises:
            InputError: If this thread is reading the model.
        """
        with self._changed:
            if not self._is_holder(self._writers):
                if self._is_holder(self._readers):
                    raise InputError(
                        "`model` must not be changed while the same thread decodes with it. Finish or close its stream "
                        "first."
                    )
                self.waiting += 1
                try:
                    self._changed.wait_for(lambda: not self._writers and not self._readers)
                finally:
                    self.waiting -= 1
                    self._changed.notify_all()  # wake waiting readers, also if an exception ended this wait
            hold = Hold()
            self._writers.add(hold)
        try:
            yield hold
        finally:
            with self._changed:
                self._writers.discard(hold)
                self._changed.notify_all()

    @staticmethod
    def _is_holder(holds: set[Hold]) -> bool:
        current = threading.current_thread()
        # iterate over a copy, because the garbage collector may close a generator meanwhile, which changes the set
        return any(hold.thread is current for hold in list(holds))


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_numbers = count()
_making = threading.Lock()


def model_lock(model: nn.Module) -> ModelLock:
    """Return the read-write lock of a model.

    Every call with the same model returns the same object.

    Args:
        model: Any module, for example the model that you pass to `generate`.

    Returns:
        A `ModelLock`, with context managers `read()` and `write()`.
    """
    with _making:
        if model not in _locks:
            _locks[model] = ModelLock(next(_numbers))
        return _locks[model]


@contextmanager
def reading(*models: nn.Module, writing: Sequence[nn.Module] = ()) -> Generator[list[Hold]]:
    """Hold the locks of several models, all taken in one fixed order so that two calls cannot deadlock.

    Args:
        models: Models to lock for reading.
        writing: Models to lock for writing; a model in both is locked for writing only.

    Yields:
        A list of `Hold`, one for each lock.
    """
    locks = {model_lock(model): model in writing for model in (*models, *writing)}
    with ExitStack() as stack:
        order = sorted(locks, key=lambda lock: lock.number)
        yield [stack.enter_context(lock.write() if locks[lock] else lock.read()) for lock in order]


def try_reading(*models: nn.Module) -> ExitStack | None:
    """Take the locks of several models for reading, if that needs no waiting.

    So a thread that decodes for many callers never waits for one model while it holds another one's lock.

    Returns:
        A context manager that holds the locks until it is closed; None if one of the models is being changed, or waits
        to be.
    """
    with ExitStack() as stack:
        for lock in {model_lock(model) for model in models}:
            hold = lock.try_read()
            if hold is None:
                return None
            stack.callback(lock.release, hold)
        return stack.pop_all()


def read_while(models: Sequence[nn.Module], items: Iterator[T]) -> Iterator[T]:
    """Hold the locks of models for reading while a generator uses them.

    The thread that asks for the next item counts as the reader. The locks are released when the generator is exhausted,
    closed or garbage-collected, in any thread.

    Yields:
        The generator's items.
    """
    with reading(*models) as holds:
        for item in items:
            yield item
            for hold in holds:
                hold.move()
