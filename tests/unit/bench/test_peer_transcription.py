"""Tests `bench peer` on a tiny Whisper with a stand-in for the other engine; no test depends on times."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.bench import peer_transcription as engines
from mmdec.bench.report import WALL_CLOCK
from mmdec.errors import InputError
from mmdec.evaluation.harness import Method
from mmdec.evaluation.transcription import TranscriptionHarness
from mmdec.io.audio import save_audio
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.tiny_whisper import FRAMES, write

pytestmark = pytest.mark.slow

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whisper(folder: Path) -> LoadedWhisper:
    return load_whisper(folder, "cpu")


def noise(seconds: float, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(seed))


def files(folder: Path, *seconds: float) -> list[Path]:
    """Recordings; a transcript lies beside the first."""
    paths = [save_audio(folder / f"{number}.wav", noise(length, number)) for number, length in enumerate(seconds)]
    paths[0].with_suffix(".txt").write_text("where is the station", encoding="utf-8")
    return paths


def echo(monkeypatch: pytest.MonkeyPatch, says: dict[str, str | None]) -> None:
    """CTranslate2's place is taken: by what each of its engines says, None for transformers' own text."""

    def calls(_: Any, converted: Path, harness: TranscriptionHarness, threads: Sequence[int]) -> dict[Any, Any]:
        assert not converted.exists()

        def write_text(text: str | None, samples: Tensor) -> str:
            return harness.measure([samples], Method.greedy()).texts[0] if text is None else text

        return {
            (name, count): lambda samples, text=text: write_text(text, samples)
            for name, text in says.items()
            for count in threads
        }

    monkeypatch.setattr(engines, "peer_calls", calls)


def test_texts_words_and_seconds_of_each_engine_are_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo(monkeypatch, {engines.PEER: None, engines.PEER_INT8: "where was the station"})
    paths = files(tmp_path, 0.5, 0.75, 2.5)  # the last: windows of a second
    report = engines.bench_peer(paths, folder, "ctranslate2", repeats=1)
    equal = {gate.label: gate.equal for gate in report.exactness}
    assert equal["texts of mmdec float32 and of transformers"] == 3
    assert equal["texts of ctranslate2 float32 and of transformers"] == 3
    assert equal["texts of ctranslate2 int8 and of transformers"] == 0
    figures = {entry.name: entry for entry in report.quantities}
    assert figures["words wrong, ctranslate2 int8"].value == 25
    assert figures["words wrong, mmdec float32"].n == 1
    row = next(
        row
        for row in report.comparisons
        if (row.group, row.timed, row.baseline) == ("more than 30 s", WALL_CLOCK, engines.PEER)
    )
    assert row.inputs == 1
    assert row.times == pytest.approx(row.baseline_ms / row.subject_ms)  # type: ignore[operator]
    assert {(side["engine"], side["threads"]) for side in report.details["sides"]} == {
        (name, count)
        for name in (engines.STOCK, engines.OURS, engines.OURS_INT8, engines.PEER, engines.PEER_INT8)
        for count in (1, 2)
    }


@pytest.mark.parametrize("seconds", [1.5, 2.25, 3.7, 5.0])
def test_windows_follow_each_other_as_in_transformers(whisper: LoadedWhisper, seconds: float) -> None:
    harness, model = TranscriptionHarness(whisper, max_new_tokens=20), whisper.model
    settings: Any = model.generation_config
    prompt = [settings.decoder_start_token_id, settings.lang_to_id["<|en|>"], settings.task_to_id["transcribe"]]

    def decode(window: Tensor) -> list[int]:
        assert window.shape == (1, 80, FRAMES)
        output: Any = model.generate(
            window,
            language="en",
            task="transcribe",
            return_timestamps=True,
            max_new_tokens=20,
            force_unique_generate_call=True,
        )
        tokens = output[0].tolist()[len(prompt) :]
        return tokens[: tokens.index(settings.eos_token_id)] if settings.eos_token_id in tokens else tokens

    for seed in range(6):
        samples = noise(seconds, seed)
        tokens = engines.long_form(decode, harness.features(samples), FRAMES, settings.no_timestamps_token_id + 1)
        text = whisper.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert text == harness.measure([samples], Method.greedy()).texts[0]


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = files(tmp_path, 0.5)
    for given, peer, problem in (
        (paths, "whisper.cpp", "must be one of ctranslate2"),
        ([], "ctranslate2", "must be named"),
    ):
        with pytest.raises(InputError, match=problem):
            engines.bench_peer(given, folder, peer, repeats=1)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(InputError, match="pip install"):
        engines.bench_peer(paths, folder, "ctranslate2", repeats=1)
