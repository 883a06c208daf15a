"""Which target takes a model of transformers: one line for each target, asked in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmdec.targets.families import known_families
from mmdec.targets.text import TextTarget
from mmdec.targets.vlm import VlmTarget
from mmdec.targets.whisper import WhisperTarget
from mmdec.types import InputError, Target

Output = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput
TARGETS: tuple[type[WhisperTarget] | type[VlmTarget] | type[TextTarget], ...] = (WhisperTarget, VlmTarget, TextTarget)


class HfTarget(Target, Protocol):
    """A target for a model of transformers, and what is special to this model in `generate`."""

    one_run: ClassVar[bool]  # a call of `generate` runs the decoding loop once: `mmdec.generate` and `stream` need it
    reads_encoder: ClassVar[bool]  # the decoder reads an encoder's states, and so does a smaller model that drafts
    reads_images: ClassVar[bool]  # it reads images among its token ids, and so does a smaller model that drafts
    refused_outputs: ClassVar[tuple[str, ...]]  # flags of a generation config that the target cannot serve
    batch_processors: ClassVar[tuple[type, ...]]  # logits processors that read the batch as a whole and change nothing

    @property
    def positions(self) -> int | None:
        """How many positions the model has; None: no end."""
        ...

    def hold_back(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a call's inputs, what `generate` is to prepare, and what goes past it into `prefill`."""
        ...

    def prepare_inputs(self, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs of `prefill`, from ids (B, P) and what `generate` hands over beside them."""
        ...

    def keeps_cache(self, inputs: Mapping[str, Any], config: GenerationConfig) -> bool:
        """Whether `extend` must be called at the end, because the caller reads the cache."""
        ...

    def extend(self, inputs: Mapping[str, Any], sequences: Tensor) -> None:
        """Fill the caller's cache with what `generate` leaves there, for finished sequences (B, L)."""
        ...

    def output(
        self,
        inputs: Mapping[str, Any],
        sequences: Tensor,
        lengths: Sequence[int],
        config: GenerationConfig,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> Output:
        """transformers' output object for sequences (B, L) with `lengths` new tokens in each row."""
        ...


def target_of(model: PreTrainedModel) -> HfTarget:
    """The target for this model. Raises InputError for a model that no target takes, or whose drafts could not be
    scored or taken back."""
    for target in TARGETS:
        if target.takes(model):
            return target(cast(Any, model))  # `takes` has seen its type
    raise InputError(
        "`model` must be a Whisper, a LLaVA, LLaVA-NeXT, Qwen2-VL, Qwen2.5-VL or Qwen3-VL, or a decoder-only language "
        "model with a key-value cache, but is "
        f"{type(model).__name__}. {known_families()}"
    )
