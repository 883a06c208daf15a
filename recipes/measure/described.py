"""Writes ten questions for `mmdec bench drafters`: descriptions of held-out pictures of drawn scenes.

python recipes/measure/described.py FOLDER [--count 10]

FOLDER holds drawn scenes. Its test.json is read, and described.json is written beside it: the first question of each
picture, which asks for a description, in their order. A picture is left out if one of the last five has its kind (menu,
room, street, ...), so that ten questions cover most kinds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmdec.checks.files import write_atomically
from mmdec.errors import exit_on_error

KINDS_APART = 5  # among this many pictures in a row, no two have one kind


def described(pictures: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Choose pictures of different kinds, each with its first question and the answer only.

    Args:
        pictures: Rows of test.json.
        count: The most rows to choose.
    """
    chosen: list[dict[str, Any]] = []
    for picture in pictures:
        recent = [row["graph"]["kind"] for row in chosen[-KINDS_APART:]]
        if len(chosen) == count:
            break
        if picture["graph"]["kind"] not in recent:
            chosen.append({**picture, "conversations": picture["conversations"][:2], "turns": picture["turns"][:1]})
    return chosen


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the drawn scenes")
    parser.add_argument("--count", type=int, default=10, help="number of questions")
    given = parser.parse_args(arguments)
    pictures = json.loads((given.folder / "test.json").read_text(encoding="utf-8"))
    write_atomically(given.folder / "described.json", json.dumps(described(pictures, given.count)).encode())


if __name__ == "__main__":
    with exit_on_error():
        main()
