"""The outside judge, on a tiny Whisper of random weights, and the cascade with a tiny translator that reads text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

from mmdec import cli
from mmdec.daspeech.piece_reader import unit_limits
from mmdec.daspeech.translate import load_translator
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.daspeech.units import NUM_SPECIAL_UNITS
from mmdec.errors import InputError
from mmdec.evaluation import judge as judge_transcription
from mmdec.evaluation.judge import Cascade, Judge, comparison_systems, speak, translate_text
from mmdec.whisper.transcribe import transcribe
from tests.conftest import RATE, buzz
from tests.support import tiny_piece_translator as tiny_heard
from tests.support import tiny_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Whisper of two languages: French stands where its tokenizer has another token."""
    directory = tiny_whisper.write(tmp_path_factory.mktemp("judge") / "tiny-judge", with_heads=False)
    settings = GenerationConfig.from_pretrained(directory)
    languages: dict[str, int] = dict(settings.lang_to_id)  # type: ignore[attr-defined] # Whisper's own
    settings.lang_to_id = {"<|en|>": languages["<|en|>"], "<|fr|>": languages["<|de|>"]}  # type: ignore[attr-defined]
    settings.save_pretrained(directory)
    return directory


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "x.wav"
    soundfile.write(path, buzz(0.9), RATE)
    return path


def test_the_judge_hears_english_and_translates_french(
    folder: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def listen(audio: Any, **options: Any) -> Any:
        asked.append({name: options.get(name) for name in ("language", "task", "drafter")})
        return transcribe(audio, **options)

    monkeypatch.setattr(judge_transcription, "transcribe", listen)
    judge = Judge(folder, "cpu", 1)
    assert judge.name == "tiny-judge"
    french, translation = judge.french(recording), judge.translate(recording)
    samples, _ = soundfile.read(recording, dtype="float32")
    assert judge.transcribe(samples)
    assert (bool(french), bool(translation.text), translation.audio, translation.units) == (True, True, None, [])
    assert asked == [
        {"language": "fr", "task": None, "drafter": None},
        {"language": "fr", "task": "translate", "drafter": None},
        {"language": "en", "task": None, "drafter": None},
    ]


def test_the_judge_hears_nothing_in_silence(folder: Path) -> None:
    judge = Judge(folder, "cpu", 1)
    assert judge.transcribe(np.zeros(0, np.float32)) == judge.transcribe(np.zeros(RATE, np.float32)) == ""


def test_a_judge_of_english_hears_and_is_not_compared_with(tmp_path: Path, translator: SpeechTranslator) -> None:
    judge = Judge(tiny_whisper.write(tmp_path / "english", with_heads=False), "cpu", 1)
    assert judge.transcribe(buzz(0.9))
    assert comparison_systems(judge, translator) == {}
    with pytest.raises(InputError, match="`judge` must be a Whisper of French and English"):
        judge.check_french()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heard.write(tmp_path_factory.mktemp("heard") / "tiny")


@pytest.fixture(scope="module")
def translator(hearing: Path) -> SpeechTranslator:
    return load_translator(hearing, "cpu")


def test_the_cascade_translates_the_judges_transcript(
    folder: Path, recording: Path, translator: SpeechTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(folder, "cpu", 1)
    monkeypatch.setattr(Judge, "french", lambda judge, clip: "Où est la gare ?")
    systems = comparison_systems(judge, translator)
    assert list(systems) == ["tiny-judge", "cascade"]
    out = systems["cascade"](recording)
    assert out.text == translate_text(translator.parts, "où est la GARE?") != ""  # type: ignore[arg-type] # of the tiny one
    assert out.audio is not None
    assert np.array_equal(out.audio, speak(translator, out.text))
    assert list(out.timings) == ["recogniser", "text", "voice"]


def test_a_translator_of_phones_has_no_cascade(folder: Path, tiny_model: Path) -> None:
    assert list(comparison_systems(Judge(folder, "cpu", 1), load_translator(tiny_model, "cpu"))) == ["tiny-judge"]


def test_text_is_read_by_the_translators_own_networks(translator: SpeechTranslator) -> None:
    parts: Any = translator.parts
    numbers = parts.pieces.encode("bonjour madame ?")
    lengths = torch.tensor([len(numbers)])
    with torch.inference_mode():
        states = parts.model.encode(torch.tensor([numbers]), lengths)
        (units,) = parts.model.autoregressive.generate(states, lengths, unit_limits(lengths)[0])
    assert translate_text(parts, "Bonjour, madame ?") == parts.english.decode(
        [unit for unit in units if unit >= NUM_SPECIAL_UNITS]
    )
    assert translate_text(parts, "...") == ""


def test_an_empty_text_is_silent(translator: SpeechTranslator) -> None:
    samples = speak(translator, "Hello there.")
    assert samples.dtype == np.float32
    assert 0 < np.abs(samples).max() <= 1
    assert len(speak(translator, "")) == 0
    silent = Cascade(lambda clip: "", lambda text: json.dumps(text), lambda text: speak(translator, text))
    assert silent(Path("x.wav")).text == ""


@pytest.mark.slow
def test_the_command_compares_all_systems_on_a_manifest(folder: Path, hearing: Path, tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    (tmp_path / "said" / "test.tsv").write_text("1\tg\tBonjour.\tHello there.\n2\tg\tLà.\tThere.\tLow there.\n")
    for number in (1, 2):
        soundfile.write(tmp_path / f"said-{number}.wav", buzz(0.9, number), RATE)
    rows = ["path\tsplit\ttext", *(f"said-{number}.wav\ttest\tBonjour." for number in (1, 2))]
    (tmp_path / "manifest.tsv").write_text("\n".join(rows) + "\n")
    call = ["eval", "speech", "--corpus", tmp_path / "manifest.tsv", "--text", tmp_path / "said", "--model", hearing]
    call += ["--judge", folder, "--device", "cpu", "--threads", "1", "--json", tmp_path / "report.json"]
    result = CliRunner().invoke(cli.app, [str(word) for word in call])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["systems"]) == [
        "beam",
        "lookahead",
        "reranked",
        "autoregressive",
        "verified",
        "tiny-judge",
        "cascade",
    ]
    spoken = [name for name, scores in report["systems"].items() if "asr_bleu" in scores]
    assert set(spoken) <= {"beam", "lookahead", "reranked", "autoregressive", "verified", "cascade"}
    assert spoken
    assert report["recogniser"]["name"] == "tiny-judge"
    assert all(0 <= scores["bleu"]["value"] <= 100 for scores in report["systems"].values())
    assert report["systems"]["verified"]["chrf"] == {**report["systems"]["autoregressive"]["chrf"]}  # the same text
    assert "cascade" in result.output
