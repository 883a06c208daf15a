"""What `mmdec.transcribe` refuses, by one clear error, and what it tells."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperProcessor
from transformers.utils import logging as hf_logging

import mmdec
from mmdec.generation.model_lock import model_lock
from mmdec.hub.whisper import LoadedWhisper, load_whisper
from mmdec.pipelines.transcription.request import TranscriptionRequest
from mmdec.pipelines.transcription.usage import UsageMeter
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import heads, network, processor, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whisper(folder: Path) -> LoadedWhisper:
    return load_whisper(folder, "cpu")


@pytest.fixture
def loose(whisper: LoadedWhisper) -> LoadedWhisper:
    """One of the test's own, to spoil."""
    whole = processor()
    return LoadedWhisper(network(whole.tokenizer), whole)  # type: ignore[attr-defined]


def transcribe(audio: Any = None, **options: Any) -> Any:
    given = {"sample_rate": RATE, "max_new_tokens": 4, "drafter": None, **options}
    return mmdec.transcribe(buzz(0.5) if audio is None else audio, **given)


BAD_SOUND: list[tuple[Any, str]] = [
    (np.zeros(RATE, np.float32), "must hold speech, but is silent"),
    (np.full(RATE, np.nan, np.float32), "must hold finite numbers"),
    (np.zeros(0, np.float32), "must hold at least one sample"),
    (np.ones(100, np.float32), "must last at least"),
    (np.ones((3, 4, 5), np.float32), "must have shape"),
    (np.array(["a"]), "must hold floats or integers"),
    ("missing.wav", "must be an existing file"),
    (None, "must be a path"),
]


@pytest.mark.parametrize(("audio", "message"), BAD_SOUND)
def test_bad_sound(whisper: LoadedWhisper, audio: Any, message: str) -> None:
    rate = RATE if isinstance(audio, np.ndarray) else None
    with pytest.raises(mmdec.InputError, match=message):
        mmdec.transcribe(audio, model=whisper, drafter=None, sample_rate=rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "klingon"}, r"`language` must be one that the model knows, but is 'klingon'.*de \(german\), en"),
        ({"language": "fr"}, "It knows de"),
        ({"language": 7}, "`language` must be"),
        ({"language": ["en", "de"]}, "one for each of 1 recordings, but has 2"),
        ({"task": "summarise"}, "`task` must be one of transcribe, translate"),
        ({"timestamps": "sentence"}, '`timestamps` must be None, "segment" or "word"'),
        ({"timestamps": True}, "`timestamps` must be"),
        ({"prompt": "<|en|> hm"}, "`prompt` must be plain text"),
        ({"prompt": "no " * 40}, "`prompt` must have at most 31 tokens"),
        ({"batch_size": 0}, "`batch_size` must be a whole number from 1"),
        ({"threads": 0}, "`threads` must be a whole number from 1"),
        ({"num_beams": 2}, "`num_beams` must be 1"),
        ({"no_speech_threshold": 0.6}, "`logprob_threshold` must be given"),
        ({"temperature": -1.0}, "`temperature` must be"),
        ({"temperature": ()}, "`temperature` must be"),
        ({"return_timestamps": True}, "`return_timestamps` must be left out.*Use `timestamps`"),
        ({"assistant_model": 1}, "Use `drafter`"),
        ({"num_return_sequences": 2}, "`num_return_sequences` must be left out"),
        ({"max_new_tokns": 4}, "max_new_tokns"),
        ({"max_new_tokens": 4000}, "`options` must be what `model.generate` takes"),
        ({"drafter": "eagle"}, "`drafter` must be a folder for eagle, which has weights"),
        ({"rule": "best"}, "`rule` must be one of"),
        ({"device": "tpu"}, "`device` must be"),
        ({"sample_rate": None}, "`sample_rate` must be given"),
        ({"prompt": "x", "prompt_condition_type": "all-segments"}, "condition_on_prev_tokens"),
    ],
)
def test_bad_arguments(whisper: LoadedWhisper, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mmdec.InputError, match=message):
        transcribe(model=whisper, **options)


def test_a_rate_is_for_samples(whisper: LoadedWhisper) -> None:
    with pytest.raises(mmdec.InputError, match="`sample_rate` must be left out for files"):
        transcribe("x.wav", model=whisper)


