"""Tests the samples of each epoch: the ramp sets their number, processes share none, and no sample comes twice before
all came once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdec.drafters.networks.training.data import DraftData, Ramp, Sampling, frequent_tokens, mix_splits
from mmdec.drafters.networks.training.samples import Choice, PromptBuilder, Questions, Sample, choose, read_samples
from mmdec.errors import InputError
from tests.support.tiny_vlm_folder import qwen


def data(seen: int, text: int, **options: object) -> DraftData:
    made = DraftData("base", "corpus", batch_size=4, **options)  # type: ignore[arg-type]
    samples = [Sample(f"v{n}", "?", images=(made.corpus,)) for n in range(seen)]
    samples += [Sample(f"t{n}", "?") for n in range(text)]
    made.parts = {"train": samples}
    made.tokens = {sample.name: [1] * (2 + number % 7) for number, sample in enumerate(samples)}
    return made


def planned_names(made: DraftData, epoch: int, rank: int = 0, world: int = 1) -> list[str]:
    samples, batches = made.plan(epoch, rank, world)
    assert all(len(batch) == 4 for batch in batches)
    return [samples[number].name for batch in batches for number in batch]


def test_the_ramp_sets_the_share_of_pictures() -> None:
    made = data(20, 10, steps_per_epoch=5, ramp=Ramp(8))
    for epoch in range(8):
        share = sum(name.startswith("v") for name in planned_names(made, epoch)) / 20
        assert share == pytest.approx(Ramp(8).share(epoch), abs=0.025)


def test_text_samples_default_to_questions_without_pictures() -> None:
    made = data(20, 0, steps_per_epoch=5, ramp=Ramp(8))
    assert {name.endswith("/text") for name in planned_names(made, 0)} == {True}
    assert {name.endswith("/text") for name in planned_names(made, 7)} == {False}
    assert made.text_samples()[0].images == ()
    assert not data(20, 0).text_samples()


def test_every_sample_comes_once_before_any_repeats() -> None:
    made = data(20, 0, steps_per_epoch=2)  # 8 of 20 in an epoch
    names = [name for epoch in range(5) for name in planned_names(made, epoch)]
    assert len(set(names[:16])) == 16
    assert Counter(names) == Counter({f"v{n}": 2 for n in range(20)})
    assert planned_names(made, 1) == planned_names(data(20, 0, steps_per_epoch=2), 1)
    assert planned_names(made, 1) != planned_names(made, 0)


def test_processes_share_an_epoch() -> None:
    made = data(24, 8, steps_per_epoch=4)
    parts = [planned_names(made, 0, rank, 2) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 16
    assert len(set(parts[0]) | set(parts[1])) == 32  # all of them, none twice
    assert sum(name.startswith("v") for part in parts for name in part) == 24


def test_an_epoch_is_all_samples_where_no_steps_are_given() -> None:
    assert len(planned_names(data(24, 8), 0)) == 32


def test_a_batch_has_prompts_and_answers_of_like_length() -> None:
    made = data(0, 64)
    made.parts = {"train": [Sample(f"t{n}", "?" * (1 + 400 * (n % 4))) for n in range(64)]}
    made.tokens = {f"t{n}": [1] * (10 + 5 * (n // 16)) for n in range(64)}
    samples, batches = made.plan(0)
    for batch in batches:
        rows = [samples[index] for index in batch]
        assert len({(len(row.question), len(made.tokens[row.name])) for row in rows}) == 1


def test_a_ramp_needs_pictures() -> None:
    with pytest.raises(InputError, match="`ramp` needs samples with pictures"):
        planned_names(data(0, 8, ramp=Ramp(1)), 0)


def test_a_corpus_too_small_for_what_is_held_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a split for development."""
    made = DraftData("base", "corpus", dev_split=None, dev_samples=10)
    monkeypatch.setattr(made, "read_split", lambda split, count: [Sample(f"v{n}", "?") for n in range(10)])
    with pytest.raises(InputError, match="`dev_samples` must leave questions to train on, but takes 10 of 10"):
        _ = made.samples


def test_forty_epochs_as_in_the_paper() -> None:
    ramp = Ramp(40)
    shares = [ramp.share(epoch) for epoch in range(40)]
    assert shares[:20] == [0.0] * 20
    assert shares[20:39] == pytest.approx([0.05 * step for step in range(1, 20)])
    assert shares[39] == 1.0
    assert ramp.share(50) == 1.0


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 12])
def test_shares_of_pictures_rise_to_one_over_any_number_of_epochs(epochs: int) -> None:
    shares = [Ramp(epochs).share(epoch) for epoch in range(epochs)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(share == 0.0 for share in shares[: epochs // 2 if epochs > 1 else 0])


def test_no_epochs_are_refused() -> None:
    with pytest.raises(InputError, match="`epochs` must be at least 1"):
        Ramp(0)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"temperature": 0.0}, "`temperature` must be above 0 and finite, but is 0.0"),
        ({"repetition_penalty": float("inf")}, "`repetition_penalty` must be above 0 and finite, but is inf"),
        ({"top_k": -1}, "`top_k` must be 0 or more, but is -1"),
        ({"top_p": 1.5}, "`top_p` must be above 0 and at most 1, but is 1.5"),
    ],
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Sampling(**wrong)


