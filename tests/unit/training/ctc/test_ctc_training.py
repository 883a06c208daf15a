"""What a CTC head is trained on and judged by: pieces, distortion, a store that grows, batches, evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mmdec.audio import load_audio
from mmdec.training.corpora.librispeech import Utterance
from mmdec.training.ctc import evaluate
from mmdec.training.ctc.data import SentenceData
from mmdec.training.ctc.encoders import load_speech_encoder
from mmdec.training.ctc.module import CtcModule
from mmdec.training.ctc.states import CLEAN, Distortion, distort, keep_states, state_name
from mmdec.training.stores import FrameStore
from tests.support.tiny_sentences import SIZES, TEXTS, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ctc"))


def data(folder: Path) -> SentenceData:
    files = {name: str(folder / path) for name, path in (("states", "states"), ("pieces", "pieces.json"))}
    corpus, encoder, text = str(folder / "manifest.tsv"), str(folder / "whisper"), [str(folder / "text")]
    return SentenceData(corpus, encoder, text=text, **files, views=2, count=40, batch_states=60)


@pytest.mark.parametrize("part", ["voice", "room", "noise", "telephone"])
def test_each_distortion_changes_the_sound_and_follows_from_its_seed(part: str) -> None:
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) * 0.1
    how = Distortion(
        **{"voice": 0.0, "room": 0.0, "noise": 0.0, "telephone": 0.0, "silence": 0.0, "quietest": 0.5, part: 1.0}
    )
    changed, same = (distort(sound.copy(), how, np.random.default_rng(3)) for _ in range(2))
    assert changed.shape == sound.shape
    assert np.array_equal(changed, same)
    plain = distort(sound.copy(), CLEAN, np.random.default_rng(3))
    assert np.abs(changed / np.abs(changed).max() - plain / np.abs(plain).max()).max() > 1e-3


def test_states_are_kept_once_and_those_of_new_recordings_are_added(folder: Path, tmp_path: Path) -> None:
    rows = [Utterance(folder / "clips" / f"{n}.wav", TEXTS[n], "x", "") for n in range(5)]
    encoder = load_speech_encoder(str(folder / "whisper"))
    keep_states([(row, 0) for row in rows[:3]], encoder, tmp_path, CLEAN)
    size = (tmp_path / "0.f16").stat().st_size
    store = keep_states([(row, 0) for row in rows], encoder, tmp_path, CLEAN)
    wanted, lengths = encoder.read([load_audio(rows[1].path)], 1.0)
    kept = store.get(state_name(rows[1], 0))
    assert len(kept) == -(-(4400 + 3200) // 320)
    torch.testing.assert_close(kept, wanted[0, : len(kept)], rtol=2e-3, atol=2e-3)
    assert lengths[0] > len(kept)
    with open(tmp_path / "0.f16", "r+b") as file:  # killed while the last two were written
        file.truncate(size + 10)
    names = FrameStore(tmp_path, 32)
    assert [state_name(row, 0) in names for row in rows] == [True] * 3 + [False] * 2


def test_batches_hold_all_recordings_before_one_comes_again(folder: Path) -> None:
    sentences = data(folder)
    sentences.setup("fit")
    batches = sentences.batches.of(list(sentences.texts), np.random.default_rng(0))
    assert sorted(name for batch in batches for name in batch) == sorted(sentences.texts)
    assert len(sentences.texts) == 16  # two views of eight
    for batch in batches:
        assert max(sentences.store.length(name) for name in batch) * len(batch) <= 60 or len(batch) == 1


def test_evaluation_counts_words_and_pieces(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sentences = data(folder)
    module = CtcModule(units=sentences.units, **SIZES)
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, tmp_path / "head.ckpt")
    command = ["--checkpoint", str(tmp_path / "head.ckpt"), "--pieces", str(folder / "pieces.json"), "--split", "dev"]
    given = [*command, "--encoder", str(folder / "whisper"), "--corpus", str(folder / "manifest.tsv")]
    assert evaluate.main(given) == 0
    told = capsys.readouterr().out
    assert "l'été est là" in told
    assert "of 9, 2 recordings" in told
    assert evaluate.main([*given, "--corpus", str(tmp_path / "none")]) == 2


def test_the_elided_word_is_a_word() -> None:
    assert evaluate.words("L'homme est-il là ?").split() == ["l'", "homme", "est", "il", "là"]


def test_silence_is_put_around_a_sound_before_the_noise() -> None:
    sound = np.ones(8000, np.float32)
    quiet = distort(sound, Distortion(0, 0, 0, 0, 0.5, 0.5), np.random.default_rng(1))
    loud = np.flatnonzero(quiet)
    assert len(loud) == 8000
    assert 0 < loud[0] < 8000
    assert 0 < len(quiet) - 1 - loud[-1] < 8000
    noisy = distort(sound, Distortion(0, 0, 1, 0, 0.5, 0.5), np.random.default_rng(1))
    assert np.abs(noisy[: loud[0] - 200]).max() > 0
