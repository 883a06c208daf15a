"""Replays a function of tensors on a GPU as one CUDA graph: one launch instead of several hundred.

On other devices, and before a graph is worth capturing, the function is simply called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

WARM_UPS = 2  # calls before a graph is captured: by then kernels are compiled, and further calls are likely

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Graph:
    """A captured call: `replay` runs it on inputs that were written into its buffers, and overwrites its outputs."""

    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    bytes: int  # memory that it holds


@final
class Replay:
    """Calls `run(*inputs)`. Inputs must have the same shapes each time; other tensors that `run` reads must keep their
    address.

    Outputs are valid until the next call, since a graph writes to its own memory.
    """

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.why_not: str | None = None  # the reason why no graph could be captured
        self._calls = 0

    def __call__(self, run: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._calls += 1
        if self.graph is None and self.why_not is None and self._calls > WARM_UPS and captures(inputs[0].device):
            try:
                self.graph = capture(run, inputs)
            except RuntimeError as error:  # `run` does what a graph cannot record, such as synchronising
                self.why_not = f"its pass cannot be captured: {str(error).partition(chr(10))[0]}"
        if self.graph is None:
            return run(*inputs)
        for held, given in zip(self.graph.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.graph.outputs


def captures(device: torch.device) -> bool:
    """Whether calls on this device can be captured as graphs."""
    return device.type == "cuda"


def capture(run: Run, inputs: Sequence[Tensor]) -> Graph:
    """Capture one call and replay it once. Raises RuntimeError if the call cannot be captured."""
    device = inputs[0].device
    before, graph = torch.cuda.memory_reserved(device), torch.cuda.CUDAGraph()
    # replays may happen outside of inference mode; other threads may allocate meanwhile
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        held = tuple(given.clone() for given in inputs)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(*held)
    return Graph(graph.replay, held, outputs, max(torch.cuda.memory_reserved(device) - before, 0))
