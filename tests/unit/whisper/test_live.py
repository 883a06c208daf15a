"""Tests `transcribe_stream`: its inputs, its errors, and that text before an error is not lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmdec
from mmdec.errors import InputError
from mmdec.io.audio.pipe import SAMPLE_BYTES
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.live import LiveTranscriber
from tests.conftest import RATE, buzz
from tests.support.live_sound import chunks
from tests.support.tiny_whisper import write

QUICK: dict[str, Any] = {"language": "en", "every": None, "drafter": None}
VOICE = np.concatenate([np.zeros(RATE), buzz(0.7), np.zeros(2 * RATE), buzz(0.6, 1), np.zeros(RATE)]).astype("float32")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """A tiny Whisper with windows of four seconds."""
    return load_whisper(write(tmp_path_factory.mktemp("live") / "four", with_heads=False, seconds=4), "cpu")


def texts(pieces: Any, whisper: LoadedWhisper, **options: Any) -> list[tuple[float, float, str]]:
    found = mmdec.transcribe_stream(pieces, model=whisper, **{**QUICK, **options})
    return [(update.start, update.end, update.text) for update in found if update.final]


def encoded(sound: np.ndarray, encoding: str) -> bytes:
    if encoding == "f32":
        return sound.astype("<f4").tobytes()
    if encoding == "u8":
        return (np.round(sound * 127) + 128).astype("u1").tobytes()
    bits = 8 * SAMPLE_BYTES[encoding]
    whole = np.round(sound.astype(np.float64) * (2.0 ** (bits - 1) - 1)).astype("<i4")
    return whole.view("u1").reshape(-1, 4)[:, : bits // 8].tobytes()


def test_channels_of_chunks_that_cancel_give_the_text_of_one(four: LoadedWhisper) -> None:
    channels = np.stack([VOICE, -VOICE], 1)
    cut = [channels[at : at + 999] for at in range(0, len(channels), 999)]
    assert texts(cut, four) == texts([VOICE], four) != []
    assert texts([*cut[:20], VOICE[20 * 999 :]], four) == texts([VOICE], four)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=5), st.sampled_from(["s16", "s24", "f32"]))
def test_bytes_may_be_split_anywhere(four: LoadedWhisper, sizes: list[int], encoding: str) -> None:
    content = encoded(VOICE, encoding)
    sizes = [*sizes, 4001]
    pieces, at = list[bytes](), 0
    while at < len(content):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(content[at : at + size])
        at += size
    assert texts(pieces, four, encoding=encoding) == texts([content], four, encoding=encoding)


@pytest.mark.parametrize("encoding", SAMPLE_BYTES)
def test_encodings_give_the_same_sound(four: LoadedWhisper, encoding: str) -> None:
    wanted, found = texts([VOICE], four), texts([encoded(VOICE, encoding)], four, encoding=encoding)
    assert len(wanted) == 2
    assert [update[:2] for update in found] == [update[:2] for update in wanted]
    if encoding in ("f32", "s32", "s24"):
        assert found == wanted


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.from_numpy(VOICE)],
        [np.stack([VOICE, VOICE], 1)],
        [VOICE.astype(np.float64)],
        [bytearray(encoded(VOICE, "s16"))],
        [memoryview(encoded(VOICE, "s16"))],
        [np.round(VOICE * 32767).astype(np.int16)],
        [VOICE, np.zeros(0, np.float32), b""],
    ],
    ids=["tensor", "stereo", "float64", "bytearray", "memoryview", "int16", "empty chunks"],
)
def test_chunks_of_any_type_and_size_give_the_same_text(four: LoadedWhisper, pieces: list[Any]) -> None:
    wanted = texts([VOICE], four)
    assert [update[:2] for update in texts(pieces, four)] == [update[:2] for update in wanted]


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        (np.array([0.0, np.nan, 0.1]), "samples from -1 to 1, but 1 of 3"),
        (np.array([0.0, np.inf]), "samples from -1 to 1, but 1 of 2"),
        (np.array([0.0, 20_000.0, 30.0]), "samples from -1 to 1, but 2 of 3"),
        (np.array(["a"]), "floats or integers"),
        (np.zeros((4, 3, 2)), "shape"),
        ("talk.wav", "arrays or bytes"),
        (None, "arrays or bytes"),
        (7, "arrays or bytes"),
    ],
    ids=str,
)
def test_a_bad_chunk_is_refused_after_what_came_before(four: LoadedWhisper, chunk: Any, told: str) -> None:
    stream = mmdec.transcribe_stream([VOICE, chunk, VOICE], model=four, **QUICK)
    assert next(stream).start < 1.0
    with pytest.raises(InputError, match=told):
        list(stream)


def test_half_a_sample_at_the_end_is_reported_after_the_text(four: LoadedWhisper) -> None:
    stream = mmdec.transcribe_stream([encoded(VOICE, "s16") + b"\0"], model=four, **QUICK)
    assert [next(stream).final, next(stream).final] == [True, True]
    with pytest.raises(InputError, match="whole samples of 2 bytes, but end with 1 of one"):
        next(stream)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sample_rate": 4000}, "sample_rate"),
        ({"sample_rate": 16000.5}, "sample_rate"),
        ({"encoding": "mp3"}, "encoding"),
        ({"encoding": None}, "encoding"),
        ({"every": 0.0}, "every"),
        ({"every": True}, "every"),
        ({"pause": 0.1}, "pause"),
        ({"pause": "long"}, "pause"),
        ({"pause": float("nan")}, "pause"),
        ({"threads": 0}, "threads"),
        ({"timestamps": "letter"}, "timestamps"),
        ({"language": "klingon"}, "language"),
        ({"language": ["en", "de"]}, "language"),
        ({"num_beams": 4}, "num_beams"),
        ({"model": "no/such"}, "model"),
    ],
    ids=str,
)
def test_arguments_are_refused_before_sound_comes(four: LoadedWhisper, options: dict[str, Any], named: str) -> None:
    def never() -> Iterator[np.ndarray]:
        pytest.fail("a chunk was asked for")
        yield VOICE

    given: dict[str, Any] = {"model": four, **options}
    with pytest.raises(InputError, match=f"`{named}`"):
        mmdec.transcribe_stream(never(), **given)


def test_an_option_that_a_stream_refuses_says_what_to_do_instead() -> None:
    with pytest.raises(InputError, match=r"`progress` must be left out for a stream, but is given. .* Read `end`"):
        mmdec.transcribe_stream([VOICE], progress=print)


def test_an_unknown_option_is_named(four: LoadedWhisper) -> None:
    with pytest.raises(InputError, match="temprature"):
        texts([VOICE], four, temprature=0.5)


def test_windows_are_given_as_soon_as_they_close(four: LoadedWhisper) -> None:
    """A caller who reads slowly is not kept waiting for sound that has not come."""
    asked = 0

    def microphone() -> Iterator[np.ndarray]:
        nonlocal asked
        for chunk in chunks(torch.from_numpy(VOICE), [1600]):
            asked += 1
            yield chunk

    first = next(update for update in mmdec.transcribe_stream(microphone(), model=four, **QUICK) if update.final)
    assert asked * 1600 / RATE == pytest.approx(first.end - 0.4 + 1.0, abs=0.15)  # the voice's end, and the pause


def test_feed_and_end_equal_the_iterator(four: LoadedWhisper) -> None:
    live, found = LiveTranscriber(model=four, **QUICK), list[tuple[float, float, str]]()
    for chunk in chunks(torch.from_numpy(VOICE), [3000]):
        found += [(update.start, update.end, update.text) for update in live.feed(chunk)]
    found += [(update.start, update.end, update.text) for update in live.end()]
    assert live.seconds == len(VOICE) / RATE
    assert found == texts([VOICE], four)


def test_two_concurrent_streams_are_independent(four: LoadedWhisper) -> None:
    voice, hum = VOICE, buzz(3.0, 5)
    wanted = [texts([sound], four, every=0.5, drafter="lookup") for sound in (voice, hum)]
    options: dict[str, Any] = {**QUICK, "every": 0.5, "drafter": "lookup"}
    both = [LiveTranscriber(model=four, **options) for _ in range(2)]
    found: list[list[Any]] = [[], []]
    for at in range(0, len(voice), 4000):
        for live, sound, list_ in zip(both, (voice, hum), found, strict=True):
            list_ += [(up.start, up.end, up.text) for up in live.feed(sound[at : at + 4000]) if up.final]
    for live, list_ in zip(both, found, strict=True):
        list_ += [(up.start, up.end, up.text) for up in live.end() if up.final]
    assert found == wanted


def test_provisional_texts_change_no_final_one(four: LoadedWhisper) -> None:
    """Whatever random weights say in shorter contexts, final text is that of whole windows."""
    wanted = texts([VOICE], four)
    assert texts(list(chunks(torch.from_numpy(VOICE), [800])), four, every=0.1) == wanted


@pytest.mark.parametrize("speech", [True, False])
def test_channels_that_cancel_each_other_are_noted_last(four: LoadedWhisper, speech: bool) -> None:
    voice = np.concatenate([buzz(0.7), np.zeros(2 * RATE)]) if speech else np.full(2 * RATE, 1e-5)
    voice = voice * np.sign(np.sin(np.arange(len(voice)) / 9.0)).astype(np.float32)
    opposite = np.stack([voice, -voice], axis=1).astype(np.float32)
    updates = list(mmdec.transcribe_stream([opposite[:9000], opposite[9000:]], model=four, **QUICK))
    assert "opposite and cancel each other" in updates[-1].transcript.note
    assert updates[-1].final
    if not speech:
        assert [(update.text, update.end) for update in updates] == [("", 2.0)]
    same = np.stack([voice, voice], axis=1).astype(np.float32)
    assert not any(
        "cancel" in update.transcript.note for update in mmdec.transcribe_stream([same], model=four, **QUICK)
    )
