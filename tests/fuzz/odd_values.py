"""Values that no argument expects. Those in `FRESH` are made anew for each call, because a call may change them."""

from __future__ import annotations

import io
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mmdec.drafters.lookup import LookupDrafter
from mmdec.types import Needs

Make = Callable[[], Any]


def closed() -> io.BytesIO:
    file = io.BytesIO(b"RIFF")
    file.close()
    return file


class Failing(io.RawIOBase):
    """A file object whose `read` raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read(self, size: int = -1) -> bytes:
        raise self.error


class HalfDrafter:
    """Has a drafter's attributes, but only one of its methods."""

    name = "half"
    needs = Needs()

    def propose(self) -> None: ...


class Unprintable:
    """Raises an error in `repr`, in comparisons and as a condition."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


class OddPath:
    """A path-like object whose path is not a text."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 10**6, 10**9, -(10**9), 10**30, -(10**400)),
    *(0.0, 0.5, -0.5, 2.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 1j),
    *("", "2", "-1", "1e9", "nan", "True", "None", "x", "no such thing", "\0", "a\0b", "é" * 20, "\ud800", "x" * 5000),
    *(
        "../..",
        ".",
        "/",
        "/dev/null",
        "a/b",
        "a/b/c",
        "cuda:99",
        "cpu:7",
        "meta",
        "tpu",
        "lookup",
        "greedy",
    ),
    *(b"", b"bytes", Ellipsis, NotImplemented, int, str, LookupDrafter, range(3), Decimal("2"), Fraction(1, 3)),
    *(Path("."), Path("no/where"), Path("x" * 300), slice(1), print),
)
FRESH: tuple[Make, ...] = (
    list,
    dict,
    set,
    tuple,
    object,
    closed,
    Unprintable,
    HalfDrafter,
    LookupDrafter,
    SimpleNamespace,
    lambda: Failing(OSError("gone")),
    lambda: Failing(RuntimeError("broken")),
    lambda: io.StringIO("text"),
    lambda: io.BytesIO(b""),
    lambda: io.BytesIO(b"RIFF" * 99),
    lambda: OddPath(b"x"),
    lambda: OddPath(3),
    lambda: iter([1, 2]),
    lambda: [None],
    lambda: [[]],
    lambda: [1, [2, [3]]],
    lambda: ["x", 2.5, {}],
    lambda: (1, 2, 3),
    lambda: (4, 0),
    lambda: (0, 4),
    lambda: ("4", "2"),
    lambda: {"a": 1},
    lambda: {1: 2},
    lambda: {"input_ids": [[1, 2]]},
    lambda: bytearray(b"x"),
    lambda: np.zeros(0),
    lambda: np.zeros((2, 3), np.float32),
    lambda: np.full(8000, np.nan, np.float32),
    lambda: np.full(8000, 1e30, np.float32),
    lambda: np.array("x"),
    lambda: np.array([None, 1]),
    lambda: np.array(["lookup", "x"]),
    lambda: np.int64(3),
    lambda: np.float32("nan"),
    lambda: np.bool_(True),
    lambda: np.datetime64("2020-01-01"),
    lambda: torch.zeros(0),
    lambda: torch.ones(3),
    lambda: torch.tensor(5),
    lambda: torch.tensor(float("nan")),
    lambda: torch.zeros((1, 0), dtype=torch.long),
    lambda: torch.full((1, 3), 10**6),
    lambda: torch.full((2, 3), -1),
    lambda: torch.zeros((1, 2, 3), dtype=torch.long),
    lambda: torch.ones(1, 4, dtype=torch.bool),
    lambda: torch.ones(8000, dtype=torch.complex64),
    lambda: torch.ones(8000, device="meta"),
    lambda: torch.ones(8000).to_sparse(),
    lambda: torch.device("cpu"),
    lambda: torch.float32,
    lambda: torch.nn.Linear(2, 2),
)
WORDS = (  # odd arguments for the command line
    *("", "x", "-1", "0", "1", "2", "3.5", "1e9", "1000000000", "9" * 400, "nan", "inf", "-inf", "True", "None", "é"),
    *(
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "x" * 300,
        "/",
        ".",
        "..",
        "/dev/null",
        "a/b",
        "a/b/c",
    ),
    *(
        "no.wav",
        "cuda:99",
        "meta",
        "lookup",
        "--",
        "-",
        "--json",
        "a,b",
        ",",
        "16x6",
        "0x0",
        "text",
        "srt",
    ),
)
