"""Tests the reader's training pairs: each folder's share, all references in turn, batches by size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmdec.daspeech.training.reader.data import PairData
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.errors import InputError
from mmdec.phonetics.pieces import normalise_for_speech
from tests.support.tiny_sentences import write_pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def data(folder: Path, **options: object) -> PairData:
    text, files = [str(folder / "first"), str(folder / "second")], {}
    for name in ("pieces", "english"):
        files[name] = str(folder / f"{name}.json")
    given = {"shares": [0.5, 0.5], "count": 60, "written": 80, "batch_pieces": 60, "steps_per_epoch": 8, **options}
    return PairData(text, **files, **given)  # type: ignore[arg-type]


def test_a_batch_holds_what_its_rows_say(folder: Path) -> None:
    pairs = data(folder, dev_rows=4)
    pairs.setup("fit")
    (batch,) = list(pairs.val_dataloader())
    assert batch.rows == [0, 1, 2, 3]
    for row, pair in enumerate(pairs.dev):
        assert pairs.pieces.decode(batch.pieces[row, : batch.lengths[row], 0].tolist()) == normalise_for_speech(
            pair.source
        )
        units = batch.units[row, : batch.unit_lengths[row]].tolist()
        assert (units[0], units[-1]) == (BOS, EOS)
        assert pairs.english.decode(units) == pair.references[0]
        assert (batch.units[row, batch.unit_lengths[row] :] == PAD).all()


def test_an_epoch_is_determined_by_its_number_and_shares_its_folders(folder: Path) -> None:
    pairs = data(folder, batch_pieces=120, steps_per_epoch=2)
    pairs.setup("fit")

    def rows(epoch: int) -> list[int]:
        pairs.trainer = SimpleNamespace(current_epoch=epoch, global_rank=0, world_size=1)  # type: ignore[assignment]
        batches = list(pairs.train_dataloader())
        for batch in batches:
            assert int((batch.lengths + batch.unit_lengths).max()) * len(batch.rows) <= 120
        return [row for batch in batches for row in batch.rows]

    first = rows(0)
    assert first == rows(0)
    assert first != rows(1)
    few = sum(row < len(pairs.folders[0][0]) for row in first) / len(first)
    assert 0.2 < few < 0.8  # the first folder has a tenth of the rows


def test_training_takes_all_references_and_skips_long_sentences(folder: Path) -> None:
    pairs = data(folder, longest=25)
    pairs.setup("fit")
    pieces, units = pairs.folders[1]
    assert max(map(len, pieces)) <= 25
    assert {len(targets) for targets in units} == {1, 2}
    assert pairs.units[0][0] == "<blank>"


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.0]])
def test_a_share_for_each_folder(folder: Path, shares: list[float]) -> None:
    with pytest.raises(InputError, match="`shares` must be"):
        data(folder, shares=shares)
