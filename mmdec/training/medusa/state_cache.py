"""A model's decoder states for windows that come again: heads without a block need nothing else, and no sound.

Each process appends to a file of its own; what all have written is read through memory maps. States are in half
precision, and whoever trains on them rounds fresh ones alike: a run that was killed goes on with the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
class KeptStates:
    """By name: a text's tokens (n,), EOS included, and the states (n, H) that each of them was told from."""

    def __init__(self, folder: Path, width: int, rank: int = 0) -> None:
        """width: H. Raises nothing for files cut off: what is whole in them counts."""
        folder.mkdir(parents=True, exist_ok=True)
        self.width, self.file, self.index = width, folder / f"{rank}.f16", folder / f"{rank}.jsonl"
        self.known: dict[str, tuple[Path, int, list[int]]] = {}
        for index in sorted(folder.glob("*.jsonl")):
            data = index.with_suffix(".f16")
            size = data.stat().st_size if data.is_file() else 0
            for line in index.read_text(encoding="utf-8").splitlines():
                try:
                    name, begin, tokens = json.loads(line)
                except ValueError:  # a line that was being written
                    continue
                if begin + 2 * width * len(tokens) <= size:
                    self.known[name] = data, begin, tokens
        if self.index.is_file() and not self.index.read_bytes().endswith(b"\n"):
            with open(self.index, "a", encoding="utf-8") as file:
                file.write("\n")

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def get(self, name: str) -> tuple[list[int], Tensor]:
        """Tokens and states, float32."""
        path, begin, tokens = self.known[name]
        count = len(tokens) * self.width
        if not count:
            return tokens, torch.zeros(0, self.width)
        found = np.memmap(path, np.float16, "r", begin, (count,))
        return tokens, torch.from_numpy(found.astype(np.float32)).view(-1, self.width)

    def add(self, found: dict[str, tuple[list[int], Tensor]]) -> None:
        """Keep tokens and states (n, H) of these windows: the states first, so that a name stands for whole ones."""
        lines = []
        with open(self.file, "ab") as file:
            for name, (tokens, states) in found.items():
                begin = file.tell()
                file.write(states.half().cpu().numpy().tobytes())
                self.known[name] = self.file, begin, list(tokens)
                lines.append(json.dumps([name, begin, list(tokens)]) + "\n")
        with open(self.index, "a", encoding="utf-8") as file:
            file.writelines(lines)