def test_models_that_lack_something(loose: LoadedWhisper) -> None:
    known: Any = loose.model.generation_config
    del known.alignment_heads
    with pytest.raises(mmdec.InputError, match="names no `alignment_heads`"):
        transcribe(model=loose, timestamps="word")
    known.is_multilingual = False
    for options in ({"language": "en"}, {"task": "translate"}):
        with pytest.raises(mmdec.InputError, match="for a model"):
            transcribe(model=loose, **options)
    del known.lang_to_id
    assert transcribe(model=loose).language is None
    del known.no_timestamps_token_id
    with pytest.raises(mmdec.InputError, match="`timestamps` must be None"):
        transcribe(model=loose, timestamps="segment")
    with pytest.raises(mmdec.BatchError, match="at most 1 seconds") as caught:
        transcribe([buzz(0.5), buzz(1.5)], model=loose)
    assert caught.value.results[0].tokens
    assert caught.value.results[1] is None


def test_heads_of_another_whisper(loose: LoadedWhisper, tmp_path: Path, whisper: LoadedWhisper) -> None:
    assert whisper.directory is not None
    other = network(loose.tokenizer, d_model=16)
    with pytest.raises(mmdec.InputError, match="must have 32 channels for these heads, but has 16"):
        transcribe(model=other, processor=loose.processor, drafter=whisper.directory / "medusa")
    with pytest.raises(mmdec.InputError, match=r"`drafter` must be 'lookup'.*loaded by its user"):
        transcribe(model=loose, drafter="medusa")
    bare = write(tmp_path / "bare", with_heads=False)
    with pytest.raises(mmdec.InputError, match=r"'medusa', and '.*bare.medusa' has none"):
        transcribe(model=bare, drafter="medusa", device="cpu")


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_processors_of_another_whisper(loose: LoadedWhisper) -> None:
    for options, message in (
        ({"feature_size": 128, "chunk_length": 1}, "must have 80 mels for this model, but has 128"),
        ({"feature_size": 80}, "must have 100 frames in a window for this model, but has 3000"),
        ({"feature_size": 80, "chunk_length": 2, "sampling_rate": 8000}, "16000 samples a second"),
    ):
        wrong = WhisperProcessor(WhisperFeatureExtractor(**options), loose.tokenizer)
        with pytest.raises(mmdec.InputError, match=message):
            transcribe(model=loose.model, processor=wrong)
    small = network(loose.tokenizer, vocab_size=400)
    with pytest.raises(mmdec.InputError, match="at most 400 tokens"):
        transcribe(model=small, processor=loose.processor)
    with pytest.raises(mmdec.InputError, match="`processor` must be a WhisperProcessor"):
        transcribe(model=loose.model)
    with pytest.raises(mmdec.InputError, match="`model` must be a name"):
        transcribe(model=torch.nn.Linear(1, 1), processor=loose.processor)
    loose.model.train()
    with pytest.raises(mmdec.InputError, match="must be in evaluation mode"):
        transcribe(model=loose.model, processor=loose.processor)


