"""Tests the long form as a generator: its segments equal those of transformers' `generate`, whatever the options."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Generator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.core.steps import Compute, time_pass
from mmdec.errors import InputError
from mmdec.generation.speculation import DecodingOptions, Speculation, default_statistics
from mmdec.whisper.long_form import LongFormResult, transcribe_windows
from mmdec.whisper.window import PreparedRecording, TimeTokens
from mmdec.whisper.window_options import WindowOptions
from mmdec.whisper.words import align_window
from tests.support.grid import slow_but
from tests.support.tiny_whisper import (
    NO_TIMESTAMPS,
    PREVIOUS,
    SOT,
    TEXT,
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


@torch.no_grad()
def run(recording: Generator[Any, Any, LongFormResult], stages: list[str] | None = None) -> LongFormResult:
    """Run one recording's passes to its end, and append the stages of its `Compute` steps to `stages`.

    Of these, only the passes of the encoder may run on the side thread.
    """
    result = None
    while True:
        try:
            step = recording.send(result)
        except StopIteration as end:
            return end.value
        if stages is not None and isinstance(step, Compute):
            stages.append("encoder" if step.runs_on_side_thread else "decoder")
        result = time_pass(step.device, step.compute)


def start(
    model: WhisperForConditionalGeneration,
    drafter: str | None,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
) -> Generator[Any, Any, LongFormResult]:
    options = dict(options)
    words = bool(options.pop("return_token_timestamps", None))
    recording = PreparedRecording(
        model=model,
        speculation=Speculation(DecodingOptions(drafter)),
        options=window_options(model, inputs, options, words),
        features=inputs["input_features"],
        attention_mask=inputs["attention_mask"],
        time_tokens=stock_times(model) if words else None,
    )
    return transcribe_windows(recording)


def window_options(
    model: WhisperForConditionalGeneration, inputs: dict[str, Tensor], options: dict[str, Any], words: bool
) -> WindowOptions:
    is_long = inputs["input_features"].shape[-1] > 2 * model.config.max_source_positions
    return WindowOptions.from_options(model, options, is_long, words)


def wanted(model: WhisperForConditionalGeneration, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Return what transformers' own `generate` returns."""
    torch.manual_seed(0)
    try:
        return model.generate(**inputs, **options, return_segments=True, return_dict_in_generate=False)
    finally:
        model.set_attn_implementation("sdpa")


def found(
    model: WhisperForConditionalGeneration,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    drafter: str | None = None,
) -> LongFormResult:
    torch.manual_seed(0)
    return run(start(model, drafter, inputs, options))


def assert_same(result: LongFormResult, reference: Any) -> None:
    assert [token for segment in result.segments for token in segment.tokens] == reference["sequences"][0].tolist()
    segments = reference["segments"][0]
    assert len(result.segments) == len(segments)
    for segment, expected in zip(result.segments, segments, strict=True):
        assert segment.tokens == expected["tokens"].tolist()
        assert (segment.start, segment.end) == (float(expected["start"]), float(expected["end"]))
        if "token_timestamps" in expected:
            assert segment.token_starts is not None
            torch.testing.assert_close(
                segment.token_starts, expected["token_timestamps"], rtol=0, atol=0, equal_nan=True
            )


@pytest.fixture(autouse=True)
def fresh() -> None:
    default_statistics().clear()


@pytest.mark.parametrize("number", slow_but(range(500 if os.environ.get("MMDEC_ALL") else 20), slice(8)))
def test_segments_equal_those_of_generate(number: int) -> None:
    kind, windows, options = case(number)
    inputs = sound(1, windows, seed=number)
    drafter = "lookup" if number % 2 else None
    assert_same(found(network(kind), inputs, options, drafter), wanted(network(kind), inputs, options))


LADDER: dict[str, Any] = {"temperature": (0.0, 0.4), "logprob_threshold": -0.3}


def test_each_window_is_encoded_once() -> None:
    """The language is detected, and some windows are decoded again: all with the states of one pass."""
    stages = list[str]()
    result = run(start(network("multilingual"), None, sound(1, 3.4), LADDER), stages)
    assert any(window.temperature for window in result.windows)
    assert stages.count("encoder") == len(result.windows)
    assert stages.count("decoder") == 1  # to detect the language


