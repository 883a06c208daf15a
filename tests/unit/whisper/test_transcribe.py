"""Tests the arguments and results of `mmdec.transcribe`: sound of every type, languages, progress."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperProcessor

import mmdec
from mmdec.errors import InputError
from mmdec.pretrained.audio_lm import load_audio_lm
from mmdec.tasks.confidence import estimate_confidence, read_calibrations
from mmdec.types import Round
from mmdec.whisper.checkpoint import LoadedWhisper
from tests.conftest import RATE, buzz
from tests.support import audio_lm_folders as hearing_folders
from tests.support.tiny_whisper import heads
from tests.unit.whisper.short_transcripts import transcribe


def test_every_kind_of_audio_gives_the_same_text(whisper: LoadedWhisper, tmp_path: Path) -> None:
    whole = (np.round(buzz(0.6) * 32767)).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", whole, RATE)
    wanted = transcribe(whole, model=whisper)
    stereo, file = np.stack([whole, whole], 1), io.BytesIO((tmp_path / "a.wav").read_bytes())
    for audio in (torch.from_numpy(whole), stereo, (whole / 32768).astype(np.float32)):
        assert transcribe(audio, model=whisper).tokens == wanted.tokens
    assert transcribe(tmp_path / "a.wav", model=whisper, sample_rate=None).tokens == wanted.tokens
    assert transcribe(file, model=whisper, sample_rate=None).tokens == wanted.tokens
    assert wanted.seconds == pytest.approx(0.6)


@pytest.mark.parametrize("language", ["en", "English", "<|en|>", "ENGLISH"])
def test_languages_by_name_and_code(whisper: LoadedWhisper, language: str) -> None:
    assert transcribe(model=whisper, language=language).language == "en"


def test_a_batch_may_mix_languages(whisper: LoadedWhisper) -> None:
    recordings = [buzz(0.5), buzz(1.2), buzz(0.6)]
    found = transcribe(recordings, model=whisper, language=["de", "en", "german"])
    assert [transcript.language for transcript in found] == ["de", "en", "de"]
    detected = transcribe(recordings, model=whisper, prompt="Hello")
    assert {transcript.language for transcript in detected} <= {"de", "en"}


def test_progress_is_reported(whisper: LoadedWhisper) -> None:
    seen: list[tuple[float, float]] = []
    transcribe([buzz(2.4), buzz(0.5)], model=whisper, progress=lambda done, whole: seen.append((done, whole)))
    assert seen[0][0] == 0.0
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) >= 3
    assert seen[-1] == (pytest.approx(2.9), pytest.approx(2.9))


def test_progress_never_goes_back(whisper: LoadedWhisper) -> None:
    """A window may begin in the padding after a short recording, or a piece between pauses."""
    sounds = [buzz(seconds, seed) for seed, seconds in enumerate((0.3, 0.4, 0.5))]
    pauses = np.concatenate([part for sound in sounds for part in (sound, np.zeros(RATE // 2, np.float32))])
    for audio, options in ((sounds, {"timestamps": "segment"}), ([pauses, pauses], {"cut_at_pauses": True})):
        done = list[float]()
        options |= {"max_new_tokens": None, "batch_size": 2}
        transcribe(audio, model=whisper, progress=lambda seconds, _, done=done: done.append(seconds), **options)
        assert done == sorted(done)
        assert len(done) > len(audio) + 1


def test_progress_is_counted_in_the_extractors_frames(loose: LoadedWhisper) -> None:
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=2, hop_length=320)  # 50 frames per second
    whisper = LoadedWhisper(loose.model, WhisperProcessor(extractor, loose.tokenizer))  # type: ignore[attr-defined]
    done = list[float]()
    transcribe(buzz(5.0), model=whisper, max_new_tokens=None, progress=lambda seconds, _: done.append(seconds))
    assert max(seconds for seconds in done if seconds < 5.0) >= 3.0  # where the last window of 2 s begins


def test_rounds_are_reported(whisper: LoadedWhisper) -> None:
    rounds: list[Round] = []
    out = transcribe(model=whisper, drafter="lookup", on_round=rounds.append)
    assert len(rounds) == out.rounds
    heard = [token for round_ in rounds for token in round_.tokens[0]]
    assert out.tokens
    assert heard[: len(out.tokens)] == out.tokens
    many: list[Round] = []
    silence = np.zeros(8000, np.float32)
    outs = transcribe(
        [buzz(0.6), silence, buzz(2.4), buzz(0.8)],
        model=whisper,
        drafter="lookup",
        batch_size=2,
        on_round=many.append,
    )
    for index, out in enumerate(outs):  # of several batches and windows, and beside one that is not decoded
        pairs = [pair for round_ in many for pair in zip(round_.rows, round_.tokens, strict=True)]
        mine = [tokens for row, tokens in pairs if row == index]
        assert len(mine) == out.rounds
        assert [token for tokens in mine for token in tokens][: len(out.tokens)] == out.tokens or out.windows > 1

    def broken(round_: Round) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):  # no option of `generate` is to blame
        transcribe(model=whisper, drafter="lookup", on_round=broken)


@pytest.mark.parametrize("name", ["on_round", "on_transcript", "progress", "logits_processor"])
def test_a_callbacks_stop_iteration_reaches_the_caller(whisper: LoadedWhisper, name: str) -> None:
    """Inside a generator Python would make a RuntimeError of it."""

    def stop(*_: object) -> Any:
        raise StopIteration("mine")

    options: dict[str, Any] = {name: [stop] if name == "logits_processor" else stop}
    for sound in (buzz(0.6), [buzz(0.6), buzz(0.8)]):
        with pytest.raises(StopIteration, match="mine"):
            transcribe(sound, model=whisper, drafter="lookup", **options)


def test_typical_acceptance_is_not_lossless(whisper: LoadedWhisper) -> None:
    assert transcribe(model=whisper, drafter="lookup").lossless
    assert not transcribe(model=whisper, drafter="lookup", rule="typical").lossless


def test_a_seed_gives_the_same_sample_whatever_drafts(whisper: LoadedWhisper) -> None:
    sound = [buzz(0.5), buzz(0.7)]
    options: dict[str, Any] = {"model": whisper, "temperature": 0.9, "max_new_tokens": 12, "language": "en"}
    plain = [out.tokens for out in transcribe(sound, seed=3, **options)]
    torch.rand(1)  # torch's own generator has moved on
    drafted = transcribe(sound, seed=3, drafter="lookup", num_speculative_tokens=4, **options)
    assert [out.tokens for out in drafted] == plain
    assert [out.tokens for out in transcribe(sound, seed=4, **options)] != plain
    with pytest.raises(InputError, match="`seed` must be a whole number"):
        transcribe(model=whisper, seed="three")


def test_no_hook_is_left_after_an_error(whisper: LoadedWhisper) -> None:
    def progress(done: float, whole: float) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transcribe(model=whisper, drafter="lookup", timestamps="word", progress=progress)
    assert not whisper.model.get_encoder()._forward_hooks
    assert whisper.model.config._attn_implementation == "sdpa"
    assert heads(whisper.model).config.heads == 3


def test_silence_is_an_empty_transcript_with_a_note(
    whisper: LoadedWhisper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a list, short and long; the model would make up words. Others are as without it."""
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")  # texts of the tiny model are cut, too
    quiet = np.zeros(RATE, np.float32)
    empty = transcribe(quiet, model=whisper, timestamps="word", min_confidence=0.5)
    assert (empty.text, empty.tokens, empty.segments, empty.rounds, empty.seconds) == ("", [], [], 0, 1.0)
    assert empty.note == "the recording is silent: its peak is -inf dB, below -66 dB"
    assert empty.confidence is None
    assert str(empty).startswith(empty.note)
    assert empty.format("srt") == ""
    assert empty.to_dict()["note"] == empty.note
    soundfile.write(tmp_path / "quiet.wav", np.zeros(3 * RATE), RATE)
    progress: list[tuple[float, float]] = []
    audio: list[Any] = [buzz(0.6), tmp_path / "quiet.wav", buzz(0.7)]
    found = transcribe(audio, model=whisper, language=["en", "de", "de"], progress=lambda *at: progress.append(at))
    assert [bool(transcript.note) for transcript in found] == [False, True, False]
    assert [transcript.language for transcript in found] == ["en", "de", "de"]
    assert found[2].tokens == transcribe(buzz(0.7), model=whisper, language="de").tokens != []
    assert progress[-1] == (pytest.approx(4.3), pytest.approx(4.3))


