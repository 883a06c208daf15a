"""A request as the server decodes it: its steps, and the events for the handler that waits. Does not depend on HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, final

from torch import nn

from mmdec.core.steps import Steps
from mmdec.serving.scheduler_thread import Decoding, Priority


class Engine(Protocol):
    """Makes the jobs of one task with one model."""

    @property
    def task(self) -> str: ...


@final
class Job:
    """One request: how it is decoded, and a queue of events for the handler that waits.

    Must be made in the handler's event loop.

    Args:
        engine: Of the model that decodes it.
        steps: Makes the steps of the decoding, which return the result. Whatever they do runs in the scheduler's
            thread.
        models: Models whose locks are held while it runs.
        tokens: Tokens that its cache may come to hold.
        priority: When it starts.
        seconds: Duration of the audio, for the metrics.
    """

    def __init__(
        self,
        engine: Engine,
        steps: Callable[[Job], Steps[Any]],
        models: Sequence[nn.Module] = (),
        tokens: int = 0,
        priority: Priority = Priority.CHAT,
        seconds: float = 0.0,
    ) -> None:
        self.engine, self.steps, self.models, self.tokens = engine, steps, models, tokens
        self.priority, self.seconds = priority, seconds
        self.streams = False  # whether the client gets text while the job is decoded
        self.decoding: Decoding | None = None  # once it was submitted
        self.began = time.monotonic()
        # any number of ("text", piece of text or `StreamUpdate`), then one ("result", the result) or ("error", an
        # exception)
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    @property
    def is_cancelled(self) -> bool:
        """Whether its client has gone."""
        return self.decoding is not None and self.decoding.is_cancelled

    def put_event(self, kind: str, value: Any) -> None:
        """Put an event into the queue of the handler.

        Args:
            kind: "text", "result" or "error". Any thread may call this.
        """
        with suppress(RuntimeError):  # the event loop is already closed: the server was killed
            self._loop.call_soon_threadsafe(self.events.put_nowait, (kind, value))
