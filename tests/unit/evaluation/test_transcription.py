"""Tests `eval asr` on a tiny Whisper: counts, comparisons and refusals; no test depends on times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.cli.evaluate import asr_table
from mmdec.errors import InputError
from mmdec.evaluation import transcription as measuring
from mmdec.evaluation.harness import Method, parse_plan
from mmdec.evaluation.options import AsrEvalOptions
from mmdec.evaluation.transcription import TranscriptionHarness, evaluate_asr
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.tiny_whisper import write

RATE = 16_000
SECONDS = (0.5, 0.9, 2.3, 0.7)  # the window is one second
SPENT = {"features": 1.0, "encoder": 2.0, "decoder": 3.0, "drafter": 4.0, "total": 16.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whisper(model: Path) -> LoadedWhisper:
    return load_whisper(model, "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, whisper: LoadedWhisper) -> Path:
    """LibriSpeech's layout. Of split "own" the references are the model's own words."""
    root = tmp_path_factory.mktemp("corpus")
    harness = TranscriptionHarness(whisper, "en", 12)
    for split in ("test", "own"):
        chapter = root / split / "ann" / "1"
        chapter.mkdir(parents=True)
        lines = []
        for number, seconds in enumerate(SECONDS):
            samples = 0.1 * np.random.default_rng(number).standard_normal(round(seconds * RATE)).astype(np.float32)
            soundfile.write(chapter / f"ann-1-{number:04}.wav", samples, RATE, subtype="FLOAT")
            text = "Somebody says something else entirely."
            if split == "own":
                text = harness.measure([torch.from_numpy(samples)], Method.greedy()).texts[0]
            lines.append(f"ann-1-{number:04} {' '.join(text.split())}")
        (chapter / "ann-1.trans.txt").write_text("\n".join(lines), encoding="utf-8")
    return root


def score(corpus: Path, model: Any, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"split": "own", "corpus": corpus, "max_new_tokens": 12, "threads": 1, **more}
    return evaluate_asr(model, AsrEvalOptions(**options))


def test_a_model_makes_no_errors_on_its_own_transcripts(corpus: Path, whisper: LoadedWhisper) -> None:
    report = score(corpus, whisper)
    assert report["n"] == len(SECONDS)
    assert report["source_seconds"] == pytest.approx(sum(SECONDS), abs=1e-3)
    assert report["wer_raw"]["value"] == report["cer_raw"]["value"] == report["wer"]["value"] == 0.0
    assert report["exact_raw"]["value"] == 1.0
    assert report["worst"] == []
    assert report["identical"] == {"count": 4, "n": 4}
    ours, theirs = report["decoding"]["medusa"], report["decoding"]["greedy"]
    assert ours["tokens_per_round"] >= 1
    assert ours["decoder_passes"] <= theirs["decoder_passes"]
    assert theirs["tokens_per_round"] is None
    for cost in (ours, theirs):
        spent = cost["seconds"]
        assert spent["features"] + spent["encoder"] + spent["decoder"] <= spent["total"]  # which holds reading, too
        assert cost["decoder_share"] == pytest.approx(spent["decoder"] / spent["total"])
        assert min(seconds for stage, seconds in spent.items() if stage != "drafter") > 0
    assert theirs["seconds"]["drafter"] == 0.0  # plain decoding asks no drafter
    faster = report["speedup"]["decoder"]
    assert faster["low"] <= faster["value"] <= faster["high"]
    assert faster["value"] == pytest.approx(theirs["seconds"]["decoder"] / ours["seconds"]["decoder"])


def test_errors_are_counted_and_the_worst_are_named(corpus: Path, whisper: LoadedWhisper) -> None:
    report = score(corpus, whisper, split="test", worst=2, batch_size=3, plain=False)
    wer = report["wer_raw"]
    assert wer["length"] == 5 * len(SECONDS)
    assert wer["value"] == (wer["substitutions"] + wer["deletions"] + wer["insertions"]) / wer["length"]
    errors = [row["errors"] for row in report["worst"]]
    assert len(errors) == 2
    assert errors == sorted(errors, reverse=True)
    assert report["by_speaker"] == {"ann": {"n": 4, "wer": report["wer"]["value"]}}
    assert list(report["decoding"]) == ["medusa"]
    assert "speedup" not in report
    assert report["hardware"]["batch"] == 3


def test_batches_give_what_one_by_one_gives(corpus: Path, whisper: LoadedWhisper) -> None:
    batched = score(corpus, whisper, batch_size=4, limit=2)
    assert batched["n"] == 2
    assert batched["wer_raw"]["value"] == 0.0
    assert batched["identical"] == {"count": 2, "n": 2}


def test_a_recording_that_cannot_be_read_is_an_empty_transcript(
    tmp_path: Path, corpus: Path, whisper: LoadedWhisper
) -> None:
    good = next(corpus.rglob("own/ann/1/*.wav"))
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    lines = [{"path": str(good), "text": "Two words", "speaker": "a"}, {"path": "bad.wav", "text": "Three more words"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = score(tmp_path / "list.jsonl", whisper, split="", batch_size=2, allow_absolute_paths=True)
    assert list(report["refused"]) == ["bad.wav"]
    assert report["wer_raw"]["deletions"] >= 3
    assert report["identical"]["n"] == 1
    console = Console(width=100, record=True)
    console.print(asr_table(report))
    assert "refused bad.wav" in console.export_text()


def test_a_model_without_heads_is_scored_by_transformers_own_loop(tmp_path: Path, corpus: Path) -> None:
    report = score(corpus, write(tmp_path / "bare", with_heads=False), limit=1)
    assert list(report["decoding"]) == ["greedy"]
    with pytest.raises(InputError, match="heads"):
        score(corpus, tmp_path / "bare", heads=tmp_path)


def test_the_commands_print_and_write_json(corpus: Path, whisper: LoadedWhisper, model: Path, tmp_path: Path) -> None:
    call = ["eval", "asr", "--split", "own", "--corpus", corpus, "--model", model]
    call += ["--max-new-tokens", "12", "--threads", "1", "--plan", "4x2", "--limit", "1", "--json"]
    done = [CliRunner().invoke(cli.app, [str(part) for part in (*call, to)]) for to in ("-", tmp_path / "e.json")]
    assert [result.exit_code for result in done] == [0, 0], done[0].output
    printed, written = json.loads(done[0].stdout), json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))
    assert (printed.keys(), printed["wer"]) == (written.keys(), written["wer"])
    assert "word error rate" in done[1].stdout


def test_passes_windows_and_rounds_are_counted(whisper: LoadedWhisper) -> None:
    harness = TranscriptionHarness(whisper, "en", 12)
    sounds = [torch.randn(RATE // 2), torch.randn(RATE // 3)]
    plain = harness.measure(sounds, Method.greedy())
    assert plain.passes == 12
    assert plain.windows == 1
    assert (plain.rounds, plain.tokens_per_round) == (0, 1.0)
    ours = harness.measure(sounds, Method.with_drafter("chain", "lookup", 2))
    assert ours.tokens == plain.tokens
    assert ours.texts == plain.texts
    assert ours.drafted_tokens == 2 * 11
    assert ours.rounds <= 22


def test_methods_agree_on_recordings_of_all_lengths(whisper: LoadedWhisper) -> None:
    """Loud ones too, whose level `transcribe` brings down."""
    harness = TranscriptionHarness(whisper, None, 12)
    sounds = [4 * torch.randn(RATE // 2), torch.randn(5 * RATE // 2), torch.randn(RATE // 3), torch.randn(3 * RATE)]
    plain, ours = (
        harness.measure(sounds, method) for method in (Method.greedy(), Method.with_drafter("chain", "lookup", 2))
    )
    assert ours.tokens == plain.tokens
    assert ours.texts == plain.texts
    assert ours.drafted_tokens == round(ours.tokens_per_round * ours.rounds) > 0


def test_what_is_scored_and_timed_is_the_public_call(
    corpus: Path, whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure of mmdec's comes from what `mmdec.transcribe` returns."""
    calls: list[dict[str, Any]] = []

    def listen(audio: Any, **options: Any) -> Any:
        result = [
            replace(transcript, text="Zebra", timings=SPENT, rounds=9, windows=1)
            for transcript in transcribe(audio, **options)
        ]
        calls.append(options)
        return result

    transcribe = mmdec.transcribe
    monkeypatch.setattr(measuring, "transcribe", listen)
    report = score(corpus, whisper, batch_size=2)
    assert len(calls) == 1 + 3  # a warm-up; two batches, of which one has a recording of more than a window
    assert {call["batch_size"] for call in calls} == {1, 2}
    assert report["wer"]["value"] > 0.5
    spent = report["decoding"]["medusa"]["seconds"]
    assert {stage: spent[stage] for stage in ("features", "encoder", "decoder", "drafter")} == {
        "features": 4 * 1.0,
        "encoder": 4 * 2.0,
        "decoder": 4 * 13.0,
        "drafter": 4 * 4.0,
    }
    assert report["decoding"]["medusa"]["rounds"] == 4 * 8