def test_opposite_channels_give_the_text_of_one_and_a_note(
    whisper: LoadedWhisper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")  # texts of the tiny model are cut, too
    voice = buzz(0.9)
    wanted = transcribe(voice, model=whisper, language="en")
    soundfile.write(tmp_path / "opposite.wav", np.stack([voice, -voice], 1), RATE, subtype="FLOAT")
    told: list[mmdec.Transcript] = []
    given: list[Any] = [voice, np.stack([voice, -voice], 1), np.stack([-voice] * 3 + [voice] * 3)[::-1]]
    found = transcribe(given, model=whisper, language="en", on_transcript=lambda _, transcript: told.append(transcript))
    alone = transcribe(tmp_path / "opposite.wav", sample_rate=None, model=whisper, language="en")
    assert [transcript.tokens for transcript in (*found, alone)] == [wanted.tokens] * 4 != [[]] * 4
    assert [bool(transcript.note) for transcript in (*found, alone)] == [False, True, True, True]
    assert "cancel each other for 0.9 of 0.9 s" in alone.note
    assert [transcript.note for transcript in told] == [transcript.note for transcript in found]


def test_dicts_and_bytes_are_recordings(whisper: LoadedWhisper) -> None:
    """In a list with others; a broken one fails alone."""
    sound = buzz(0.6)
    file = io.BytesIO()
    soundfile.write(file, sound, RATE, subtype="FLOAT", format="WAV")
    wanted = mmdec.transcribe(sound, sample_rate=RATE, model=whisper).tokens
    good = {"array": sound, "sampling_rate": RATE}
    assert mmdec.transcribe(good, model=whisper).tokens == wanted
    audio: list[Any] = [good, file.getvalue(), {"array": sound}, {"bytes": file.getvalue(), "path": "a.wav"}]
    with pytest.raises(mmdec.BatchError, match="sampling_rate") as caught:
        mmdec.transcribe(audio, model=whisper)
    assert list(caught.value.errors) == [2]
    assert [result and result.tokens for result in caught.value.results] == [wanted, wanted, None, wanted]


def test_the_shipped_model_names_another_where_it_is_unsure() -> None:
    """A familiar voice has no note."""
    noisy = mmdec.transcribe(buzz(1.0), sample_rate=RATE, device="cpu")
    assert noisy.confidence < 0.5
    assert 'model="openai/whisper-base"' in noisy.note
    known = mmdec.transcribe("data/samples/english/austen.flac", device="cpu")
    assert known.note == ""


def test_a_confidence_says_whether_it_was_fitted(whisper: LoadedWhisper) -> None:
    bare = transcribe(model=whisper)
    assert not bare.calibrated
    fits = {}, read_calibrations(Path("models/whisper-base"))
    mean, base = (estimate_confidence(bare.evidence, fit, "transcript") for fit in fits)
    assert bare.confidence == pytest.approx(min(mean, base))
    assert transcribe(model="whisper-tiny.en").calibrated


@pytest.mark.parametrize("drafter", [None, "lookup"])
@pytest.mark.parametrize("count", [1, 3])
def test_truncated_text_is_noted(
    whisper: LoadedWhisper, drafter: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whisper with random weights does not end its text by itself so soon."""
    monkeypatch.setattr("mmdec.tasks.usage.CUT_CONFIDENCE", 0.0)
    for out in mmdec.transcribe(
        [buzz(0.7)] * count, sample_rate=RATE, model=whisper, drafter=drafter, max_new_tokens=5
    ):
        assert out.finish_reason == "length"
        assert out.note == "cut at 5 tokens; set `max_new_tokens`"
        assert out.confidence > 0.0  # the caller set the length
        assert out.to_dict()["finish_reason"] == "length"


def test_finished_text_is_not_noted_as_truncated(loose: LoadedWhisper) -> None:
    settings: Any = loose.model.generation_config
    first = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=loose, drafter=None, max_new_tokens=5).tokens[-1]
    settings.eos_token_id = [settings.eos_token_id, first]
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=loose, drafter=None, max_new_tokens=5)
    assert (out.finish_reason, out.note) == ("stop", "")


def test_a_window_without_a_configured_length_has_room(loose: LoadedWhisper) -> None:
    """transformers would cut at 20 new tokens; the decoder has 64 positions."""
    settings: Any = loose.model.generation_config
    settings.max_length = settings.max_new_tokens = None
    settings.suppress_tokens = [settings.eos_token_id]
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=loose, drafter=None)
    assert len(out.tokens) > 40
    assert out.finish_reason == "length"
    assert out.note == f"cut at {len(out.tokens)} tokens, the model's maximum"  # no option could raise it
    assert out.confidence <= 0.4


def test_a_default_length_limit_lowers_the_confidence(loose: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.CUT_CONFIDENCE", 0.0)
    settings: Any = loose.model.generation_config
    settings.max_length, settings.max_new_tokens = None, 5
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=loose, drafter=None)
    assert (out.finish_reason, out.note) == ("length", "cut at 5 tokens; set `max_new_tokens`")
    assert out.confidence == 0.0


@pytest.mark.parametrize("pieces", [False, True])
def test_the_note_names_the_length_of_a_window(whisper: LoadedWhisper, pieces: bool) -> None:
    sound = np.concatenate(
        [buzz(0.7), np.zeros(RATE, np.float32), buzz(0.9, 1), np.zeros(RATE, np.float32), buzz(0.8, 2)]
    )
    out = mmdec.transcribe(sound, sample_rate=RATE, model=whisper, max_new_tokens=5, cut_at_pauses=pieces)
    assert out.windows > 1
    assert len(out.tokens) > 5
    assert out.note == "cut at 5 tokens; set `max_new_tokens`"


def test_the_note_on_a_cut_text_keeps_the_advice(whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.whisper.recordings._advice", lambda *_: "use another model")
    out = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=whisper, max_new_tokens=5)
    assert out.note == "cut at 5 tokens; set `max_new_tokens`; use another model"


def test_seconds_of_transformers_loop_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves in the model's passes alone."""
    model = load_audio_lm(hearing_folders.write("Qwen2Audio", tmp_path / "heard"))
    now = 0.0

    def move(*_: Any) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("mmdec.generation.speculation.siblings_change_logits", lambda *_: True)
    model.model.register_forward_hook(move)
    sounds = [buzz(0.7), buzz(0.9, 1)]
    texts = mmdec.transcribe(sounds, sample_rate=RATE, model=model, drafter=None, max_new_tokens=6)
    assert sum(text.timings["total"] for text in texts) == pytest.approx(now)
    assert now == max(text.rounds for text in texts)


def test_an_audio_language_model_has_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.tasks.usage.CUT_CONFIDENCE", 0.0)
    model = load_audio_lm(hearing_folders.write("Qwen2Audio", tmp_path / "heard"))
    settings: Any = model.model.generation_config
    asked = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=model, drafter=None, max_new_tokens=2)
    settings.max_new_tokens = 2
    own = mmdec.transcribe(buzz(0.7), sample_rate=RATE, model=model, drafter=None)
    assert {(out.finish_reason, out.note) for out in (asked, own)} == {
        ("length", "cut at 2 tokens; set `max_new_tokens`")
    }
    assert asked.confidence > 0.0
    assert own.confidence == 0.0
