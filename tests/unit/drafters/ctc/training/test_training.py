"""Tests the training of a CTC head: pieces, distortion of sound, the store of encoder states, batches, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mmdec
from mmdec.drafters.ctc.training.data import (
    NO_DISTORTION,
    Distortion,
    SentenceData,
    StateDataset,
    distort,
    keep_states,
    load_speech_encoder,
    state_name,
)
from mmdec.drafters.ctc.training.module import CtcModule, load_ctc_recogniser
from mmdec.errors import InputError
from mmdec.io.audio import load_audio
from mmdec.training.corpora.librispeech import Utterance
from mmdec.training.stores import FrameStore
from tests.support.tiny_piece_translator import write as write_translator
from tests.support.tiny_sentences import SIZES, TEXTS, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ctc"))


def data(folder: Path, top: int = 0) -> SentenceData:
    files = {name: str(folder / path) for name, path in (("states", "states"), ("pieces", "pieces.json"))}
    corpus, encoder, text = str(folder / "manifest.tsv"), str(folder / "whisper"), [str(folder / "text")]
    return SentenceData(corpus, encoder, text=text, **files, views=2, count=40, batch_states=60, top=top)


@pytest.mark.parametrize("part", ["voice", "room", "noise", "telephone"])
def test_each_distortion_changes_the_sound_and_follows_from_its_seed(part: str) -> None:
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) * 0.1
    how = Distortion(
        **{"voice": 0.0, "room": 0.0, "noise": 0.0, "telephone": 0.0, "silence": 0.0, "quietest": 0.5, part: 1.0}
    )
    changed, same = (distort(sound.copy(), how, np.random.default_rng(3)) for _ in range(2))
    assert changed.shape == sound.shape
    assert np.array_equal(changed, same)
    plain = distort(sound.copy(), NO_DISTORTION, np.random.default_rng(3))
    assert np.abs(changed / np.abs(changed).max() - plain / np.abs(plain).max()).max() > 1e-3


def test_states_are_stored_once_and_new_ones_added(folder: Path, tmp_path: Path) -> None:
    rows = [Utterance(folder / "clips" / f"{n}.wav", TEXTS[n], "x", "") for n in range(5)]
    encoder = load_speech_encoder(str(folder / "whisper"))
    keep_states([(row, 0) for row in rows[:3]], encoder, tmp_path, NO_DISTORTION)
    size = (tmp_path / "0.f16").stat().st_size
    store = keep_states([(row, 0) for row in rows], encoder, tmp_path, NO_DISTORTION)
    expected, lengths = encoder.encode([load_audio(rows[1].path)], 1.0)
    states = store.get(state_name(rows[1], 0))
    assert len(states) == -(-(4400 + 3200) // 320)
    torch.testing.assert_close(states, expected[0, : len(states)], rtol=2e-3, atol=2e-3)
    assert lengths[0] > len(states)
    with open(tmp_path / "0.f16", "r+b") as file:  # killed while the last two were written
        file.truncate(size + 10)
    names = FrameStore(tmp_path, 32)
    assert [state_name(row, 0) in names for row in rows] == [True] * 3 + [False] * 2


def test_batches_hold_every_recording_before_any_repeats(folder: Path) -> None:
    sentences = data(folder)
    sentences.setup("fit")
    batches = sentences.group_by_length(list(sentences.texts), np.random.default_rng(0))
    assert sorted(name for batch in batches for name in batch) == sorted(sentences.texts)
    assert len(sentences.texts) == 16  # two views of eight
    for batch in batches:
        assert max(sentences.store.length(name) for name in batch) * len(batch) <= 60 or len(batch) == 1


def test_top_layers_are_trained_and_evaluated_with_the_head(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sentences = data(folder, top=1)
    sentences.setup("fit")
    options = {**SIZES, "top": 1, "encoder": str(folder / "whisper"), "channels": 0.0, "time_masks": 0}
    module = CtcModule(units=sentences.units, **options)
    name = next(iter(sentences.dev_texts))
    batch = StateDataset(sentences.store, sentences.dev_texts, [[name]])[0]
    row = next(row for row in sentences.rows("dev") if state_name(row, 0) == name)

    def outputs_before_and_after() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits, frames = module.eval()(batch)
        saved = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 0}
        torch.save(saved, tmp_path / "h.ckpt")
        heard, counts = load_ctc_recogniser(tmp_path / "h.ckpt", str(folder / "whisper"))(row.path)
        assert frames.tolist() == counts.tolist()
        return logits, heard

    first, alike = outputs_before_and_after()
    torch.testing.assert_close(first, alike, rtol=2e-2, atol=2e-2)  # kept in half precision
    optimizer = module.train().configure_optimizers()["optimizer"]  # type: ignore[index] # a dictionary here
    module.log = lambda *a, **k: None  # type: ignore[method-assign] # no trainer
    module._trainer = SimpleNamespace(global_step=0)  # type: ignore[assignment]
    module.training_step(batch, 0).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    optimizer.step()
    second, alike = outputs_before_and_after()
    torch.testing.assert_close(second, alike, rtol=2e-2, atol=2e-2)
    assert (second - first).abs().max() > 0.1
    weight = load_speech_encoder(str(folder / "whisper")).encoder.layers[-1].fc1.weight  # type: ignore[attr-defined]
    assert not torch.equal(module.top.layers[0].fc1.weight, weight)  # type: ignore[union-attr, index]


def test_top_layers_of_what_is_no_whisper_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`encoder` must name the Whisper"):
        CtcModule(units=["a"], **SIZES, top=1)


def test_training_continues_from_a_translators_head(tmp_path: Path) -> None:
    made = write_translator(tmp_path / "model")
    sizes = json.loads((made / "config.json").read_text())["architecture"]["head"]
    units = [str(n) for n in range(sizes.pop("pieces"))]
    head = CtcModule(units=units, **sizes, start=str(made)).head
    expected = mmdec.load(made).parts.model.head
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    recogniser = load_ctc_recogniser(made, str(made))
    torch.testing.assert_close(recogniser.head.output.weight, expected.output.weight)


def test_silence_is_put_around_a_sound_before_the_noise() -> None:
    sound = np.ones(8000, np.float32)
    quiet = distort(sound, Distortion(0, 0, 0, 0, 0.5, 0.5), np.random.default_rng(1))
    loud = np.flatnonzero(quiet)
    assert len(loud) == 8000
    assert 0 < loud[0] < 8000
    assert 0 < len(quiet) - 1 - loud[-1] < 8000
    noisy = distort(sound, Distortion(0, 0, 1, 0, 0.5, 0.5), np.random.default_rng(1))
    assert np.abs(noisy[: loud[0] - 200]).max() > 0