def test_answers_sampled_in_another_way_are_stored_apart() -> None:
    marks = set[str]()
    for sampling in (None, Sampling(), Sampling(top_k=50), Sampling(top_k=50, top_p=0.9)):
        made = data(1, 0, sampling=sampling)
        made.__dict__["teacher"] = SimpleNamespace(name="target")
        marks.add(made.mark)
    assert len(marks) == 4
    assert "target-float32-256" in marks  # greedy answers keep their place


LONG = "word " * 30


def write(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    return root


def row(number: int, *answers: str, **fields: Any) -> dict[str, Any]:
    texts = [part for place, answer in enumerate(answers) for part in (f"Question {place}?", answer)]
    turns = [{"from": ("human", "gpt")[at % 2], "value": value} for at, value in enumerate(texts)]
    return {"id": number, "conversations": turns, **fields}


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def test_questions_are_chosen_by_kind(tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "images" / f"{number}.png")
    rows = [row(number, LONG, "short", "brief", image=f"{number}.png") for number in range(10)]
    corpus = write(tmp_path, rows)
    assert len(read_samples(corpus, "train", Questions())) == 30
    result = read_samples(corpus, "train", Questions(), Choice(12, 0.5, seed=1))
    assert [sample.words for sample in result] == [30] * 6 + [1] * 6
    assert len({sample.images for sample in result[:6]}) == 6  # of different pictures, as long as there are
    assert len({sample.name for sample in result}) == 12
    assert result == read_samples(corpus, "train", Questions(), Choice(12, 0.5, seed=1))
    assert result != read_samples(corpus, "train", Questions(), Choice(12, 0.5, seed=2))
    # more than one of a picture, where needed
    assert len(read_samples(corpus, "train", Questions(), Choice(25, None))) == 25
    assert len(read_samples(corpus, "train", Questions(), Choice(100, 0.5))) == 30


def test_rare_kinds_are_filled_up_by_others() -> None:
    samples = [Sample(str(n), "?", words=30 if n < 2 else 1) for n in range(10)]
    result = choose(iter(samples), Choice(8, 0.5))
    assert sum(sample.words >= 20 for sample in result) == 2
    assert len(result) == 8


def test_frames_are_spread_over_the_video(tmp_path: Path) -> None:
    for number in range(9):
        picture(tmp_path / "images" / "film" / f"{number:03d}.png")
    (sample,) = read_samples(write(tmp_path, [row(0, "A film.", video="film")]), "train", Questions(frames=3))
    assert [path.stem for path in sample.video] == ["000", "004", "008"]
    assert sample.visual
    plain = sample.without_pictures()
    assert not plain.visual
    assert plain.name == f"{sample.name}/text"
    assert plain.without_pictures() == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"video": "none"}, "must be a folder of frames"),
        ({"video": "../film"}, "inside the folder"),
        ({"video": 3}, "next to the images"),
        ({"image": "none.png"}, "must hold its pictures"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_samples(write(tmp_path, [row(0, "Yes.", **fields)]), "train", Questions(frames=3))
    with pytest.raises(InputError, match=r"must hold dev\.json"):
        read_samples(tmp_path, "dev", Questions())


@pytest.mark.parametrize(("held", "others"), [(0, 5), (2, 40), (7, 3)])
def test_held_out_questions_are_answered_among_the_others(held: int, others: int) -> None:
    """Where the time ends early, both splits have answers."""
    dev, train = [Sample(f"d{n}", "?") for n in range(held)], [Sample(f"t{n}", "?") for n in range(others)]
    mixed = mix_splits(dev, train)
    assert [sample for sample in mixed if sample in dev] == dev
    assert [sample for sample in mixed if sample in train] == train
    assert held != 2 or (mixed[0], mixed[10]) == (dev[0], dev[1])


def test_qwen_prompts_need_no_torchvision(tmp_path: Path) -> None:
    """As in `describe`, only the video processor needs that package, and frames are then shown as pictures."""
    model, processor = qwen()
    model.save_pretrained(tmp_path / "qwen")
    processor.save_pretrained(tmp_path / "qwen")
    Image.new("RGB", (28, 28), "red").save(tmp_path / "a.png")
    asked = PromptBuilder(tmp_path / "qwen")(Sample("a", "What is this?", images=(tmp_path / "a.png",)))
    assert asked["pixel_values"].shape[0] == asked["image_grid_thw"].prod()
    shown = PromptBuilder(tmp_path / "qwen")(
        Sample("b", "What is this?", video=(tmp_path / "a.png", tmp_path / "a.png"))
    )
    assert "image_grid_thw" in shown or "video_grid_thw" in shown


def test_prompts_without_pictures_are_built_once(tmp_path: Path) -> None:
    _, processor = qwen()
    processor.save_pretrained(tmp_path)
    qwen()[0].config.save_pretrained(tmp_path)
    prompting = PromptBuilder(tmp_path)
    first = prompting(Sample("a", "What is this?"))
    assert prompting(Sample("b", "What is this?")) is first
    assert prompting(Sample("c", "What is this?", history=(("user", "Hello."), ("assistant", "Yes?")))) is not first


def test_frequent_tokens_are_filled_up_with_the_lowest_ids() -> None:
    answers = [[9, 9, 4, 7], [9, 4, 3, 8, 8]]
    assert frequent_tokens(answers, 3).tolist() == [4, 8, 9]
    assert frequent_tokens(answers, 4).tolist() == [3, 4, 8, 9]  # 3 and 7 are equally frequent
    assert frequent_tokens(answers, 8).tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
