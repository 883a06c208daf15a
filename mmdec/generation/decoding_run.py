"""A prepared call of `model.generate`, which decodes when it is iterated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor
from transformers import GenerationConfig

from mmdec.core.sampling import Sequences
from mmdec.core.steps import Steps, run_alone
from mmdec.generation.hf_bridge import OutputRecorder, setting
from mmdec.targets.hf_target import GenerateOutput, HfTarget
from mmdec.types import Round


class DecodingRun(ABC):
    """A checked and prepared call. `decode` runs it; a scheduler runs its `steps` instead."""

    # whether `model.generate` must get the media of a prompt, too, which else go to the target directly
    needs_all_inputs: ClassVar[bool] = False

    @property
    @abstractmethod
    def steps(self) -> Steps[Any]:
        """The steps of decoding, always the same generator, which runs once."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows of the batch."""

    @property
    @abstractmethod
    def sequences(self) -> Tensor:
        """The prompts with their new tokens (B, L); complete once all rounds were iterated."""

    @abstractmethod
    def output(self, config: GenerationConfig) -> Tensor | GenerateOutput:
        """Return what `model.generate` returns: sequences (B, L), or an output object if `config` asks for one.

        Call it once all rounds were iterated.
        """

    def decode(self) -> Iterator[Round]:
        """Decode, and yield each round."""
        return run_alone(self.steps)


@final
@dataclass(frozen=True)
class SpeculativeRun(DecodingRun):
    """Decodes with mmdec's loop."""

    text: Sequences  # the rows' prompts, new tokens and stopping criteria
    loop: Steps[Any]  # mmdec's loop, not yet started
    pad: int  # id of the token that pads shorter rows
    target: HfTarget
    inputs: Mapping[str, Any]  # the model's inputs by name
    results: OutputRecorder

    @property
    def steps(self) -> Steps[Any]:
        return self.loop

    @property
    def rows(self) -> int:
        return len(self.text.tokens)

    @property
    def sequences(self) -> Tensor:
        return self.text.padded_ids(self.pad)

    def output(self, config: GenerationConfig) -> Tensor | GenerateOutput:
        sequences = self.sequences
        if not setting(config, "return_dict_in_generate"):
            return sequences
        lengths = [len(tokens) for tokens in self.text.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)
