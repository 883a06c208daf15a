"""A batch of questions with the target's answers, and the samples that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from mmdec.training.vlm_drafters.prompting import Inputs, Prompting
from mmdec.training.vlm_drafters.samples import Sample


@dataclass(frozen=True)
class DraftBatch:
    """B questions with their answers. rows: their names. prompts: None where the target's features are stored."""

    rows: list[str]
    answers: list[list[int]]
    prompts: list[Inputs] | None

    def to(self, device: torch.device) -> DraftBatch:
        """As it is: the teacher places what it reads."""
        return self


class QuestionDataset(Dataset[tuple[Sample, Inputs | None]]):
    """Samples with what the target reads of them; without it, if their features are in `stored` by name."""

    def __init__(
        self,
        samples: Sequence[Sample],
        prompting: Prompting,
        answers: Callable[[Sample], list[int]],
        stored: Container[str],
    ) -> None:
        self.samples, self.prompting, self.answers, self.stored = samples, prompting, answers, stored

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Sample, Inputs | None]:
        sample = self.samples[number]
        return sample, None if sample.name in self.stored else self.prompting(sample)

    def collate(self, items: Sequence[tuple[Sample, Inputs | None]]) -> DraftBatch:
        """A whole batch is read again where features of one sample are missing."""
        if all(inputs is None for _, inputs in items):
            prompts = None
        else:
            prompts = [self.prompting(sample) if inputs is None else inputs for sample, inputs in items]
        return DraftBatch([sample.name for sample, _ in items], [self.answers(sample) for sample, _ in items], prompts)
