"""`DecodingStatistics`: what a run measures and later runs use: times of passes, acceptance of drafts, accuracy of
heads.

The object is passed in: runs that share it use each other's measurements; runs with different objects are independent.
It belongs to no model and no drafter. Threads may share it: take `lock` to read or write its contents. A saved file
carries the measurements to a new process.

Keys are the names of weights (`Target.name`, `Drafter.name`) and the device, never memory addresses, which a later
model may reuse. At most `MOST` pairs are kept; the least recently used are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, final

from mmdec.checks.files import write_whole
from mmdec.decode.acceptance import Acceptance
from mmdec.decode.cost_model import CostCurve
from mmdec.decode.statistics_json import (
    FORMAT,
    LARGEST,
    acceptance_from,
    acceptance_to,
    accuracy_from,
    accuracy_to,
    check_header,
    curves_from,
    curves_to,
    entries,
    text,
)
from mmdec.decode.tree_shape import HeadAccuracy
from mmdec.types import InputError, Prior

ENOUGH = 3  # timings before a bucket of the target's curve is used
MOST = 256  # pairs of target and drafter at most


@dataclass(frozen=True)
class Pair:
    """The key of measurements: a target on a device, and a drafter, by name."""

    target: str
    device: str
    drafter: str


@dataclass
class PairStatistics:
    """Measurements of one pair. Times are kept separately for batch sizes up to 1, 2, 4, ... rows (`power` is the
    log2)."""

    target: dict[int, CostCurve]  # power -> seconds by columns, shared by all drafters of the target
    acceptance: Acceptance
    chains: dict[int, CostCurve] = field(default_factory=lambda: {})  # power -> the drafter's seconds by depth
    trees: dict[int, CostCurve] = field(default_factory=lambda: {})
    accuracy: HeadAccuracy | None = None  # only for drafters with `Needs.prior`

    def costs(self, power: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Cost curves of the target, of the drafter's chains and of its trees, for batches of up to 2 ** power rows."""
        if power not in self.target:
            self.target[power] = target_curve()
        if power not in self.chains:
            self.chains[power], self.trees[power] = drafter_curve(), drafter_curve()
        return self.target[power], self.chains[power], self.trees[power]


def target_curve() -> CostCurve:
    """An empty cost curve for a target: seconds by columns."""
    return CostCurve(0.5, False, ENOUGH)


def drafter_curve() -> CostCurve:
    """An empty cost curve for a drafter: seconds by depth."""
    return CostCurve(1.0, True, 1)


@final
class DecodingStatistics:
    """Measurements of runs: seconds of passes and acceptance of drafts, from which later runs choose their drafts.

    Pass the same object to several calls of `generate`, `stream`, `speculate`, `transcribe` or `describe`. Its times
    hold for one machine only: do not use a saved file on another.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._targets: dict[tuple[str, str], dict[int, CostCurve]] = {}  # target, device -> power -> curve
        self._pairs: dict[Pair, PairStatistics] = {}  # in order of use, the least recent first

    def of(self, pair: Pair, prior: Sequence[float] = ()) -> PairStatistics:
        """The measurements of a pair, created if there are none.

        pair: target, device and drafter.
        prior: acceptance chances in [0, 1] of a chain's nodes 1, 2, ..., used for a new pair. Default (): unknown.
        """
        with self.lock:
            statistics = self._pairs.pop(pair, None)
            if statistics is None:
                target = self._targets.setdefault((pair.target, pair.device), {})
                statistics = PairStatistics(target, Acceptance(prior))
            self._pairs[pair] = statistics
            while len(self._pairs) > MOST:
                self._drop(next(iter(self._pairs)))
            return statistics

    def accuracy(self, pair: Pair, prior: Prior) -> HeadAccuracy:
        """How often each rank of the drafter's proposals was right; a new pair starts from `prior`."""
        with self.lock:
            statistics = self.of(pair, prior.chain)
            accuracy = statistics.accuracy
            if accuracy is None or (accuracy.depth, accuracy.width) != (len(prior.ranks), len(prior.ranks[0])):
                accuracy = statistics.accuracy = HeadAccuracy(prior.ranks)
            return accuracy

    def clear(self) -> None:
        """Remove all measurements. Runs in progress continue with their own."""
        with self.lock:
            self._pairs.clear()
            self._targets.clear()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the measurements to a JSON file.

        Runs may continue meanwhile. If writing fails, an existing file stays as it was.

        path: the file. Returns: the path.
        Raises: OSError if the file cannot be written; InputError if `path` is something other than a file.
        """
        return write_whole(path, f"{json.dumps(self._content(), allow_nan=False)}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DecodingStatistics:
        """Read a file that `save` wrote.

        path: the file. Returns: the measurements.
        Raises: InputError if the file is missing, too large or malformed.
        """
        source = Path(path)
        if not source.is_file():
            raise InputError(f"`path` must be a file that `save` wrote, but '{source}' is none. Begin without it.")
        with open(source, "rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise InputError(f"`path` must hold at most {LARGEST} bytes, but '{source}' holds more. Begin without it.")
        try:
            return cls._read(json.loads(raw))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InputError(
                f"`path` must hold decoding statistics of this version, but '{source}' does not "
                f"({type(error).__name__}: {error}). Begin without it."
            ) from error

    def _drop(self, pair: Pair) -> None:
        del self._pairs[pair]
        if not any((other.target, other.device) == (pair.target, pair.device) for other in self._pairs):
            self._targets.pop((pair.target, pair.device), None)

    def _content(self) -> dict[str, Any]:
        with self.lock:
            targets = [
                {"target": target, "device": device, "columns": curves_to(curves)}
                for (target, device), curves in self._targets.items()
            ]
            pairs = [
                {
                    "target": pair.target,
                    "device": pair.device,
                    "drafter": pair.drafter,
                    "acceptance": acceptance_to(statistics.acceptance),
                    "chains": curves_to(statistics.chains),
                    "trees": curves_to(statistics.trees),
                    "accuracy": None if statistics.accuracy is None else accuracy_to(statistics.accuracy),
                }
                for pair, statistics in self._pairs.items()
            ]
        return {**FORMAT, "targets": targets, "pairs": pairs}

    @classmethod
    def _read(cls, content: Any) -> DecodingStatistics:
        check_header(content)
        statistics = cls()
        for item in entries(content["targets"], MOST):
            statistics._targets[text(item["target"]), text(item["device"])] = curves_from(item["columns"], target_curve)
        for item in entries(content["pairs"], MOST):
            pair = Pair(text(item["target"]), text(item["device"]), text(item["drafter"]))
            statistics._pairs[pair] = PairStatistics(
                statistics._targets[pair.target, pair.device],
                acceptance_from(item["acceptance"]),
                curves_from(item["chains"], drafter_curve),
                curves_from(item["trees"], drafter_curve),
                None if item["accuracy"] is None else accuracy_from(item["accuracy"]),
            )
            if statistics._pairs[pair].chains.keys() != statistics._pairs[pair].trees.keys():
                raise ValueError("`chains` and `trees` must be of the same batches")
        return statistics
