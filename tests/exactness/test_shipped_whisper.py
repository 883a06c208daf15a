"""Tests the shipped Whisper with its drafter on data/samples/english: tokens equal those of `generate`, in fewer passes
of the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

import mmdec
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.io.audio import load_audio
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.grid import slow_but

SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "english"
SIZES = [4, 8, None]


@pytest.fixture(scope="module")
def whisper() -> LoadedWhisper:
    return load_whisper("whisper-tiny.en", "cpu")


@pytest.fixture(scope="module")
def sounds() -> dict[str, Tensor]:
    found = {path.stem: load_audio(path) for path in sorted(SAMPLES.glob("*.flac"))}
    pause = torch.zeros(8000)
    found["long"] = torch.cat([found["two_cities"], pause, found["austen"], pause] * 3)  # three windows and more
    return found


def features(whisper: LoadedWhisper, sounds: list[Tensor]) -> dict[str, Any]:
    long = max(map(len, sounds)) > 480_000
    options: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    arrays = [sound.numpy() for sound in sounds]
    made = whisper.extractor(arrays, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **options)
    return {"input_features": made["input_features"], "attention_mask": made["attention_mask"]}


def same(whisper: LoadedWhisper, inputs: dict[str, Any], nodes: Any, **options: Any) -> tuple[int, int]:
    """Whether both say the same; passes of the decoder of each."""
    model: WhisperForConditionalGeneration = whisper.model
    drafter = auto_drafter(model, whisper.directory)
    counts = []
    results = []
    for entry_point in (None, mmdec.speculate(drafter, num_speculative_tokens=nodes)):
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        handle = model.model.decoder.layers[0].self_attn.register_forward_pre_hook(count)  # type: ignore[union-attr, operator]
        try:
            torch.manual_seed(0)
            more = {} if entry_point is None else {"custom_generate": entry_point}
            results.append(model.generate(**inputs, **options, **more))
        finally:
            handle.remove()
        counts.append(calls)
    assert torch.equal(results[0], results[1])
    return counts[0], counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", SIZES)
def test_a_paragraph_in_fewer_passes(whisper: LoadedWhisper, sounds: dict[str, Tensor], nodes: Any):
    plain, drafted = same(whisper, features(whisper, [sounds["two_cities"]]), nodes)
    assert plain > 60
    assert drafted < plain * 0.8


@pytest.mark.parametrize("name", slow_but(["austen", "president"], ["austen"]))
def test_a_sentence_keeps_its_text(whisper: LoadedWhisper, sounds: dict[str, Tensor], name: str):
    plain, drafted = same(whisper, features(whisper, [sounds[name]]), 8)
    assert drafted < plain


@pytest.mark.slow
def test_timestamps_keep_their_text(whisper: LoadedWhisper, sounds: dict[str, Tensor]):
    plain, drafted = same(whisper, features(whisper, [sounds["two_cities"]]), 8, return_timestamps=True)
    assert drafted < plain


@pytest.mark.slow
def test_long_form_with_fallback_and_conditioning_equals_stock(whisper: LoadedWhisper, sounds: dict[str, Tensor]):
    ladder = {"temperature": (0.0, 0.4), "logprob_threshold": -0.2, "compression_ratio_threshold": 1.8}
    conditioned: dict[str, Any] = {"return_timestamps": True, "condition_on_prev_tokens": True, **ladder}
    plain, drafted = same(whisper, features(whisper, [sounds["long"]]), 8, **conditioned)
    assert drafted < plain


@pytest.mark.slow
def test_a_ragged_batch_keeps_its_texts(whisper: LoadedWhisper, sounds: dict[str, Tensor]):
    batch = [sounds["two_cities"], sounds["austen"], sounds["president"], sounds["two_cities"][:200_000]]
    plain, drafted = same(whisper, features(whisper, batch), 8)
    assert drafted < plain


def test_transcribe_keeps_text_and_words(sounds: dict[str, Tensor]):
    paragraph = mmdec.transcribe(sounds["two_cities"], sample_rate=16000, timestamps="word")
    plain = mmdec.transcribe(sounds["two_cities"], sample_rate=16000, timestamps="word", drafter=None)
    assert paragraph.text == plain.text
    assert [segment.words for segment in paragraph.segments] == [segment.words for segment in plain.segments]
    assert len(paragraph.segments) >= 5
    assert paragraph.tokens_per_round > 1.2
    times = [word.start for segment in paragraph.segments for word in segment.words or ()]
    assert times == sorted(times)
    assert 10 < times[-1] < paragraph.seconds


@pytest.mark.slow
def test_segments_and_words_agree(sounds: dict[str, Tensor]):
    """A segment begins with its first word and ends with its last; words do not overlap."""
    timed, marked = (
        mmdec.transcribe(sounds["long"], sample_rate=16000, timestamps=kind) for kind in ("word", "segment")
    )
    assert [segment.tokens for segment in timed.segments] == [segment.tokens for segment in marked.segments]
    assert [segment.text for segment in timed.segments] == [segment.text for segment in marked.segments]
    at = 0.0
    for segment, model in zip(timed.segments, marked.segments, strict=True):
        assert segment.words
        assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)
        for word in segment.words:
            assert at <= word.start <= word.end
            at = word.end
        assert segment.end <= max(model.end, segment.words[-1].start + 1.0)  # no word lasts through a pause
    assert len(timed.segments) > 15
    assert any(segment.start != model.start for segment, model in zip(timed.segments, marked.segments, strict=True))


def test_other_languages_are_refused(sounds: dict[str, Tensor]):
    with pytest.raises(InputError, match="language"):
        mmdec.transcribe(sounds["austen"], sample_rate=16000, language="fr")


@pytest.mark.slow
def test_timestamps_do_not_change_the_confidence(whisper: LoadedWhisper) -> None:
    """Timestamp tokens are not part of the text, so their probabilities do not count."""
    paths = [SAMPLES / "austen.flac", SAMPLES / "two_cities.flac"]
    plain = mmdec.transcribe(paths, model=whisper)
    timed = mmdec.transcribe(paths, model=whisper, timestamps="segment")
    for plain_transcript, timed_transcript in zip(plain, timed, strict=True):
        assert plain_transcript.text == timed_transcript.text
        assert timed_transcript.confidence == pytest.approx(plain_transcript.confidence, abs=0.05)
        assert timed_transcript.evidence["count"] == plain_transcript.evidence["count"]
