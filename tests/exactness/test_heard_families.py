"""Tests `mmdec.transcribe` with a model folder of each audio family: the tokens equal those of `generate` with the
family's processor."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.errors import InputError
from mmdec.io.audio.files import save_audio
from mmdec.pretrained.audio_lm import LoadedAudioLm, load_audio_lm
from mmdec.serving.engines import EngineOptions, TranscriptionEngine
from mmdec.serving.server import ServerLimits
from mmdec.types import Round
from tests.support.audio_lm_folders import FAMILIES, RATE, voxtral, write
from tests.support.running_servers import served, until
from tests.support.vision_drafters import DRAFTERS

LENGTHS = (9000, 16000, 12345, 31000)  # samples; windows have 32000
OPTIONS: dict[str, Any] = {"sample_rate": RATE, "max_new_tokens": 14, "num_speculative_tokens": 4}
ASKED = "Write what is said."


@pytest.fixture(scope="module")
def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(0.15 * rng.standard_normal(length)).astype(np.float32) for length in LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedAudioLm:
    folder: Path = tmp_path_factory.mktemp("hearing") / request.param
    return load_audio_lm(write(request.param, folder))


def stock(
    loaded_model: LoadedAudioLm, sounds: list[np.ndarray], prompt: str | None = None, **options: Any
) -> list[list[int]]:
    """Call `generate` with the inputs that the family's own processor makes."""
    processor: Any = loaded_model.processor
    padded = {"processor_kwargs": {"text_kwargs": {"padding": True, "padding_side": "left"}, "return_tensors": "pt"}}
    if hasattr(processor, "apply_transcription_request"):
        inputs = processor.apply_transcription_request(sounds, prompt=prompt)
    elif type(processor).__name__.startswith("Granite"):
        text = processor.apply_chat_template(
            [{"role": "user", "content": processor.audio_token + (prompt or "Transcribe the speech.")}],
            add_generation_prompt=True,
        )
        inputs = processor(
            [text] * len(sounds),
            sounds,
            text_kwargs={"padding": True, "padding_side": "left", "add_special_tokens": False},
            return_tensors="pt",
        )
    else:
        asked = {"type": "text", "text": prompt or "Transcribe the speech."}
        inputs = processor.apply_chat_template(
            [[{"role": "user", "content": [{"type": "audio", "audio": sound}, asked]}] for sound in sounds],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **padded,
        )
    made = stock_generate(loaded_model)(**inputs, **{"max_new_tokens": 14, "do_sample": False, **options})
    return [ended(loaded_model, row) for row in made[:, inputs["input_ids"].shape[1] :].tolist()]


def stock_generate(loaded_model: LoadedAudioLm) -> Any:
    model: Any = loaded_model.model
    return model.generate


def ended(loaded_model: LoadedAudioLm, tokens: list[int]) -> list[int]:
    end = loaded_model.tokenizer.eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def test_texts_are_those_of_generate(loaded_model: LoadedAudioLm, sounds: list[np.ndarray]) -> None:
    """One recording, and four of other lengths together; the model is found by its folder."""
    single = mmdec.transcribe(sounds[0], model=loaded_model.directory or "", drafter="lookup", **OPTIONS)
    assert single.tokens == stock(loaded_model, sounds[:1])[0]
    together = mmdec.transcribe(sounds, model=loaded_model, drafter="lookup", prompt=ASKED, **OPTIONS)
    assert [text.tokens for text in together] == stock(loaded_model, sounds, ASKED)
    assert len({tuple(text.tokens) for text in together}) > 1
    assert [text.seconds for text in together] == [length / RATE for length in LENGTHS]
    assert single.timings["encoder"] > 0
    assert 0 < single.confidence < 1


@pytest.mark.parametrize("name", ["recycling", "small", "eagle", "eagle3", "msd"])
def test_drafters_change_no_text(loaded_model: LoadedAudioLm, sounds: list[np.ndarray], name: str) -> None:
    """Networks that read the states, and a small language model that reads text alone."""
    expected = stock(loaded_model, sounds[:3])
    drafter: Any = DRAFTERS[name](loaded_model.model, expected)
    result = mmdec.transcribe(sounds[:3], model=loaded_model, drafter=drafter, **OPTIONS)
    assert [text.tokens for text in result] == expected


