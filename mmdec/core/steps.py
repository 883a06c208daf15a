"""The steps of a decoding: the passes that it asks for, and the rounds that it yields.

`mmdec.core.loop.decode_steps` is a generator of such steps. `run_steps` runs the passes of one decoding;
`mmdec.core.scheduler` runs those of many together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, final

import torch

from mmdec.core.timing import Stopwatch
from mmdec.types import Draft, Needs, PrefillOutput, Round, Scores, Target

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Prefill:
    """Asks for the pass over a prompt: `target.prefill(inputs, needs)`."""

    target: Target
    device: torch.device  # the target's, because reading it from the target is slow
    inputs: Mapping[str, Any]
    needs: Needs
    prompt_tokens: int | None = None  # `SharedPassTarget.prompt_tokens`; None: not known

    def compute(self) -> PrefillOutput[Any]:
        return self.target.prefill(self.inputs, self.needs)


@dataclass(frozen=True, eq=False)
class Score:
    """Asks for the pass over a draft: `target.score(session, draft)`."""

    target: Target
    device: torch.device  # the target's, because reading it from the target is slow
    session: Any
    draft: Draft

    def compute(self) -> Scores:
        return self.target.score(self.session, self.draft)


@dataclass(frozen=True, eq=False)
class Compute(Generic[T]):
    """Asks for any other computation of a model, which no other decoding can share: `function()`."""

    device: torch.device
    function: Callable[[], T]
    runs_on_side_thread: bool = False  # whether the side thread may compute it, beside the passes of other decodings

    def compute(self) -> T:
        return self.function()


@dataclass(frozen=True, eq=False)
class PassResult(Generic[T]):
    """The answer to a request: what its `compute` returned, and what the pass cost."""

    value: T
    seconds: float  # wall-clock seconds of the pass
    cpu_seconds: float
    rows: int = 0  # number of rows that shared the pass; 0: only those that asked


PassRequest: TypeAlias = Prefill | Score | Compute[Any]
# A decoding: asks for passes, which are answered by `send`, yields rounds, which are not, and returns its result.
Steps: TypeAlias = Generator[PassRequest | Round, PassResult[Any] | None, T]


@dataclass(frozen=True, eq=False)
class Ended(Generic[T]):
    """The end of a decoding, with what it returned."""

    result: T


def next_step(steps: Steps[T], answer: PassResult[Any] | None) -> PassRequest | Round | Ended[T]:
    """Send a decoding the answer to its last step, and return its next step or its end."""
    try:
        return steps.send(answer)
    except StopIteration as end:
        return Ended(end.value)


def run_steps(steps: Steps[Any]) -> Iterator[Round]:
    """Run the passes that one decoding asks for.

    Yields:
        Its rounds.
    """
    result: PassResult[Any] | None = None
    with closing(steps):
        while not isinstance(step := next_step(steps, result), Ended):
            result = None
            if isinstance(step, Round):
                yield step
            else:
                result = time_pass(step.device, step.compute)


def watch_rounds(steps: Steps[T], on_round: Callable[[Round], None]) -> Steps[T]:
    """Relay a decoding's steps unchanged. Calls `on_round` before each round."""
    answer: Any = None
    with closing(steps):
        while not isinstance(step := next_step(steps, answer), Ended):
            if isinstance(step, Round):
                on_round(step)
            answer = yield step
    return step.result


@final
class ActiveTime:
    """Measures how long a decoding works itself, without the passes that it asks for and without waiting for its turn.

    A generator that counts the rounds of a decoding reads them in a loop:

        while (round_ := (yield from time.next_round(steps))) is not None:
            ...
            yield from time.wait(round_)

    Args:
        device: The device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stopwatch, self._seconds = Stopwatch(device), 0.0

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        self._seconds += self._stopwatch.lap()
        return self._seconds

    def wait(self, step: PassRequest | Round) -> Steps[Any]:
        """Yield a step, and return the answer; the time until then is not counted."""
        self._seconds += self._stopwatch.lap()
        answer = yield step
        self._stopwatch.lap()
        return answer

    def next_round(self, steps: Steps[Any]) -> Steps[Round | None]:
        """Relay the passes that a decoding asks for until its next round.

        Returns:
            The round; None: the decoding has ended.
        """
        answer: PassResult[Any] | None = None
        while not isinstance(step := next_step(steps, answer), (Round, Ended)):
            answer = yield from self.wait(step)
        return step if isinstance(step, Round) else None


@final
class pass_stop_iteration(AbstractContextManager[None]):  # used as a function
    """Context manager: raise a callback's StopIteration as such, although steps called it.

    Python turns a StopIteration that leaves a generator into a RuntimeError, because it would end the generator's
    iteration silently.
    """

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            raise error.__cause__


def time_pass(device: torch.device, compute: Callable[[], T]) -> PassResult[T]:
    """Compute a pass in inference mode, and time it."""
    stopwatch = Stopwatch(device)
    cpu = stopwatch.cpu_time()
    with torch.inference_mode():
        value = compute()
    return PassResult(value, stopwatch.lap(), stopwatch.cpu_time() - cpu)
