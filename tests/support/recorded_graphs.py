"""Imitates CUDA graphs on a CPU: records a call's operations with their tensors, and replays them.

As with a CUDA graph, decisions in Python and tensors made outside stay as they were at recording; an operation that
waits for the device is refused; and each replay overwrites the outputs of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mmdec.targets.fast_pass import Graph, Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmdec.targets import fast_pass

# operations that wait for the device
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")


class Tape(TorchDispatchMode):
    """Records the operations within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        masked = name.startswith("index") and any(
            isinstance(part, Tensor) and part.dtype == torch.bool for part in tree_leaves(args[1:2])
        )
        if name in WAITS or masked:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}\nand more")
        out = func(*args, **given)
        self.calls.append((func, args, given, [part for part in tree_leaves(out) if isinstance(part, Tensor)]))
        return out

    def replay(self) -> None:
        for func, args, kwargs, held in self.calls:
            again = [part for part in tree_leaves(func(*args, **kwargs)) if isinstance(part, Tensor)]
            for old, new in zip(held, again, strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


def _refuse(tensor: Tensor) -> None:
    raise RuntimeError("operation not permitted when stream is capturing: tolist")


class Count:
    """The number of graphs made, and of replays."""

    made = replayed = 0


@contextmanager
def recorded_graphs(step: int = 16, room: int = 4) -> Iterator[Count]:
    """Within the block, use recorded graphs on the CPU. step, room: replace `fast_pass.STEP` and `fast_pass.ROOM`,
    which set the width of the key-value memory."""
    count = Count()

    def record(run: Run, inputs: Sequence[Tensor]) -> Graph:
        with torch.inference_mode(False), torch.no_grad():
            held, tape = tuple(given.clone() for given in inputs), Tape()
            with tape, pytest.MonkeyPatch.context() as patch:
                patch.setattr(Tensor, "tolist", _refuse)  # on a CPU, `tolist` is no operation that the tape sees
                outputs = run(*held)
        for part in outputs:  # a graph's outputs are undefined before the first replay
            part.fill_(torch.nan)
        count.made += 1

        def replayed() -> None:
            count.replayed += 1
            tape.replay()

        return Graph(replayed, held, outputs, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_pass, "captures", lambda device: True)
        patch.setattr(fast_pass, "capture", record)
        patch.setattr(fast_pass, "WARM_UPS", 1)
        patch.setattr(fast_pass, "STEP", step)
        patch.setattr(fast_pass, "ROOM", room)
        yield count
