"""Tests Whisper's encoder on less than a window: the number of frames that it gets, and the fallback if they are too
few."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor

import mmdec
from mmdec.whisper import live
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.features import recording_features
from mmdec.whisper.repetition import has_end_token, is_runaway
from mmdec.whisper.window_encoder import WindowEncoder, can_shorten, context_frames, encode
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import write


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """Windows of four seconds."""
    return load_whisper(write(tmp_path_factory.mktemp("models") / "four", with_heads=False, seconds=4), "cpu")


def features(whisper: LoadedWhisper, seconds: float) -> torch.Tensor:
    return whisper.extractor(buzz(seconds), sampling_rate=RATE, return_tensors="pt").input_features


@pytest.mark.parametrize(
    ("seconds", "margin", "frames"),
    [(0.5, 1.0, 200), (0.5, 0.0, 100), (1.7, 1.0, 300), (0.5, 9.0, 400), (4.0, 0.0, 400)],
)
def test_whole_seconds_after_the_last_sound_are_read(
    whisper: LoadedWhisper, seconds: float, margin: float, frames: int
) -> None:
    assert context_frames(features(whisper, seconds), margin) == frames


def test_silence_reads_the_margin_alone() -> None:
    assert context_frames(torch.zeros(1, 80, 400), 1.0) == 100


def test_all_frames_equal_the_encoders_states(whisper: LoadedWhisper) -> None:
    heard = features(whisper, 1.0)
    with torch.inference_mode():
        own = whisper.model.get_encoder()(heard).last_hidden_state
        assert torch.allclose(encode(whisper.model.get_encoder(), heard, 400), own, atol=1e-6)
        short = encode(whisper.model.get_encoder(), heard, 200)
    assert short.shape[1] == 100


def test_the_callers_own_encoder_is_left_alone(whisper: LoadedWhisper) -> None:
    encoder: Any = whisper.model.get_encoder()
    assert can_shorten(encoder)
    layer = encoder.layers[0]
    layer.forward = layer.forward
    try:
        assert not can_shorten(encoder)
        heard = features(whisper, 0.5)
        own = WindowEncoder(whisper.model, margin=0.0)
        with torch.inference_mode():
            states = own(heard)
            assert torch.equal(states, encoder(heard).last_hidden_state)
        assert own.encoded_seconds(states) is None
    finally:
        del layer.forward


@pytest.mark.parametrize(
    ("tokens", "seconds", "found"),
    [
        (list(range(20)), 3.0, False),
        ([7, 8, 9] * 12, 30.0, True),  # it repeats itself
        (list(range(100)), 3.0, True),  # nobody speaks so fast
        ([], 1.0, False),
        ([5], 0.0, False),
    ],
)
def test_runaway_texts_are_recognised(tokens: list[int], seconds: float, found: bool) -> None:
    assert is_runaway(tokens, seconds, 51_865) is found


def test_a_text_ends_with_any_end_token() -> None:
    class Config:
        eos_token_id: Any = 3

    config = Config()
    assert has_end_token([1, 3], config)
    assert not has_end_token([3, 1], config)
    assert not has_end_token([], config)
    config.eos_token_id = [4, 1]
    assert has_end_token([3, 1], config)


def test_hooks_within_the_encoder_see_their_passes(whisper: LoadedWhisper) -> None:
    """Stock layers take the fast path, others run unchanged; hooks on the encoder count whole windows."""
    encoder: Any = whisper.model.get_encoder()
    heard, seen = features(whisper, 1.0), list[str]()
    options: dict[str, Any] = {"sample_rate": RATE, "model": whisper, "language": "en"}
    plain = mmdec.transcribe(buzz(0.5), **options).tokens
    for name in ("", "layers.0", "layers.0.self_attn", "layers.0.fc1", "layers.0.self_attn.q_proj", "conv1"):
        hook = encoder.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        try:
            assert mmdec.transcribe(buzz(0.5), **options).tokens == plain
        finally:
            hook.remove()
        assert seen == [name]
        seen.clear()
    with torch.inference_mode():
        half: Any = copy.deepcopy(encoder).to(torch.bfloat16)
        states = encode(half, heard.bfloat16(), 400)
        assert torch.allclose(states, half(heard.bfloat16()).last_hidden_state, atol=0.1)


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_runaway_provisional_text_is_that_of_the_whole_window(
    whisper: LoadedWhisper, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where provisional text did not end, or repeats itself, it is that of the whole window. These random weights do
    both."""
    monkeypatch.setattr(live, "PROVISIONAL_MARGIN", 0.0)
    options: dict[str, Any] = {"model": whisper, "language": "en", "drafter": drafter}
    for seed in range(4):
        sound = buzz(1.0, seed)
        first = next(iter(mmdec.transcribe_stream([sound, sound], every=0.2, **options)))
        assert not first.final
        short, whole = first.transcript, mmdec.transcribe(sound, sample_rate=RATE, **options)
        text = [token for token in short.tokens if token < whisper.model.config.vocab_size - 201]
        assert short.tokens == whole.tokens or not is_runaway(text, first.end, whisper.model.config.vocab_size)


@pytest.mark.parametrize("samples", [1, 159, 161, 10_240, 10_241, 48_000, 470_000, 479_600, 479_999, 480_000, 500_000])
def test_window_features_equal_the_extractors(samples: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=80)
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1
    whole = extractor(sound.numpy(), sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    found = recording_features(extractor, sound, 16_000, long=False)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in whole.items()}
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_dithered_features_are_computed_whole() -> None:
    extractor = WhisperFeatureExtractor(feature_size=80, dither=1.0)
    found = recording_features(extractor, torch.zeros(16_000), 16_000, long=False)["input_features"]
    assert not torch.equal(found[..., 2000], found[..., 2500])  # the silence has noise of its own
