"""Tests the inputs that `mmdec.transcribe` refuses with one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperProcessor

import mmdec
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import network, processor, write
from tests.unit.whisper.short_transcripts import transcribe

BAD_SOUND: list[tuple[Any, str]] = [
    (np.full(RATE, np.nan, np.float32), "must hold finite numbers"),
    (np.zeros(0, np.float32), "must hold at least one sample"),
    (np.ones(100, np.float32), "must last at least"),
    (np.ones((3, 4, 5), np.float32), "must have shape"),
    (np.array(["a"]), "must hold floats or integers"),
    ("missing.wav", "must be an existing file"),
    (None, "must be a path"),
]


@pytest.mark.parametrize(("audio", "message"), BAD_SOUND)
def test_bad_sound_is_refused(whisper: LoadedWhisper, audio: Any, message: str) -> None:
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
        ({"max_new_tokens": 4000}, "`max_new_tokens` must be at most 60 after 4 tokens"),
        ({"max_length": "x"}, "`max_length` must be a number of tokens"),
        ({"bad_words_ids": [[10**7]]}, "bad_words_ids.*vocabulary"),
        ({"sequence_bias": {(10**7,): -1.0}}, "sequence_bias.*vocabulary"),
        ({"guidance_scale": 2.0}, "`guidance_scale` must be left out"),
        ({"decoder_start_token_id": 10**7}, "`decoder_start_token_id` must be left out"),
        ({"drafter": "eagle"}, "`drafter` must be a folder for eagle, which has weights"),
        ({"rule": "best"}, "`rule` must be one of"),
        ({"device": "tpu"}, "`device` must be"),
        ({"sample_rate": None}, "`sample_rate` must be given"),
        ({"prompt": "x", "prompt_condition_type": "all-segments"}, "condition_on_prev_tokens"),
        ({"prompt_condition_type": "none"}, "`prompt_condition_type` must be one of"),
    ],
)
def test_bad_arguments_are_refused(whisper: LoadedWhisper, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mmdec.InputError, match=message):
        transcribe(model=whisper, **options)


def test_a_rate_is_for_samples(whisper: LoadedWhisper) -> None:
    with pytest.raises(mmdec.InputError, match="`sample_rate` must be left out for files"):
        transcribe("x.wav", model=whisper)


def test_incomplete_models_are_refused(loose: LoadedWhisper) -> None:
    known: Any = loose.model.generation_config
    known.alignment_heads = [[9, 0]]  # as of a distilled model with the settings of the large one
    assert transcribe(model=loose, timestamps="segment").segments
    with pytest.raises(mmdec.InputError, match="names `alignment_heads` beyond its 2 decoder layers"):
        transcribe(model=loose, timestamps="word")
    del known.alignment_heads
    with pytest.raises(mmdec.InputError, match="names no `alignment_heads`"):
        transcribe(model=loose, timestamps="word")
    known.is_multilingual = False
    with pytest.raises(mmdec.InputError, match="for a model"):
        transcribe(model=loose, task="translate")
    assert transcribe(model=loose, language="en").tokens == transcribe(model=loose).tokens
    with pytest.raises(mmdec.InputError, match="`language` must be one that the model knows"):
        transcribe(model=loose, language="de")
    known.is_multilingual, languages = True, known.lang_to_id
    known.lang_to_id = {"<|en|>": languages["<|en|>"]}
    with pytest.raises(mmdec.InputError, match="English-only"):
        transcribe(model=loose, task="translate")
    known.is_multilingual = False
    del known.lang_to_id
    assert transcribe(model=loose).language is None
    del known.no_timestamps_token_id
    with pytest.raises(mmdec.InputError, match="`timestamps` must be None"):
        transcribe(model=loose, timestamps="segment")
    with pytest.raises(mmdec.BatchError, match="at most 1 seconds") as caught:
        transcribe([buzz(0.5), buzz(1.5)], model=loose)
    assert caught.value.results[0].tokens
    assert caught.value.results[1] is None


def test_a_generation_config_asking_for_an_output_object_is_accepted(loose: LoadedWhisper) -> None:
    known: Any = loose.model.generation_config
    wanted = transcribe(model=loose).tokens
    known.return_dict_in_generate = True
    assert transcribe(model=loose).tokens == wanted


def test_heads_of_another_whisper_are_refused(loose: LoadedWhisper, tmp_path: Path, whisper: LoadedWhisper) -> None:
    assert whisper.directory is not None
    other = network(loose.tokenizer, d_model=16)
    with pytest.raises(mmdec.InputError, match="must have 32 channels for this drafter, but has 16"):
        transcribe(model=other, processor=loose.processor, drafter=whisper.directory / "medusa")
    with pytest.raises(mmdec.InputError, match="'medusa' has none: the caller loaded it"):
        transcribe(model=loose, drafter="medusa")
    bare = write(tmp_path / "bare", with_heads=False)
    with pytest.raises(mmdec.InputError, match=r"neither '.*bare.medusa' nor '.*bare-medusa' is there"):
        transcribe(model=bare, drafter="medusa", device="cpu")


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_processors_of_another_whisper_are_refused(loose: LoadedWhisper) -> None:
    for options, message in (
        ({"feature_size": 128, "chunk_length": 1}, "must have 80 mels for this model, but has 128"),
        ({"feature_size": 80}, "must have 100 frames in a window for this model, but has 3000"),
        ({"feature_size": 80, "chunk_length": 2, "sampling_rate": 8000}, "16000 samples per second"),
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


def test_folders_are_loaded_once_and_wrong_ones_are_refused(folder: Path, tmp_path: Path, tiny_model: Path) -> None:
    assert load_whisper(folder, "cpu") is load_whisper(folder, "cpu")
    assert load_whisper(folder, "cpu").model.dtype == torch.float32  # the files are in half precision
    with pytest.raises(mmdec.InputError, match="`processor` must be left out"):
        transcribe(model=folder, processor=processor())
    with pytest.raises(mmdec.InputError, match=r"is 'daspeech'. Call `mmdec.translate_speech`"):
        load_whisper(tiny_model)
    assert mmdec.load(folder, "cpu") is load_whisper(folder, "cpu")
    with pytest.raises(mmdec.InputError, match="must be a shipped name"):
        load_whisper("whisper-giant")
    broken = write(tmp_path / "broken", with_heads=False)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(mmdec.InputError, match=r"holds a pickle, pytorch_model.bin"):
        load_whisper(broken)
    (broken / "model.safetensors").write_bytes(b"no")
    with pytest.raises(mmdec.MmdecError, match="is damaged"):
        load_whisper(broken)


def test_absent_weights_are_not_initialised_randomly(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = write(tmp_path / "half", with_heads=False)
    state = load_file(place / "model.safetensors")
    del state["model.decoder.layers.1.fc1.weight"]
    save_file(state, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(mmdec.MmdecError, match=r"lacks .model.decoder.layers.1.fc1.weight., 1 in all"):
        load_whisper(place)


def test_a_bad_recording_does_not_lose_the_others(whisper: LoadedWhisper, tmp_path: Path) -> None:
    good = tmp_path / "good.wav"
    soundfile.write(good, buzz(0.6), RATE)
    with pytest.raises(mmdec.BatchError, match="1 of 3 recordings were rejected, the first at index 1") as caught:
        mmdec.transcribe([good, "missing.wav", good], model=whisper, drafter="lookup", max_new_tokens=4)
    first, none, last = caught.value.results
    assert none is None
    assert first.tokens == last.tokens != []
    assert list(caught.value.errors) == [1]
    assert mmdec.transcribe([], model=whisper) == []
