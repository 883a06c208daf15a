"""A prepared call of `model.generate`: the steps of its decoding, and its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor
from transformers import GenerationConfig

from mmdec.core.sampling import Sequences
from mmdec.core.steps import Steps
from mmdec.generation.hf_bridge import OutputRecorder, setting
from mmdec.targets.hf_target import GenerateOutput, HfTarget


class DecodingRun(ABC):
    """A checked and prepared call. `run_steps` or a scheduler runs its steps."""

    # whether `model.generate` must get the media of a prompt, too, which else go to the target directly
    needs_all_inputs: ClassVar[bool] = False
    steps: Steps[Any]  # the decoding, not yet started
    rows: int  # number of rows of the batch

    @property
    @abstractmethod
    def sequences(self) -> Tensor:
        """The prompts with their new tokens (B, L); complete once all rounds were iterated."""

    @abstractmethod
    def output(self, config: GenerationConfig) -> Tensor | GenerateOutput:
        """Return what `model.generate` returns: sequences (B, L), or an output object if `config` asks for one.

        Call it once all rounds were iterated.
        """


@final
@dataclass(frozen=True)
class SpeculativeRun(DecodingRun):
    """Decodes with mmdec's loop."""

    steps: Steps[Any]
    rows: int
    state: Sequences  # the rows' prompts, new tokens and stopping criteria
    pad: int  # id of the token that pads shorter rows
    target: HfTarget
    inputs: Mapping[str, Any]  # the model's inputs by name
    results: OutputRecorder

    @property
    def sequences(self) -> Tensor:
        return self.state.padded_ids(self.pad)

    def output(self, config: GenerationConfig) -> Tensor | GenerateOutput:
        sequences = self.sequences
        if not setting(config, "return_dict_in_generate"):
            return sequences
        lengths = [len(tokens) for tokens in self.state.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)