def test_silence_costs_a_pass_only_where_the_text_is_improbable() -> None:
    stages = list[str]()
    options = {"language": "en", "logprob_threshold": -0.3, "no_speech_threshold": 1.0, "temperature": 0.0}
    result = run(start(network("multilingual"), None, sound(1, 3.4), options), stages)
    unsure = [window.avg_logprob is not None and window.avg_logprob < -0.3 for window in result.windows]
    assert sum(unsure) > 0
    assert stages == [stage for each in unsure for stage in ("encoder", "decoder")[: 1 + each]]


def test_recordings_that_take_turns_equal_those_alone() -> None:
    """One thread drives four recordings, and runs one pass of each in turn."""
    model = network("multilingual")
    recordings = [sound(1, 1 + number, seed=number) for number in range(4)]
    options = {"condition_on_prev_tokens": True, "temperature": 0.0}
    live = {number: start(model, "lookup", inputs, options) for number, inputs in enumerate(recordings)}
    replies: dict[int, Any] = dict.fromkeys(live)
    results = dict[int, LongFormResult]()
    while live:
        for number, recording in list(live.items()):
            try:
                request = recording.send(replies[number])
            except StopIteration as end:
                results[number] = end.value
                del live[number]
            else:
                replies[number] = time_pass(request.device, request.compute)
    for number, inputs in enumerate(recordings):
        assert_same(results[number], wanted(model, inputs, options))


def test_words_are_timed_as_in_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` times them by a method that is replaced; here it is an argument."""

    def begins(tokens: Sequence[int]) -> list[bool | None]:
        return [None if token >= TEXT else token % 3 > 0 for token in tokens]

    model, inputs = network("multilingual"), sound(1, 2.2)
    options = {"language": "en", "condition_on_prev_tokens": True}
    speculation = Speculation(DecodingOptions("lookup"))
    settings: Any = model.generation_config
    windows = list[Tensor]()
    first_time = settings.no_timestamps_token_id + 1
    time_tokens = partial(align_window, heads=settings.alignment_heads, begins=begins, first_time=first_time)

    def extract(output: Any, heads: object, num_frames: Any = None, num_input_ids: int = 1) -> Tensor:
        frames = None if num_frames is None else int(torch.as_tensor(num_frames).flatten()[0])
        starts, seconds = time_tokens(output, windows[-1], num_input_ids, frames)
        output["token_seconds"] = seconds[None]
        return starts[None]

    hook = model.get_encoder().register_forward_pre_hook(
        lambda _, args, named: windows.append(named["input_features"] if named else args[0]), with_kwargs=True
    )
    monkeypatch.setattr(model, "_extract_token_timestamps", extract)
    try:
        reference: Any = model.generate(
            **inputs, **options, return_token_timestamps=True, return_segments=True, custom_generate=speculation
        )
    finally:
        hook.remove()
        model.set_attn_implementation("sdpa")
    recording = PreparedRecording(
        model=model,
        speculation=speculation,
        options=window_options(model, inputs, options, True),
        features=inputs["input_features"],
        attention_mask=inputs["attention_mask"],
        time_tokens=time_tokens,
    )
    result = run(transcribe_windows(recording))
    assert_same(result, reference)
    for segment, expected in zip(result.segments, reference["segments"][0], strict=True):
        assert segment.token_seconds is not None
        assert torch.equal(segment.token_seconds, expected["result"]["token_seconds"][slice(*expected["idxs"])])


@pytest.mark.parametrize(
    ("kind", "windows", "options", "message"),
    [
        ("multilingual", 1.0, {"language": "xx"}, "`language` must be one that the model knows, but is 'xx'"),
        ("multilingual", 1.0, {"task": "sing"}, "`task` must be one of translate, transcribe, but is 'sing'"),
        ("multilingual", 2.0, {"return_timestamps": False}, "`return_timestamps` must be True"),
        ("multilingual", 1.0, {"max_new_tokens": 64, "language": "en"}, "`max_new_tokens` must be at most 60 after 4"),
    ],
)
def test_options_that_do_not_fit_the_recording_or_model_are_refused(
    kind: str, windows: float, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        found(network(kind), sound(1, windows), options)
