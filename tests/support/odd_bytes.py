"""Functions that damage a file's bytes, and paths that are no files or have odd names. It does not import mmdec or
torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

PLACES = ("directory", "pipe", "circle", "link", "missing", "through", "bytes", "line", "long")
FILES = ("link", "bytes", "line")  # places that hold a whole file


def put(path: Path, content: bytes) -> None:
    """Write a file in one step, unless it exists."""
    part = path.with_name(f".part-{os.getpid()}")
    part.write_bytes(content)
    with suppress(FileExistsError):
        os.link(part, path)
    part.unlink()


def _cut(draw: np.random.Generator, content: bytes) -> bytes:
    return content[: int(draw.integers(len(content) + 1))]


def _cut_early(draw: np.random.Generator, content: bytes) -> bytes:
    return content[: int(draw.integers(min(200, len(content) + 1)))]


def _flipped(draw: np.random.Generator, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(int(draw.integers(1, 40)) if data else 0):
        data[int(draw.integers(len(data)))] ^= 1 << int(draw.integers(8))
    return bytes(data)


def _new_header(draw: np.random.Generator, content: bytes) -> bytes:
    """Replace numbers among the first bytes by extreme ones."""
    data = bytearray(content)
    for _ in range(int(draw.integers(1, 4))):
        value = int(draw.choice((0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, int(draw.integers(2**32)))))
        size = int(draw.choice((1, 2, 4)))
        at = int(draw.integers(max(1, min(100, len(data)) - size)))
        order = "little" if draw.random() < 0.6 else "big"
        data[at : at + size] = (value % 256**size).to_bytes(size, order)
    return bytes(data[: len(content)])


def _hole(draw: np.random.Generator, content: bytes) -> bytes:
    start, end = sorted(int(at) for at in draw.integers(len(content) + 1, size=2))
    return content[:start] + bytes(end - start) + content[end:]


def _without_middle(draw: np.random.Generator, content: bytes) -> bytes:
    start, end = sorted(int(at) for at in draw.integers(len(content) + 1, size=2))
    return content[:start] + content[end:]


def _noise(draw: np.random.Generator, content: bytes) -> bytes:
    start, end = sorted(int(at) for at in draw.integers(len(content) + 1, size=2))
    return content[:start] + draw.bytes(end - start) + content[end:]


def _more(draw: np.random.Generator, content: bytes) -> bytes:
    return content + draw.bytes(int(draw.integers(1, 3000)))


def _twice(draw: np.random.Generator, content: bytes) -> bytes:
    return content + content[int(draw.integers(len(content) + 1)) :]


def _headless(draw: np.random.Generator, content: bytes) -> bytes:
    return content[int(draw.integers(1, 100)) :]


def _text(draw: np.random.Generator, content: bytes) -> bytes:
    return b"Bonjour, this is text.\n" * int(draw.integers(1, 200))


CHANGES = (_cut, _cut, _cut_early, _flipped, _flipped, _new_header, _new_header, _new_header, _hole, _without_middle)
CHANGES = (*CHANGES, _noise, _more, _twice, _headless, _text)


def place(folder: Path, number: int, kind: str, content: bytes) -> Path:
    """Make a path that is no file, or a file of this content with an odd name. kind: an entry of `PLACES`."""
    path = folder / f"{number}.wav"
    if kind == "directory":
        path.mkdir(exist_ok=True)
    elif kind == "pipe":
        with suppress(FileExistsError):
            os.mkfifo(path)
    elif kind == "circle":
        with suppress(FileExistsError):
            path.symlink_to(path)
    elif kind == "through":
        put(path, b"")
        path = path / "x.wav"
    elif kind == "long":
        path = folder / f"{number}{'x' * 300}.wav"
    elif kind != "missing":
        name = {"bytes": os.fsdecode(b"%d\xff\xe9.wav" % number), "line": f"{number}\n\t[b]'.wav"}.get(kind, path.name)
        target = path = folder / name
        put(target, content)
        if kind == "link":
            path = folder / f"{number}-link.wav"
            with suppress(FileExistsError):
                path.symlink_to(target)
    return path