def test_models_on_disk(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    assert load_whisper(folder, "cpu") is load_whisper(folder, "cpu")
    assert load_whisper(folder, "cpu").model.dtype == torch.float32  # the files are in half precision
    with pytest.raises(mmdec.InputError, match="`processor` must be left out"):
        transcribe(model=folder, processor=processor())
    with pytest.raises(mmdec.InputError, match=r"is 'daspeech'. Call `mmdec.translate_speech`"):
        load_whisper(tiny_model)
    with pytest.raises(mmdec.InputError, match=r"is 'whisper'\. Call `mmdec.transcribe`"):
        mmdec.load(folder)
    with pytest.raises(mmdec.InputError, match="must be a shipped name"):
        load_whisper("whisper-giant")
    broken = write(tmp_path / "broken", with_heads=False)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(mmdec.InputError, match=r"holds a pickle, pytorch_model.bin"):
        load_whisper(broken)
    (broken / "model.safetensors").write_bytes(b"no")
    with pytest.raises(mmdec.MmdecError, match="is damaged"):
        load_whisper(broken)


def test_weights_that_are_absent_are_not_drawn(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = write(tmp_path / "half", with_heads=False)
    state = load_file(place / "model.safetensors")
    del state["model.decoder.layers.1.fc1.weight"]
    save_file(state, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(mmdec.MmdecError, match=r"lacks .model.decoder.layers.1.fc1.weight., 1 in all"):
        load_whisper(place)


def test_a_bad_one_does_not_lose_the_others(whisper: LoadedWhisper, tmp_path: Path) -> None:
    good = tmp_path / "good.wav"
    soundfile.write(good, buzz(0.6), RATE)
    with pytest.raises(mmdec.BatchError, match="1 of 3 recordings were refused, the first at index 1") as caught:
        mmdec.transcribe([good, "missing.wav", good], model=whisper, drafter="lookup", max_new_tokens=4)
    first, none, last = caught.value.results
    assert none is None
    assert first.tokens == last.tokens != []
    assert list(caught.value.errors) == [1]
    assert mmdec.transcribe([], model=whisper) == []


def test_every_kind_of_audio_is_the_same(whisper: LoadedWhisper, tmp_path: Path) -> None:
    whole = (np.round(buzz(0.6) * 32767)).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", whole, RATE)
    wanted = transcribe(whole, model=whisper)
    stereo, file = np.stack([whole, whole], 1), io.BytesIO((tmp_path / "a.wav").read_bytes())
    for audio in (torch.from_numpy(whole), stereo, (whole / 32768).astype(np.float32)):
        assert transcribe(audio, model=whisper).tokens == wanted.tokens
    assert transcribe(tmp_path / "a.wav", model=whisper, sample_rate=None).tokens == wanted.tokens
    assert transcribe(file, model=whisper, sample_rate=None).tokens == wanted.tokens
    assert wanted.seconds == pytest.approx(0.6)


@pytest.mark.parametrize("said", ["en", "English", "<|en|>", "ENGLISH"])
def test_names_of_languages(whisper: LoadedWhisper, said: str) -> None:
    assert transcribe(model=whisper, language=said).language == "en"


def test_languages_of_a_batch(whisper: LoadedWhisper) -> None:
    recordings = [buzz(0.5), buzz(1.2), buzz(0.6)]
    found = transcribe(recordings, model=whisper, language=["de", "en", "german"])
    assert [one.language for one in found] == ["de", "en", "de"]
    detected = transcribe(recordings, model=whisper, prompt="Hello")
    assert {one.language for one in detected} <= {"de", "en"}


def test_times_are_what_was_spent(whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves in the encoder's and the decoder's passes alone."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def moving(seconds: float) -> Any:
        def move(*_: Any) -> None:
            nonlocal now
            now += seconds

        return move

    hooks = [
        whisper.model.get_encoder().register_forward_hook(moving(100.0), prepend=True),
        whisper.model.get_decoder().register_forward_hook(moving(1.0), prepend=True),
    ]
    try:
        one = transcribe(model=whisper, language="en")
        assert one.timings == {
            "features": 0,
            "encoder": 100,
            "decoder": one.rounds,
            "drafter": 0,
            "total": 100 + one.rounds,
        }
        detected = transcribe(model=whisper)  # transformers encodes the window twice
        assert (detected.timings["encoder"], detected.timings["decoder"]) == (200, detected.rounds + 1)
        silent = transcribe(model=whisper, language="en", no_speech_threshold=1.0, logprob_threshold=-100.0)
        assert silent.timings["encoder"] == 200
        before = now
        batch = transcribe([buzz(0.5), buzz(1.6), buzz(2.7, 1)], model=whisper, language="en", timestamps="word")
        assert sum(one.timings["total"] for one in batch) == pytest.approx(now - before)
        assert sum(one.timings["encoder"] for one in batch) % 100 == pytest.approx(0)
        assert batch[1].timings["encoder"] < batch[2].timings["encoder"]  # fewer windows
        some = transcribe([buzz(0.5, seed) for seed in range(6)], model=whisper, language="en", max_new_tokens=60)
        rounds = [one.rounds for one in some]
        assert len(set(rounds)) > 1  # else nothing is shared unequally
        for one in some:  # a round's second is divided among those that were still in it
            own = sum(1 / sum(other >= number for other in rounds) for number in range(1, one.rounds + 1))
            assert one.timings["decoder"] == pytest.approx(own)
    finally:
        for hook in hooks:
            hook.remove()
    assert not whisper.model.get_encoder()._forward_hooks
    assert not whisper.model.get_decoder()._forward_pre_hooks


def test_usage_is_counted_by_the_loop_itself(whisper: LoadedWhisper) -> None:
    """`UsageMeter` is the `custom_generate`: nothing listens to the decoder."""
    decoder, hooks = whisper.model.get_decoder(), list[int]()
    transcribe(model=whisper, language="en", progress=lambda *_: hooks.append(len(decoder._forward_hooks)))
    assert hooks
    assert set(hooks) == {0}
    meter = UsageMeter(whisper.model, mmdec.speculate("lookup", num_speculative_tokens=3), 2)
    call = TranscriptionRequest.of(whisper, None, "en", "transcribe", None, {}, 2)
    samples = [torch.from_numpy(buzz(seconds)) for seconds in (1.7, 2.9)]
    with meter.running():
        found: Any = whisper.model.generate(
            **call.features(samples),
            **call.arguments([0, 1], long=True),
            custom_generate=meter,
            monitor_progress=meter.window,
        )
    for usage, segments in zip(meter.usage, found["segments"], strict=True):
        assert 1 < usage.windows < usage.rounds
        assert usage.tokens_per_round == usage.tokens / (usage.rounds - usage.windows) > 1
        assert usage.tokens + usage.windows >= sum(len(one["tokens"]) for one in segments)
        assert min(usage.encoder, usage.decoder, usage.drafter) > 0
    assert meter.usage[0].windows < meter.usage[1].windows


def test_equal_recordings_that_fall_back_share_alike(whisper: LoadedWhisper) -> None:
    """Rows that are decoded again are known by their features, in their order: equal ones must not be mistaken."""
    ladder: dict[str, Any] = {"temperature": (0.0, 1e-4), "logprob_threshold": -1.5, "max_new_tokens": None}
    same, other = buzz(1.2), buzz(1.4, 1)
    wanted = [transcribe(one, model=whisper, **ladder) for one in (same, other)]
    first, second, third = transcribe([same, other, same], model=whisper, **ladder)
    assert [first.rounds, second.rounds, third.rounds] == [wanted[number].rounds for number in (0, 1, 0)]
    assert [first.windows, second.windows, third.windows] == [wanted[number].windows for number in (0, 1, 0)]
    assert any(one.windows > 2 for one in wanted)  # else nothing was decoded again


def test_progress(whisper: LoadedWhisper) -> None:
    seen: list[tuple[float, float]] = []
    transcribe([buzz(2.4), buzz(0.5)], model=whisper, progress=lambda done, whole: seen.append((done, whole)))
    assert seen[0][0] == 0.0
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) >= 3
    assert seen[-1] == (pytest.approx(2.9), pytest.approx(2.9))


def until(happened: Callable[[], bool]) -> None:
    """Wait for another thread. What is asserted is that it happened, not when."""
    for _ in range(20_000):
        if happened():
            return
        time.sleep(0.001)
    raise AssertionError("it never happened")


def test_word_timestamps_wait_until_nobody_else_is_in_the_model(whisper: LoadedWhisper) -> None:
    """They change its attention; a mask made for one kind is wrong for the other."""
    begun, go, order = threading.Event(), threading.Event(), list[str]()

    def hold(done: float, whole: float) -> None:
        begun.set()
        assert go.wait(20)

    def call(name: str, **options: Any) -> None:
        transcribe(model=whisper, language="en", **options)
        order.append(name)

    plain = threading.Thread(target=call, args=("plain",), kwargs={"progress": hold})
    timed = threading.Thread(target=call, args=("words",), kwargs={"timestamps": "word"})
    plain.start()
    assert begun.wait(20)
    timed.start()
    until(lambda: model_lock(whisper.model).waiting == 1)  # it has come to the door
    assert timed.is_alive()
    assert order == []
    assert whisper.model.config._attn_implementation == "sdpa"
    go.set()
    plain.join(20)
    timed.join(20)
    assert sorted(order) == ["plain", "words"]
    assert whisper.model.config._attn_implementation == "sdpa"


def test_nobody_is_blamed_for_what_transformers_passes_itself(whisper: LoadedWhisper) -> None:
    """Recordings over a window, in two threads at once: no warning of deprecated arguments, no trace on the model."""
    heard = list[str]()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, ear = logging.getLogger("transformers.generation.utils"), Ear()
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_warning()  # whatever ran before
    logger.addHandler(ear)
    try:
        for call in (transcribe, whisper.model.generate):  # the second shows that there is something to hear
            type(logger).warning_once.cache_clear()  # type: ignore[attr-defined] # transformers', else once a process
            if call is transcribe:
                threads = [
                    threading.Thread(target=call, args=(buzz(2.5),), kwargs={"model": whisper}) for _ in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                assert heard == []
                assert "_prepare_generation_config" not in vars(whisper.model)
            else:
                features = whisper.processor(buzz(0.5), sampling_rate=RATE, return_tensors="pt").input_features
                call(features, max_new_tokens=2, language="en")
    finally:
        logger.removeHandler(ear)
        hf_logging.set_verbosity(level)
    assert any("suppress_tokens" in line for line in heard)


def test_typical_acceptance_is_not_lossless(whisper: LoadedWhisper) -> None:
    assert transcribe(model=whisper, drafter="lookup").lossless
    assert not transcribe(model=whisper, drafter="lookup", rule="typical").lossless


def test_no_hook_is_left_after_an_error(whisper: LoadedWhisper) -> None:
    def progress(done: float, whole: float) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transcribe(model=whisper, drafter="lookup", timestamps="word", progress=progress)
    assert not whisper.model.get_encoder()._forward_hooks
    assert whisper.model.config._attn_implementation == "sdpa"
    assert heads(whisper.model).config.heads == 3
