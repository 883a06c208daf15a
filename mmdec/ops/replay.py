"""A function of tensors, replayed on a GPU as one CUDA graph: one launch instead of several hundred.

Elsewhere, and until a graph is worth its making, the function is simply called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

WARM_UPS = 2  # calls before a graph is made: who asks twice will ask again, and kernels are compiled by then

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Graph:
    """A call that was captured: its inputs are written, `replay` runs it again, its outputs are overwritten."""

    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    bytes: int  # that it holds


@final
class Replay:
    """Calls `run(*inputs)`, whose inputs have the same shapes each time. What else `run` reads must stay where it is.

    Outputs hold until the next call: a graph writes to its own memory.
    """

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.why_not: str | None = None  # the reason that no graph could be made
        self._calls = 0

    def __call__(self, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._calls += 1
        if self.graph is None and self.why_not is None and self._calls > WARM_UPS and captures(inputs[0].device):
            try:
                self.graph = capture(run, inputs)
            except RuntimeError as error:  # it does what a graph cannot hold, such as waiting for the device
                self.why_not = f"its pass cannot be captured: {str(error).partition(chr(10))[0]}"
        if self.graph is None:
            return run(*inputs)
        for held, given in zip(self.graph.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.graph.outputs


def captures(device: torch.device) -> bool:
    """Whether calls on this device can be captured."""
    return device.type == "cuda"


def capture(run: Run, inputs: Sequence[Tensor]) -> Graph:
    """Captures one call, which runs with the graph's first replay. Raises RuntimeError."""
    device = inputs[0].device
    before, graph = torch.cuda.memory_reserved(device), torch.cuda.CUDAGraph()
    # Whoever replays it may do so outside of inference mode; another thread may allocate meanwhile.
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        held = tuple(given.clone() for given in inputs)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(*held)
    return Graph(graph.replay, held, outputs, max(torch.cuda.memory_reserved(device) - before, 0))
