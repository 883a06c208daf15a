"""Stores on disk for results that are used again: token ids, decoder states, and encoder states of recordings.

Each process appends to files of its own, such as `{rank}.jsonl`, and reads the files of all processes. A process may be
killed at any moment: an incomplete last line is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from torch import Tensor


class JsonLines:
    """Reads the JSON lines of all .jsonl files in a folder. Appends lines to the file of process `rank`."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f"{rank}.jsonl"

    def read(self) -> Iterator[tuple[Path, Any]]:
        """Yield (file, JSON value) for each complete line of all files."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    value = json.loads(line)
                except ValueError:  # the line is incomplete, because a process was killed while it wrote
                    continue
                yield path, value
        if self.file.is_file() and not self.file.read_bytes().endswith(b"\n"):
            self.append("")  # a line break, which ends a line that a killed process may have left incomplete

    def append(self, *lines: str) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


@final
class TokenStore:
    """Stores lists of token ids by name, in memory and on disk. State: `tokens`, name -> list.

    Args:
        folder: Where process number `rank` writes its file; None: keep the lists in memory only.
    """

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self.lines = None if folder is None else JsonLines(folder, rank)
        self.tokens: dict[str, list[int]] = {}
        for _, (name, tokens) in () if self.lines is None else self.lines.read():
            self.tokens[name] = tokens

    def get(self, name: str) -> list[int] | None:
        return self.tokens.get(name)

    def add(self, tokens: Mapping[str, list[int]]) -> None:
        """Store lists of token ids by name, in memory and immediately on disk."""
        self.tokens |= tokens
        if self.lines is not None and tokens:
            self.lines.append(*(json.dumps([name, ids]) for name, ids in tokens.items()))


Entry = TypeVar("Entry", int, list[int])


class _Rows(Generic[Entry]):
    """Stores matrices (n, W) by name in half precision, in `{rank}.f16`, and reads them through memory maps.

    With each name an entry is stored: the number n, or a list of n token ids. Training must also round newly computed
    rows to half precision: then a resumed training, which reads stored rows, computes the same numbers.

    Args:
        width: Number of columns, W.
        rank: Number of this process, which writes its own files. A matrix whose rows are incomplete, because the file
            was cut off, is ignored.
    """

    def __init__(self, folder: Path, width: int, rank: int = 0) -> None:
        self.lines = JsonLines(folder, rank)
        self.width, self.file = width, folder / f"{rank}.f16"
        self.index: dict[str, tuple[Path, int, Entry]] = {}  # name -> file, offset in bytes of the first row, entry
        sizes: dict[Path, int] = {}
        for path, (name, begin, entry) in self.lines.read():
            data = path.with_suffix(".f16")
            if data not in sizes:
                sizes[data] = data.stat().st_size if data.is_file() else 0
            if begin + 2 * width * _count(entry) <= sizes[data]:
                self.index[name] = data, begin, entry

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def _rows(self, name: str) -> Tensor:
        """Read the matrix (n, W) of a name, in float32.

        Raises:
            KeyError: If the name is unknown.
        """
        path, begin, entry = self.index[name]
        shape = _count(entry), self.width
        if not shape[0]:  # no rows: a memory map cannot be empty
            return torch.zeros(shape)
        return torch.from_numpy(np.memmap(path, np.float16, "r", begin, shape).astype(np.float32))

    def _add(self, values: Iterable[tuple[str, Entry, Tensor]]) -> None:
        """Store (name, entry, matrix).

        The names are written last, so that a stored name always has its whole matrix.
        """
        lines = []
        with open(self.file, "ab") as file:
            for name, entry, rows in values:
                begin = file.tell()
                file.write(rows.half().cpu().numpy().tobytes())
                self.index[name] = self.file, begin, entry
                lines.append(json.dumps([name, begin, entry]))
        self.lines.append(*lines)


def _count(entry: int | list[int]) -> int:
    return entry if isinstance(entry, int) else len(entry)


@final
class HiddenStateStore(_Rows[list[int]]):
    """Stores texts by name: n token ids, and the decoder states (n, H) that predict these tokens."""

    def names(self) -> Iterable[str]:
        return self.index.keys()

    def get(self, name: str) -> tuple[list[int], Tensor]:
        """Return the n token ids of a text and their states (n, H) in float32.

        Raises:
            KeyError: For an unknown name.
        """
        return self.index[name][2], self._rows(name)

    def add(self, texts: Mapping[str, tuple[list[int], Tensor]]) -> None:
        """Store texts by name: n token ids and their states (n, H)."""
        self._add((name, list(tokens), states) for name, (tokens, states) in texts.items())


@final
class FrameStore(_Rows[int]):
    """Stores the encoder states (n, D) of recordings by name."""

    def length(self, name: str) -> int:
        return self.index[name][2]

    def get(self, name: str) -> Tensor:
        """Return the states (n, D) of a recording in float32.

        Raises:
            KeyError: For an unknown name.
        """
        return self._rows(name)

    def add(self, frames: Mapping[str, Tensor]) -> None:
        """Store the states (n, D) of recordings by name; n must be at least 1."""
        self._add((name, len(rows), rows) for name, rows in frames.items())


@final
class EncodedWindows:
    """Stores windows of sound by name: the prompt's token ids, the text's, and the encoder's states (S, H).

    Args:
        width: Number of channels, H.
        rank: Number of this process, which writes its own files.
    """

    def __init__(self, folder: Path, width: int, rank: int = 0) -> None:
        self.states = FrameStore(folder / "states", width, rank)
        self.prompts, self.texts = TokenStore(folder / "prompts", rank), TokenStore(folder / "texts", rank)

    def __contains__(self, name: object) -> bool:
        return name in self.states and name in self.prompts.tokens and name in self.texts.tokens

    def get(self, name: str) -> tuple[list[int], list[int], Tensor]:
        """Return a window's prompt, text and states (S, H) in float32.

        Raises:
            KeyError: For an unknown name.
        """
        return self.prompts.tokens[name], self.texts.tokens[name], self.states.get(name)

    def add(
        self, names: Sequence[str], prompts: Sequence[list[int]], texts: Sequence[list[int]], states: Tensor
    ) -> None:
        """Store B windows.

        Args:
            states: (B, S, H).
        """
        fresh = [row for row, name in enumerate(names) if name not in self]
        self.prompts.add({names[row]: list(prompts[row]) for row in fresh})
        self.texts.add({names[row]: list(texts[row]) for row in fresh})
        self.states.add({names[row]: states[row] for row in fresh})
