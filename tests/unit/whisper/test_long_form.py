"""Tests the long form as a generator: its segments equal those of transformers' `generate`, whatever the options."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.generation.run import DecodingOptions, Speculation, default_statistics
from mmdec.whisper.long_form import (
    LongFormResult,
    TimeTokens,
    decode_alone,
    run,
    transcribe_windows,
)
from tests.support.tiny_whisper import (
    NO_TIMESTAMPS,
    PREVIOUS,
    SOT,
    TIMESTAMPS,
    VOCABULARY,
    sound,
    whisper,
)
from tests.support.whisper_calls import PROMPT

pytestmark = [  # transformers' own: on numpy 2, and for word timestamps of windows that say next to nothing
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:std:UserWarning"),
]

MODELS = ("multilingual", "english", "forced", "bare")


@cache
def network(kind: str) -> WhisperForConditionalGeneration:
    """Build a model whose generation config is like that of a multilingual or an English Whisper, old or new."""
    model = whisper(80, 9)
    settings: Any = model.generation_config
    if kind == "english":
        settings.is_multilingual = False
        del settings.lang_to_id, settings.task_to_id
    elif kind == "forced":
        settings.forced_decoder_ids = [[1, None], [2, settings.task_to_id["transcribe"]]]
        del settings.prev_sot_token_id
        settings.suppress_tokens = [1, 2, *range(SOT, PREVIOUS), PREVIOUS, PREVIOUS + 1]
    elif kind == "bare":
        settings.is_multilingual = False
        settings.forced_decoder_ids = [[1, NO_TIMESTAMPS]]
        settings.suppress_tokens = settings.begin_suppress_tokens = None
        del settings.lang_to_id, settings.task_to_id, settings.prev_sot_token_id
    return model


def case(number: int) -> tuple[str, float, dict[str, Any]]:
    """Draw a model, a recording's length in windows, and options of `generate`."""
    pick = random.Random(number).choice
    kind = pick(MODELS)
    windows = pick([1.0, 1.0, 2.2, 3.4, 5.01])
    condition = pick([None, False, True])
    options: dict[str, Any] = {
        "return_timestamps": pick([None, False, True]) if windows <= 1 else pick([None, True]),
        "temperature": pick([None, 0.0, (0.0,), 0.7, (0.0, 0.4, 0.9), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]),
        "compression_ratio_threshold": pick([None, 0.9, 1.1]),
        "logprob_threshold": pick([None, -0.3, -1.5, -3.0]),
        "condition_on_prev_tokens": condition,
        "return_token_timestamps": pick([None, True]),
        "repetition_penalty": pick([None, None, 1.3]),
        "max_new_tokens": pick([None, 5, 14]),
        "max_length": pick([None, 20]),
    }
    if options["max_new_tokens"] is None and options["max_length"] is None:
        del options["max_new_tokens"], options["max_length"]
    if kind in ("multilingual", "forced"):
        options |= {"language": pick([None, "en", "French", "<|de|>"]), "task": pick([None, "transcribe", "translate"])}
    if pick([True, False]):
        options["prompt_ids"] = pick([PROMPT, PROMPT[1:], PROMPT.repeat(2)])
        options["prompt_condition_type"] = pick([None, "first-segment", "all-segments" if condition else None])
    if options["logprob_threshold"] is not None:
        options["no_speech_threshold"] = pick([None, 1e-4, 0.01])
        if options["temperature"] is None:
            options["temperature"] = 0.0
    if pick([True, False, False]):
        options["suppress_tokens"] = [1, 2, *range(SOT, NO_TIMESTAMPS), *range(TIMESTAMPS + 30, VOCABULARY)]
    return kind, windows, options


def stock_times(model: WhisperForConditionalGeneration) -> TimeTokens:
    """Return transformers' own way to time tokens."""

    def times(output: Any, features: Tensor, prompt: int, frames: int | None) -> tuple[Tensor, None]:
        heads: Any = model.generation_config
        counts = None if frames is None else torch.tensor([frames])
        extract: Any = model._extract_token_timestamps
        return extract(output, heads.alignment_heads, num_frames=counts, num_input_ids=prompt)[0], None

    return times


def start(
    model: WhisperForConditionalGeneration, decode: Any, inputs: dict[str, Tensor], options: dict[str, Any]
) -> Generator[Any, Any, LongFormResult]:
    options = dict(options)
    words = options.pop("return_token_timestamps", None)
    return transcribe_windows(
        model,
        inputs["input_features"],
        decode,
        attention_mask=inputs["attention_mask"],
        time_tokens=stock_times(model) if words else None,
        **options,
    )


def wanted(model: WhisperForConditionalGeneration, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Return what transformers' own `generate` returns."""
    torch.manual_seed(0)
    try:
        return model.generate(**inputs, **options, return_segments=True, return_dict_in_generate=False)
    finally:
        model.set_attn_implementation("sdpa")


def found(
    model: WhisperForConditionalGeneration, inputs: dict[str, Tensor], options: dict[str, Any], drafter: Any = None
) -> LongFormResult:
    torch.manual_seed(0)
    decode = decode_alone(model, Speculation(DecodingOptions(drafter)))
    return run(start(model, decode, inputs, options), model)


def assert_same(result: LongFormResult, reference: Any) -> None:
    assert result.tokens == reference["sequences"][0].tolist()
    segments = reference["segments"][0]
    assert len(result.segments) == len(segments)
    for one, other in zip(result.segments, segments, strict=True):
        assert one.tokens == other["tokens"].tolist()
        assert (one.start, one.end) == (float(other["start"]), float(other["end"]))
        if "token_timestamps" in other:
            assert one.token_starts is not None
            torch.testing.assert_close(one.token_starts, other["token_timestamps"], rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=True)
def fresh() -> None:
    default_statistics().clear()


@pytest.mark.parametrize("number", range(60))
def test_segments_equal_those_of_generate(number: int) -> None:
    kind, windows, options = case(number)
    inputs = sound(1, windows, seed=number)
    assert_same(found(network(kind), inputs, options), wanted(network(kind), inputs, options))
