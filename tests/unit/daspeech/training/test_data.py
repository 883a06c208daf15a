"""Tests the corpus as tensors: features are stored once, (seed, epoch) determine the batches, bad rows are named."""

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from mmdec.daspeech.model import DASpeechConfig
from mmdec.daspeech.training import data as data_module
from mmdec.daspeech.training.data import (
    CHARACTERS,
    EOS,
    PAD,
    FilterbankStore,
    SpeechTranslationData,
    collate,
    draw_batches,
)
from mmdec.daspeech.units import BOS, UNK
from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.training.corpora.cvss import read_pairs, unify_targets, vocabulary
from tests.conftest import RATE, buzz
from tests.support.tiny_corpus import TinyCorpus, read_table, write_corpus, write_table


@pytest.fixture(scope="module")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("written"))


@pytest.fixture
def corpus(tiny_corpus: TinyCorpus, tmp_path: Path) -> TinyCorpus:
    """Return a copy that a test may spoil."""
    shutil.copytree(tiny_corpus.root, tmp_path, dirs_exist_ok=True)
    return TinyCorpus(tmp_path)


def data_of(corpus: TinyCorpus, **options: object) -> SpeechTranslationData:
    settings = {"batch_size": 3, "steps_per_epoch": 4, "upsample": 0.25, "min_vertices": 16, "jobs": 1, **options}
    return SpeechTranslationData(str(corpus.common_voice), str(corpus.cvss), **settings)  # type: ignore[arg-type]


def clips_of(corpus: TinyCorpus) -> list[Path]:
    return sorted((corpus.common_voice / "clips").iterdir())