def test_options_of_generate_keep_their_meaning(loaded_model: LoadedAudioLm, sounds: list[np.ndarray]) -> None:
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    result = mmdec.transcribe(sounds[:2], model=loaded_model, drafter="lookup", **{**OPTIONS, **options})
    assert [text.tokens for text in result] == stock(loaded_model, sounds[:2], **options)
    torch.manual_seed(3)
    sampled = mmdec.transcribe(sounds[0], model=loaded_model, drafter="lookup", do_sample=True, **OPTIONS)
    torch.manual_seed(3)
    assert sampled.tokens == stock(loaded_model, sounds[:1], do_sample=True)[0]


def test_requests_of_a_server_get_the_texts_of_generate(
    loaded_model: LoadedAudioLm, sounds: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five recordings come at once, for three rows, so that some join a running batch."""
    monkeypatch.setattr(loaded_model.model.generation_config, "max_new_tokens", 14)
    engine, come = TranscriptionEngine(loaded_model, EngineOptions(threads=1)), [*sounds, sounds[0]]
    decode = loaded_model.tokenizer.decode
    expected = [decode(stock(loaded_model, [each])[0], skip_special_tokens=True) for each in come]

    def post(client: httpx.Client, sound: np.ndarray) -> str:
        file = io.BytesIO()
        soundfile.write(file, sound, RATE, format="WAV", subtype="FLOAT")
        return client.post("/v1/audio/transcriptions", files={"file": ("a.wav", file.getvalue())}).json()["text"]

    with served({"hears": engine}, ServerLimits(rows=3)) as (client, server), ThreadPoolExecutor(len(come)) as pool:
        with mmdec.model_lock(loaded_model.model).write():
            texts = [pool.submit(post, client, sound) for sound in come]
            until(lambda: server.load()["hears"].waiting == len(come))
        processor: Any = loaded_model.processor
        if hasattr(processor, "parse_output"):
            expected = [processor.parse_output(text.strip())["transcription"] for text in expected]
        assert [text.result() for text in texts] == [text.strip() for text in expected]
    assert len(set(expected)) > 1


def test_listeners_are_called_for_every_recording(loaded_model: LoadedAudioLm, sounds: list[np.ndarray]) -> None:
    rounds, finished, done = list[Round](), list[int](), list[tuple[float, float]]()
    silent = np.zeros(RATE, np.float32)
    result = mmdec.transcribe(
        [sounds[0], silent, *sounds[1:3]],
        model=loaded_model,
        drafter="lookup",
        batch_size=2,
        on_round=rounds.append,
        on_transcript=lambda index, _: finished.append(index),
        progress=lambda now, total: done.append((now, total)),
        **OPTIONS,
    )
    assert finished == [0, 1, 2, 3]
    assert result[1].text == ""
    assert "silent" in result[1].note
    for row in (0, 2, 3):
        parts = [new for round_ in rounds for each, new in zip(round_.rows, round_.tokens, strict=True) if each == row]
        assert [token for part in parts for token in part] == result[row].tokens
    assert done[-1][0] <= done[-1][1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"timestamps": "word"}, "timestamps"),
    ({"cut_at_pauses": True}, "cut_at_pauses"),
    ({"task": "translate"}, "task"),
    ({"temperature": (0.0, 0.4)}, "temperature"),
    ({"logprob_threshold": -1.0}, "logprob_threshold"),
    ({"condition_on_prev_tokens": True}, "condition_on_prev_tokens"),
    ({"input_ids": [1]}, "input_ids"),
    ({"prompt": 3}, "prompt"),
    ({"dtype": "int8"}, "dtype"),
    ({"language": "klingon"}, "language"),
    ({"num_beams": 2}, "num_beams"),
    ({"no_such_option": 2}, "no_such_option"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_meaningless_options_are_refused(
    loaded_model: LoadedAudioLm, sounds: list[np.ndarray], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named) as refusal:
        mmdec.transcribe(sounds[0], model=loaded_model, drafter="lookup", **{**OPTIONS, **options})
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("family", ["Qwen2Audio", "AudioFlamingo3"])
def test_recordings_the_processor_would_truncate_are_refused(
    family: str, tmp_path: Path, sounds: list[np.ndarray]
) -> None:
    heard = load_audio_lm(write(family, tmp_path / family))
    if family == "AudioFlamingo3":
        heard.processor.max_audio_len = 2  # type: ignore[attr-defined]
    long = np.concatenate([sounds[3], sounds[0]])
    with pytest.raises(mmdec.BatchError, match="at most 2 seconds") as refusal:
        mmdec.transcribe([sounds[0], long], model=heard, drafter="lookup", **OPTIONS)
    assert refusal.value.results[0].tokens == stock(heard, sounds[:1])[0]


def test_a_language_is_the_processors(tmp_path: Path, sounds: list[np.ndarray]) -> None:
    heard = load_audio_lm(write("Qwen3ASR", tmp_path / "asr"))
    processor: Any = heard.processor
    result = mmdec.transcribe(sounds[:2], model=heard, language=["de", "English"], drafter="lookup", **OPTIONS)
    inputs = processor.apply_transcription_request(sounds[:2], language=["de", "English"])
    made = stock_generate(heard)(**inputs, max_new_tokens=14, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert [text.tokens for text in result] == [ended(heard, row) for row in made.tolist()]
    assert [text.language for text in result] == ["de", "en"]


def test_the_public_load_takes_the_folder(tmp_path: Path) -> None:
    folder = write("Qwen2Audio", tmp_path / "heard")
    assert isinstance(mmdec.load(folder), LoadedAudioLm)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapter"):
        mmdec.load(folder)


def test_the_command_takes_the_folder(tmp_path: Path, sounds: list[np.ndarray]) -> None:
    folder, paths = write("GraniteSpeech", tmp_path / "heard"), list[str]()
    for index, sound in enumerate(sounds[:2]):
        paths.append(str(save_audio(tmp_path / f"{index}.wav", sound, RATE)))
    given = ["--model", str(folder), "--drafter", "lookup", "--device", "cpu"]
    completed = CliRunner().invoke(cli.app, ["transcribe", *paths, *given, "--json"])
    assert completed.exit_code == 0, completed.output
    result = mmdec.transcribe(paths, model=folder, drafter=None, device="cpu")
    assert [json.loads(line)["tokens"] for line in completed.stdout.splitlines()] == [text.tokens for text in result]
    refused = CliRunner().invoke(cli.app, ["transcribe", paths[0], *given, "--timestamps", "word"])
    assert refused.exit_code != 0
    assert "`--timestamps` must be None for GraniteSpeech" in str(refused.exception or refused.output)


@pytest.mark.skipif(find_spec("mistral_common") is not None, reason="mistral-common is installed")
def test_a_processor_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pip install mistral-common"):
        load_audio_lm(voxtral(tmp_path))


@pytest.mark.skipif(find_spec("mistral_common") is None, reason="Voxtral's processor needs mistral-common")
def test_voxtral_has_its_makers_tokenizer(tmp_path: Path, sounds: list[np.ndarray]) -> None:
    heard = load_audio_lm(voxtral(tmp_path))
    processor: Any = heard.processor
    for language in (None, "fr"):
        result = mmdec.transcribe(sounds, model=heard, drafter="lookup", language=language, **OPTIONS)
        asked = {"model_id": "", "format": ["wav"] * len(sounds), "sampling_rate": RATE, "language": language}
        inputs = processor.apply_transcription_request(sounds, **asked)
        made = stock_generate(heard)(**inputs, max_new_tokens=14, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        assert [text.tokens for text in result] == [ended(heard, row) for row in made.tolist()]
    wrongs: list[dict[str, Any]] = [{"prompt": ASKED}, {"language": "klingon"}]
    for wrong in wrongs:
        with pytest.raises(InputError, match=next(iter(wrong))):
            mmdec.transcribe(sounds[0], model=heard, drafter="lookup", **OPTIONS, **wrong)