def test_provenance_says_what_ran(corpus: Path, tmp_path: Path) -> None:
    loaded = load_whisper(write(tmp_path / "half"), "cpu")
    whisper = LoadedWhisper(loaded.model.to(torch.bfloat16), loaded.processor, loaded.directory)
    report = score(corpus, whisper, batch_size=8)
    machine = report["hardware"]
    assert (machine["dtype"], machine["batch"], machine["target"]) == ("bfloat16", 8, "cpu")
    assert (machine["threads"], machine["device"]) == (1, "cpu")


@pytest.mark.parametrize(("plan", "nodes"), [("learned", None), ("8", 8), ("16x6", (16, 6)), ("0", 0)])
def test_plans_are_parsed(plan: str, nodes: object) -> None:
    assert parse_plan(plan) == nodes


def test_bad_arguments_are_named(corpus: Path, whisper: LoadedWhisper) -> None:
    with pytest.raises(InputError, match="`plan`"):
        parse_plan("8 deep")
    with pytest.raises(InputError, match="`limit`"):
        score(corpus, whisper, limit=0)
    with pytest.raises(InputError, match="`batch_size`"):
        score(corpus, whisper, batch_size=0)
    with pytest.raises(InputError, match="`root`"):
        score(corpus, whisper, split="nowhere")
