"""Epochs take samples as the ramp says, each process its own, and none twice before all were taken once."""

from __future__ import annotations

from collections import Counter

import pytest

from mmdec.training.vlm_drafters.data import DraftData, Ramp
from mmdec.training.vlm_drafters.samples import Sample
from mmdec.types import InputError


def data(seen: int, text: int, **options: object) -> DraftData:
    made = DraftData("base", "corpus", batch_size=4, **options)  # type: ignore[arg-type]
    samples = [Sample(f"v{n}", "?", images=(made.corpus,)) for n in range(seen)]
    samples += [Sample(f"t{n}", "?") for n in range(text)]
    made.parts = {"train": samples}
    made.tokens = {one.name: [1] * (2 + number % 7) for number, one in enumerate(samples)}
    return made


def taken(made: DraftData, epoch: int, rank: int = 0, world: int = 1) -> list[str]:
    samples, batches = made.plan(epoch, rank, world)
    assert all(len(batch) == 4 for batch in batches)
    return [samples[number].name for batch in batches for number in batch]


def test_the_ramp_decides_the_share_of_pictures() -> None:
    made = data(20, 10, steps_per_epoch=5, ramp=Ramp(8))
    for epoch in range(8):
        share = sum(name.startswith("v") for name in taken(made, epoch)) / 20
        assert share == pytest.approx(Ramp(8).share(epoch), abs=0.025)


def test_without_texts_of_its_own_the_same_questions_lose_their_pictures() -> None:
    made = data(20, 0, steps_per_epoch=5, ramp=Ramp(8))
    assert {name.endswith("/text") for name in taken(made, 0)} == {True}
    assert {name.endswith("/text") for name in taken(made, 7)} == {False}
    assert made.text_samples()[0].images == ()
    assert not data(20, 0).text_samples()


def test_every_sample_comes_once_before_any_comes_again() -> None:
    made = data(20, 0, steps_per_epoch=2)  # 8 of 20 in an epoch
    names = [name for epoch in range(5) for name in taken(made, epoch)]
    assert len(set(names[:16])) == 16
    assert Counter(names) == Counter({f"v{n}": 2 for n in range(20)})
    assert taken(made, 1) == taken(data(20, 0, steps_per_epoch=2), 1)
    assert taken(made, 1) != taken(made, 0)


def test_processes_share_an_epoch() -> None:
    made = data(24, 8, steps_per_epoch=4)
    parts = [taken(made, 0, rank, 2) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 16
    assert len(set(parts[0]) | set(parts[1])) == 32  # all of them, none twice
    assert sum(name.startswith("v") for part in parts for name in part) == 24


def test_an_epoch_is_all_samples_where_no_steps_are_given() -> None:
    assert len(taken(data(24, 8), 0)) == 32


def test_a_ramp_needs_pictures() -> None:
    with pytest.raises(InputError, match="`ramp` needs samples with pictures"):
        taken(data(0, 8, ramp=Ramp(1)), 0)


def test_a_corpus_too_small_for_what_is_held_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a split for development."""
    made = DraftData("base", "corpus", dev_split=None, dev_samples=10)
    monkeypatch.setattr(made, "_read", lambda split, count: [Sample(f"v{n}", "?") for n in range(10)])
    with pytest.raises(InputError, match="`dev_samples` must leave questions to train on, but takes 10 of 10"):
        _ = made.samples