def test_features_are_made_once_and_whole(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clips = clips_of(corpus)
    clips[1].write_text("not a sound", encoding="utf-8")
    soundfile.write(clips[2], buzz(0.05), RATE, format="WAV")  # five frames
    folder = tmp_path / "store"
    store = FilterbankStore(folder, clips, jobs=1)
    assert store.lengths[1:3].tolist() == [0, 0]
    assert set(store.reasons) == {clips[1].name, clips[2].name}
    assert "libsndfile" in store.reasons[clips[1].name]
    for place in (0, 3, len(clips) - 1):
        expected = audio.fbank(audio.trim_silence(audio.load_audio(clips[place])))  # as the call hears it
        assert len(expected) == store.lengths[place] == len(store[place])
        torch.testing.assert_close(store[place], expected, atol=1e-2, rtol=1e-2)  # kept in half precision
    assert not list(folder.rglob("*.part"))

    monkeypatch.setattr(FilterbankStore, "_build", lambda *_: pytest.fail("built again"))
    again = FilterbankStore(folder, clips, jobs=1)
    assert torch.equal(again[5], store[5])
    with pytest.raises(pytest.fail.Exception):
        FilterbankStore(folder, clips[1:], jobs=1)  # another list
    monkeypatch.setattr(data_module, "_FORMAT", 2)
    with pytest.raises(pytest.fail.Exception):
        FilterbankStore(folder, clips, jobs=1)  # features made in another way


def test_features_of_an_interrupted_run_are_made_again(corpus: TinyCorpus, tmp_path: Path):
    store = FilterbankStore(tmp_path / "store", clips_of(corpus), jobs=1)
    (store.folder / "index.json").unlink()
    (store.folder / "fbank.f16").unlink()  # the store has it mapped
    (store.folder / "fbank.f16").write_bytes(b"\0" * 10)
    again = FilterbankStore(tmp_path / "store", clips_of(corpus), jobs=1)
    assert torch.equal(again[0], store[0])
    assert len(again[14]) == again.lengths[14] > 0


def test_a_repaired_recording_is_used(corpus: TinyCorpus, tmp_path: Path):
    """It is as large as before, so its folder is the same."""
    clips = clips_of(corpus)
    whole = clips[1].read_bytes()
    clips[1].write_bytes(bytes(len(whole)))
    assert list(FilterbankStore(tmp_path, clips, jobs=1).reasons) == [clips[1].name]
    (index,) = tmp_path.glob("*/index.json")
    clips[1].write_bytes(whole)
    written = index.stat().st_mtime_ns
    os.utime(clips[1], ns=(written + 1, written + 1))
    again = FilterbankStore(tmp_path, clips, jobs=1)
    assert again.reasons == {}
    assert again.lengths[1] > 0


def test_unreadable_recordings_are_stored_with_their_reason(tmp_path: Path):
    (tmp_path / "a.mp3").write_text("nothing", encoding="utf-8")
    store = FilterbankStore(tmp_path / "store", [tmp_path / "a.mp3"], jobs=1)
    assert store.lengths.tolist() == [0]
    assert list(store.reasons) == ["a.mp3"]


LENGTHS = [50 + 7 * (number % 11) for number in range(23)]


def epoch(seed: int = 3, number: int = 0, rank: int = 0, world: int = 1, share: float = 0.0) -> list[list[tuple]]:
    return draw_batches(LENGTHS, 4, 5, seed, number, share, rank, world)


def test_batches_follow_from_seed_and_epoch():
    assert epoch() == epoch()
    assert epoch(number=1) != epoch()
    assert epoch(seed=4) != epoch()
    assert len(epoch()) == 5
    assert all(len(batch) == 4 for batch in epoch())


def test_every_row_comes_before_any_comes_twice():
    seen = [number for batch in epoch() for (number,) in batch]
    counts = [seen.count(number) for number in range(23)]
    assert sum(counts) == 20
    assert max(counts) <= 2  # 20 of 23, of rounds without repetition
    longer = [number for batch in draw_batches(LENGTHS, 23, 2, 0, 0, 0.0, 0, 1) for (number,) in batch]
    assert sorted(longer) == sorted([*range(23)] * 2)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_ranks_share_an_epoch(share: float):
    ranks = [epoch(rank=rank, world=3, share=share) for rank in range(3)]
    whole = draw_batches(LENGTHS, 4, 15, 3, 0, share, 0, 1)
    together = [tuple(batch) for rank in ranks for batch in rank]
    assert sorted(together) == sorted(tuple(batch) for batch in whole)
    for step in zip(*ranks, strict=True):  # similar lengths at one step
        means = [sum(sum(LENGTHS[n] for n in item) for item in batch) / len(batch) for batch in step]
        assert max(means) - min(means) < 80


def test_a_share_of_the_items_is_concatenated():
    items = [item for batch in draw_batches(LENGTHS, 20, 20, 0, 0, 0.3, 0, 1) for item in batch]
    assert {len(item) for item in items} == {1, 2}
    assert sum(len(item) == 2 for item in items) / len(items) == pytest.approx(0.3, abs=0.07)
    assert all(len(item) == 1 for batch in epoch() for item in batch)


def test_concatenation_joins_sound_units_and_text_with_a_pause(corpus: TinyCorpus):
    data = data_of(corpus)
    data.setup("fit")
    train = data.train_set
    assert train is not None
    first, second, both = train[(0,)], train[(1,)], train[(0, 1)]
    pause = data.units.index("pau")
    assert torch.equal(both.features, torch.cat([first.features, second.features]))
    assert both.units == [*first.units, pause, *second.units]
    assert both.text == [*first.text, 1, *second.text]
    assert CHARACTERS[0] == " "
    assert both.rows == (0, 1)
    assert "".join(CHARACTERS[letter - 1] for letter in first.text) == "bonjour à tous"


def test_joined_acoustic_targets_follow_the_units(corpus: TinyCorpus):
    data = data_of(corpus, acoustic=True, rendering="canonical")
    data.setup("fit")
    train = data.train_set
    assert train is not None
    for item in ((0,), (1, 2), (3, 0, 1)):
        made = train[item]
        assert made.phones is not None
        assert made.mel is not None
        assert made.phones.shape == (3, len(made.units) + 1)  # </s> is a phone
        assert int(made.phones[0].sum()) == len(made.mel)
    batch = collate([train[(1, 2)], train[(3,)]])
    assert batch.acoustic is not None
    assert torch.equal(batch.acoustic.lengths, batch.unit_lengths - 1)
    assert torch.equal(batch.acoustic.mel_lengths, batch.acoustic.durations.sum(1))
    joined = train[(1, 2)]
    assert joined.phones is not None
    assert joined.units[len(train[(1,)].units)] == data.units.index("pau")
    assert joined.phones[0, len(train[(1,)].units)] == 12  # a fifth of a second


def test_batches_are_padded_and_move(corpus: TinyCorpus):
    data = data_of(corpus)
    data.setup("fit")
    assert data.train_set is not None
    items = [data.train_set[(number,)] for number in (0, 1, 4)]
    batch = collate(items)
    for row, item in enumerate(items):
        frames, units, letters = len(item.features), len(item.units) + 2, len(item.text)
        assert (batch.lengths[row], batch.unit_lengths[row], batch.text_lengths[row]) == (frames, units, letters)
        assert torch.equal(batch.features[row, :frames], item.features)
        assert not batch.features[row, frames:].any()
        assert batch.units[row, :units].tolist() == [BOS, *item.units, EOS]
        assert (batch.units[row, units:] == PAD).all()
        assert batch.text[row, :letters].tolist() == item.text
    moved = move_data_to_device(batch, torch.device("meta"))  # as Lightning does
    for field in dataclasses.fields(batch):
        value = getattr(moved, field.name)
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta"
    assert moved.rows == [(0,), (1,), (4,)]


def test_bad_rows_are_named_and_left_out(corpus: TinyCorpus):
    names = [line[0] for line in read_table(corpus.cvss / "train.tsv")]
    clips = corpus.common_voice / "clips"
    (clips / names[0]).write_text("not a sound", encoding="utf-8")
    soundfile.write(clips / names[1], buzz(7), RATE, format="WAV")
    soundfile.write(clips / names[3], buzz(0.3), RATE, format="WAV")  # 28 frames, 7 vertices
    (clips / names[4]).unlink()
    soundfile.write(clips / names[5], buzz(1)[:4000], 4000, format="WAV")  # a rate that no one speaks at
    data = data_of(corpus, max_frames=500, min_vertices=2, max_bad_share=0.5)
    data.setup("fit")
    assert data.train_set is not None
    good = {row.name for row in data.train_set.rows}
    assert good == set(names) - {names[place] for place in (0, 1, 3, 4, 5)}
    named = {name: reason for reason, result in data.bad.names.items() for name in result}
    assert data.bad.count == 5
    assert "unusable" in named[names[0]]
    assert named[names[1]] == "longer than 500 frames"
    assert named[names[3]] == "text does not fit the graph"
    assert named[names[4]] == "source recording missing or empty"
    assert "8000 Hz" in named[names[5]]


def test_target_sound_that_is_no_sound_is_named_in_the_joint_stage(corpus: TinyCorpus):
    names = [line[0] for line in read_table(corpus.cvss / "train.tsv")]
    for name in names[1::4]:  # every recording of one sentence
        (corpus.cvss / "train" / f"{name}.wav").write_text("not a sound" * 10, encoding="utf-8")
    data = data_of(corpus, acoustic=True, max_bad_share=0.5)
    data.setup("fit")
    assert data.train_set is not None
    assert {row.name for row in data.train_set.rows} == set(names) - set(names[1::4])
    assert data.bad.names["no acoustic targets"] == names[1::4]


def test_a_corpus_without_a_usable_row_is_an_error(corpus: TinyCorpus):
    with pytest.raises(InputError, match=r"(?s)'train' has none.*text does not fit the graph: 12"):
        data_of(corpus, upsample=0.01, min_vertices=2).setup("fit")


def test_unseen_phones_become_unknown_and_unseen_letters_are_dropped(corpus: TinyCorpus):
    lines = read_table(corpus.cvss / "dev.alignment.tsv")
    lines[0][1] = lines[0][1].replace("hh:", "zz:")
    write_table(corpus.cvss / "dev.alignment.tsv", lines)
    table = read_table(corpus.common_voice / "dev.tsv")
    table[1][2] = "Ω ñ bas"
    write_table(corpus.common_voice / "dev.tsv", table)
    data = data_of(corpus)
    data.setup("fit")
    assert data.validation_set is not None
    item = data.validation_set[(0,)]
    assert item.units[0] == UNK
    assert "".join(CHARACTERS[letter - 1] for letter in item.text) == "  bas"
    assert len(CHARACTERS) < DASpeechConfig.small().ctc_characters


def test_one_rendering_for_each_sentence(corpus: TinyCorpus):
    rows, _ = read_pairs(corpus.common_voice, corpus.cvss, "train")
    data = data_of(corpus, rendering="canonical")
    data.setup("fit")
    assert data.train_set is not None
    assert data.train_set.rows == unify_targets(rows)
    assert data.units == vocabulary(rows)  # whatever the rendering
    spoken = {row.source_text: units for row, units in zip(data.train_set.rows, data.train_set.units, strict=True)}
    assert all(
        units == spoken[row.source_text] for row, units in zip(data.train_set.rows, data.train_set.units, strict=True)
    )


def test_loaders_hand_out_the_epoch_of_the_trainer(corpus: TinyCorpus):
    data = data_of(corpus, concatenate=0.5)
    data.setup("fit")
    assert data.train_set is not None
    for world in (1, 2):
        for rank in range(world):
            data.trainer = SimpleNamespace(current_epoch=2, global_rank=rank, world_size=world)  # type: ignore[assignment]
            expected = draw_batches(data.train_set.lengths, 3, 4, 0, 2, 0.5, rank, world)
            assert [batch.rows for batch in data.train_dataloader()] == list(expected)


def test_ranks_share_the_validation_rows(corpus: TinyCorpus):
    data = data_of(corpus, validation_rows=3)
    data.setup("fit")
    seen = []
    for rank in range(2):
        data.trainer = SimpleNamespace(current_epoch=0, global_rank=rank, world_size=2)  # type: ignore[assignment]
        seen += [number for batch in data.val_dataloader() for (number,) in batch.rows]
    assert sorted(seen) == [0, 1, 2]
