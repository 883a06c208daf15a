"""What a target for a model of transformers has beside what every target has: what is special to it in `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmdec.types import Target

Output = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


class HfTarget(Target, Protocol):
    """A target for a model of transformers. The defaults are those of a language model; targets inherit them."""

    one_run: ClassVar[bool] = True  # a call of `generate` runs the loop once: `mmdec.generate` and `stream` need it
    reads_encoder: ClassVar[bool] = False  # the decoder reads an encoder's states, as a smaller model that drafts does
    reads_images: ClassVar[bool] = False  # it reads images among its token ids, as a smaller model that drafts does
    refused_outputs: ClassVar[tuple[str, ...]] = ()  # flags of a generation config that the target cannot serve
    batch_processors: ClassVar[tuple[type, ...]] = ()  # logits processors that read the whole batch and change nothing
    columns: bool = False  # attention has a table of as many columns: every node of a draft takes one
    positions: int | None  # how many the model has; None: no end

    def hold_back(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a call's inputs, what `generate` is to prepare, and what goes past it into `prefill`: nothing."""
        return dict(inputs), {}

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
