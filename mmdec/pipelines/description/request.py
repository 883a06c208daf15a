"""The checked options of a `describe` call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from transformers import PreTrainedModel

from mmdec.checks.arguments import show
from mmdec.decode.budget import Nodes
from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import LOSSY, RuleName
from mmdec.generation.speculation import stream
from mmdec.hub.vlm import LoadedVlm
from mmdec.pipelines.confidence import Calibration
from mmdec.types import Drafter, InputError

MAX_NEW_TOKENS = 512  # if neither the caller nor the model's generation config says
RESERVED = {  # option of `generate` -> the argument of `describe` that sets it, or "" if there is none
    "assistant_model": "drafter",
    "attention_mask": "prompt",
    "custom_generate": "drafter",
    "generation_config": "options",
    "image_grid_thw": "image",
    "input_ids": "prompt",
    "inputs": "prompt",
    "inputs_embeds": "",
    "num_return_sequences": "",
    "output_attentions": "",
    "output_hidden_states": "",
    "output_logits": "",
    "output_scores": "",
    "past_key_values": "Chat",
    "pixel_values": "image",
    "position_ids": "",
    "return_dict_in_generate": "",
    "streamer": "on_text",
    "token_healing": "",
    "tokenizer": "",
}


@final
@dataclass(frozen=True)
class DescriptionRequest:
    """The options that hold for every question of a call."""

    vlm: LoadedVlm
    drafter: Drafter | PreTrainedModel | None
    rule: RuleName | None
    nodes: Nodes
    seed: int | None
    statistics: DecodingStatistics | None
    options: Mapping[str, Any]  # for `generate`
    min_confidence: float | None = None
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        """Raises InputError for options of `generate` that `describe` sets itself."""
        for name in self.options:
            if name in RESERVED:
                remedy = f"Use `{RESERVED[name]}`." if RESERVED[name] else "Call `mmdec.generate` for it."
                raise InputError(f"`{name}` must be left out, but is {show(self.options[name])}. {remedy}")

    @property
    def lossless(self) -> bool:
        """Whether the rule keeps the model's own output."""
        return self.rule not in LOSSY

    def rounds(
        self, inputs: Mapping[str, Any], drafter: Drafter | PreTrainedModel | None, with_text: bool
    ) -> Iterator[Round]:
        """Decode one batch, round by round. drafter: this request's, or a wrapper of it. with_text: rounds contain
        text."""
        options = {name: value for name, value in self.options.items() if value is not None}
        config: Any = self.vlm.model.generation_config
        if not {"max_new_tokens", "max_length"} & options.keys() and config.max_new_tokens is None:
            options["max_new_tokens"] = MAX_NEW_TOKENS
        if with_text or "stop_strings" in options:
            options["tokenizer"] = self.vlm.tokenizer
        return stream(
            self.vlm.model,
            inputs,
            drafter,
            self.rule,
            self.nodes,
            self.seed,
            statistics=self.statistics,
            **options,
        )
