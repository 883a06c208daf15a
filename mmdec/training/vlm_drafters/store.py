"""The target's readings of samples that come again, on disk: features, and the inputs at visual columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from mmdec.training.processes import only_one
from mmdec.training.stores import StateStore
from mmdec.training.vlm_drafters.prompting import Inputs, append
from mmdec.training.vlm_drafters.teacher import Reading, Teacher
from mmdec.types import InputError

WRITERS = 1000  # runs at a time that write to one folder


class ReadingStore:
    """By a sample's name: 2 H bytes for each feature of a column, and as many for each visual token."""

    def __init__(self, folder: Path, teacher: Teacher, layers: Sequence[int], half: bool, rank: int = 0) -> None:
        """layers, half: see `Teacher.read`. Runs that write at the same time have files of their own."""
        size = teacher.config.hidden_size
        self.teacher, self.layers, self.half = teacher, tuple(layers), half
        self.locks = ExitStack()
        number = writer_number(folder, rank, self.locks)
        self.features = StateStore(folder / "features", len(layers) * size, number)  # tokens: the text's
        self.visual = StateStore(folder / "visual", size, number)  # tokens: the visual columns

    def __contains__(self, name: object) -> bool:
        return name in self.features and name in self.visual

    def get(self, name: str, answer: Sequence[int]) -> Reading:
        """Raises KeyError for a name that is not stored."""
        tokens, features = self.features.get(name)
        columns, pixel_embeds = self.visual.get(name)
        embeds = self.teacher.embed(torch.tensor(tokens, device=self.teacher.device)).float().cpu()
        visual = torch.zeros(len(tokens), dtype=torch.bool)
        visual[columns] = True
        embeds[visual] = pixel_embeds
        return Reading(len(tokens) - len(answer) + 1, list(answer), embeds, features, visual)

    def add(self, readings: Mapping[str, tuple[list[int], Reading]]) -> dict[str, Reading]:
        """Store (tokens, reading) by name. Returns the readings as `get` will give them: in half precision."""
        rounded = {}
        for name, (_, reading) in readings.items():
            embeds = reading.embeds.float().clone()
            embeds[reading.visual] = embeds[reading.visual].half().float()
            rounded[name] = replace(reading, embeds=embeds, features=reading.features.half().float())
        self.visual.add(
            {
                name: (reading.visual.nonzero()[:, 0].tolist(), reading.embeds[reading.visual])
                for name, (_, reading) in readings.items()
            }
        )
        self.features.add({name: (tokens, reading.features) for name, (tokens, reading) in readings.items()})
        return rounded

    def read(
        self, names: Sequence[str], prompts: Sequence[Inputs] | None, answers: Sequence[Sequence[int]]
    ) -> list[Reading]:
        """The readings of a batch on the CPU: kept ones, or those of a pass, which are kept. prompts: None where all
        are known."""
        if prompts is not None:
            readings = self.teacher.read(prompts, answers, self.layers, self.half)
            fresh = {}
            for name, prompt, answer, reading in zip(names, prompts, answers, readings, strict=True):
                if name not in self:
                    tokens = append(prompt, answer[:-1])["input_ids"][0].tolist()
                    fresh[name] = (tokens, reading.to(torch.device("cpu")))
            rounded = self.add(fresh)
        else:
            rounded = {}
        return [
            rounded[name] if name in rounded else self.get(name, answer)
            for name, answer in zip(names, answers, strict=True)
        ]


def writer_number(folder: Path, rank: int, locks: ExitStack) -> int:
    """The number of the files that this run may write in a folder: of `rank`, or one that no other run has.

    It is reserved as long as `locks` is open, or the process lives.
    """
    for attempt in range(WRITERS):
        number = rank + WRITERS * attempt
        try:
            locks.enter_context(only_one(folder / "writers" / str(number), "training"))
        except InputError:
            continue
        return number
    raise InputError(f"`kept` must have at most {WRITERS} runs at a time, but '{folder}' has more. Wait for them.")
