"""Reads saved decoding statistics from JSON. The file is not trusted: pydantic checks types, sizes and bounds.

A malformed file raises ValueError or KeyError. `DecodingStatistics.load` turns both into InputError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmdec.decode.statistics import (
    DEEPEST,
    MOST,
    WINDOW,
    Acceptance,
    CostCurve,
    Pair,
    PairStatistics,
    drafter_curve,
    target_curve,
)
from mmdec.decode.tree import HeadAccuracy

COLUMNS = 1 << 20  # maximum tokens of a target pass that a file may name; larger numbers are refused as malformed
ROUNDS = 10**15
Name = Annotated[str, Field(max_length=4096)]
Chance = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[float, Field(ge=0, le=ROUNDS)]
Columns = Annotated[int, Field(ge=1, le=COLUMNS)]
Counts = Annotated[list[Count], Field(min_length=DEEPEST + 1, max_length=DEEPEST + 1)]
Timing = tuple[Annotated[float, Field(ge=0, le=1e6)], Columns]  # (seconds, tokens per batch row or draft's depth)
Window = tuple[int, Annotated[list[Timing], Field(min_length=1, max_length=WINDOW)]]


class Record(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class CurveRecord(Record):
    """The JSON form of a `CostCurve`: the timings of batches of up to 2 ** power rows."""

    power: Annotated[int, Field(ge=0, le=31)]
    reach: Annotated[int, Field(ge=0, le=COLUMNS)]
    timed: Annotated[int, Field(ge=0, le=ROUNDS)]
    windows: Annotated[list[Window], Field(max_length=COLUMNS.bit_length() + 1)]

    def fill(self, curve: CostCurve) -> CostCurve:
        """Put the record's timings into an empty curve. Raises ValueError if they contradict each other."""
        for bucket, timings in self.windows:
            if any((count - 1).bit_length() != bucket for _, count in timings):
                raise ValueError(f"bucket {bucket} holds counts of other buckets")
        if self.windows:
            if not self.timed or self.reach < max(count for _, timings in self.windows for _, count in timings):
                raise ValueError("`reach` and `timed` must cover the timings")
            windows = {bucket: deque(timings, maxlen=WINDOW) for bucket, timings in self.windows}
            curve.restore(windows, self.reach, self.timed)
        return curve


Curves = Annotated[list[CurveRecord], Field(max_length=32)]


class AcceptanceRecord(Record):
    """The JSON form of `Acceptance`, which counts how often drafts were accepted. Attributes have the same names."""

    prior: Annotated[list[Chance], Field(max_length=DEEPEST)]
    hits: Counts
    trials: Counts
    ending: Annotated[list[Counts], Field(min_length=4, max_length=4)]
    trees: Annotated[list[tuple[Columns, Columns, Count, Count]], Field(max_length=1024)]
    of_trees: tuple[Count, Count]
    offered: Chance
    chains_only: Annotated[int, Field(ge=-1, le=ROUNDS)]
    gap: Annotated[int, Field(ge=1, le=1 << 20)]

    def acceptance(self) -> Acceptance:
        """Return the `Acceptance` object. Raises ValueError if the counts contradict each other."""
        for rounds, hits, drafts, reached in zip(*self.ending, strict=True):
            if hits > rounds or drafts > rounds or reached > drafts:
                raise ValueError("`ending` counts more than there were rounds")
        acceptance = Acceptance(self.prior)
        for name in ("hits", "trials", "ending", "of_trees", "offered", "chains_only", "gap"):
            setattr(acceptance, name, getattr(self, name))
        acceptance.trees = {(nodes, depth): (weight, mean) for nodes, depth, weight, mean in self.trees}
        return acceptance


class AccuracyRecord(Record):
    hits: Annotated[list[Annotated[list[Count], Field(max_length=64)]], Field(min_length=1, max_length=64)]
    trials: Annotated[list[Annotated[float, Field(ge=1e-9, le=ROUNDS)]], Field(max_length=64)]


class Key(Record):
    target: Name
    device: Name


class TargetRecord(Key):
    columns: Curves


class PairRecord(Key):
    drafter: Name
    acceptance: AcceptanceRecord
    chains: Curves
    trees: Curves
    accuracy: AccuracyRecord | None


class File(Record):
    format: Literal["mmdec decoding statistics"]
    version: Literal[1]
    targets: Annotated[list[TargetRecord], Field(max_length=MOST)]
    pairs: Annotated[list[PairRecord], Field(max_length=MOST)]


def fill(targets: dict[tuple[str, str], dict[int, CostCurve]], pairs: dict[Pair, PairStatistics], raw: bytes) -> None:
    """Parse a file of statistics into two empty dictionaries.

    targets: receives (target name, device) -> log2 of the batch size -> the target's cost curve.
    pairs: receives the measurements of each pair of target and drafter.
    raw: the file's bytes.
    """
    file = File.model_validate_json(raw)
    for target in file.targets:
        targets[target.target, target.device] = _curves(target.columns, target_curve)
    for pair in file.pairs:
        chains, trees = _curves(pair.chains, drafter_curve), _curves(pair.trees, drafter_curve)
        if chains.keys() != trees.keys():
            raise ValueError("`chains` and `trees` must be of the same batches")
        heads = pair.accuracy
        pairs[Pair(pair.target, pair.device, pair.drafter)] = PairStatistics(
            targets[pair.target, pair.device],
            pair.acceptance.acceptance(),
            chains,
            trees,
            None if heads is None else HeadAccuracy.of_counts(heads.hits, heads.trials),
        )


def _curves(records: Sequence[CurveRecord], make: Callable[[], CostCurve]) -> dict[int, CostCurve]:
    return {record.power: record.fill(make()) for record in records}
