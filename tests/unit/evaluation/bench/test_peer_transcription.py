"""`bench asr --peer` on a tiny Whisper, with another engine that echoes: what is compared; no timing is judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.evaluation.bench import transcription as peers
from mmdec.evaluation.quality.harness import Method
from mmdec.evaluation.quality.transcription import TranscriptionHarness
from mmdec.hub.whisper import LoadedWhisper, load_whisper
from mmdec.types import InputError
from tests.support.tiny_whisper import write


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny"), "cpu")


@pytest.fixture
def recordings() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(length, generator=random) for length in (8_000, 12_000, 40_000)]  # the last: windows


def engines(monkeypatch: pytest.MonkeyPatch, echo: peers.Call, other: peers.Call, fast: bool) -> None:
    """CTranslate2's place is taken: float32 says what `echo` says, int8 what `other` says."""

    def calls(whisper: LoadedWhisper, directory: Path, converted: Path, language: str | None) -> dict[str, Any]:
        assert not converted.exists()
        return {
            f"ctranslate2 {kind}, {threads} threads": call
            for kind, call in (("float32", echo), ("int8", other))
            for threads in peers.THREADS
        }

    monkeypatch.setattr(peers, "_peer_calls", calls)
    monkeypatch.setattr(peers, "fast_bfloat16", lambda device: fast)


@pytest.mark.parametrize("fast", [False, True])
def test_texts_are_compared_and_each_side_is_at_its_best(
    whisper: LoadedWhisper, recordings: list[Tensor], monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    harness = TranscriptionHarness(whisper, "en")
    own = {len(one): harness.measure([one], Method.greedy()).texts[0] for one in recordings[:2]}
    engines(monkeypatch, lambda samples: own[len(samples)], lambda samples: "something else", fast)
    report = peers.against_peer(whisper, whisper.heads(), recordings, "ctranslate2", repeats=1)
    assert report["recordings"] == 2  # one is longer than a window
    equal = {name: row["equal_transcripts"] for name, row in report["sides"].items()}
    assert {name: count for name, count in equal.items() if "bfloat16" not in name} == {
        "mmdec float32, 1 threads": 2,
        "mmdec float32, 2 threads": 2,
        "ctranslate2 float32, 1 threads": 2,
        "ctranslate2 float32, 2 threads": 2,
        "ctranslate2 int8, 1 threads": 0,
        "ctranslate2 int8, 2 threads": 0,
    }
    best = report["best"]["float32"]
    assert best["a"].startswith("mmdec float32")
    assert best["b"].startswith("ctranslate2 float32")
    assert best["ratio"] == report["sides"][best["b"]]["seconds"] / report["sides"][best["a"]]["seconds"]
    if fast:
        assert {"mmdec bfloat16, 1 threads", "mmdec bfloat16, 2 threads"} <= set(equal)
        assert report["bfloat16"] == "2 of 2 transcripts are those of greedy decoding in bfloat16"
    else:
        assert not any("bfloat16" in name for name in equal)
        assert report["bfloat16"].startswith("not measured")


def test_what_cannot_be_compared_is_refused(
    whisper: LoadedWhisper, recordings: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, peer, problem in (
        (recordings, "whisper.cpp", "`peer` must be one of ctranslate2"),
        (recordings[2:], "ctranslate2", "holds none"),
    ):
        with pytest.raises(InputError, match=problem):
            peers.against_peer(whisper, whisper.heads(), given, peer, repeats=1)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(InputError, match="Install it"):
        peers.against_peer(whisper, whisper.heads(), recordings[:1], "ctranslate2", repeats=1)
