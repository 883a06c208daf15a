"""Tests the fit of confidence and its measures, on numbers with known results."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from mmdec.evaluation.calibration import __main__ as calibration_description
from mmdec.evaluation.calibration.__main__ import (
    above,
    calibration_error,
    fit,
    main,
    measure,
    reliability,
    roc_area,
)
from mmdec.evaluation.calibration.examples import (
    EMPTY,
    LEVELS,
    NO_SPEECH,
    NONSENSE,
    Example,
    empty_picture,
    noisy,
    nonsense,
    rightness,
    translator_sounds,
    words_right,
)
from mmdec.pipelines.confidence import read_calibrations
from mmdec.training.corpora.chats import Conversation
from mmdec.types import InputError
from tests.conftest import RATE, buzz


def test_measures_of_known_numbers() -> None:
    assert calibration_error([0.05, 0.15, 0.95], [0.0, 0.0, 1.0]) == pytest.approx((0.05 + 0.15 + 0.05) / 3)
    assert calibration_error([0.5, 0.5], [1.0, 0.0]) == pytest.approx(0)
    assert roc_area([0.9, 0.8], [0.1, 0.8]) == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    assert reliability([0.05, 1.0, 0.92], [0, 1, 0.5]) == [
        {"count": 1, "said": pytest.approx(0.05), "right": 0},
        {"count": 2, "said": pytest.approx(0.96), "right": 0.75},
    ]


def test_a_fit_is_calibrated_where_the_curve_is_logistic() -> None:
    draw = np.random.default_rng(0)

    def examples(count: int) -> list[Example]:
        made = []
        for value in draw.normal(size=count):
            chance = 1 / (1 + np.exp(-(1 - 2 * value)))
            made.append(Example({"mean": float(value)}, float(draw.random() < chance), "speech"))
        return made

    curve = fit(examples(4000))
    assert curve.weights["mean"] == pytest.approx(-2, abs=0.25)
    assert curve.bias == pytest.approx(1, abs=0.2)
    nothing = [Example({"mean": 5.0}, 0.0, "hum")] * 10
    measured = measure(curve, [*examples(2000), *nothing])
    assert measured["calibration_error"] < 0.05
    assert measured["roc_area_by_kind"]["hum"] > 0.95


def test_what_is_typical_is_the_mean_of_what_is_no_nonsense() -> None:
    pictures = [Example({"structure": value}, 1.0, "picture") for value in (-2.0, -1.0)]
    empty = [Example({"structure": -6.0}, 0.0, f"empty picture: {kind}") for kind in EMPTY]
    curve = fit([*pictures, *empty])
    assert curve.typical == {"structure": pytest.approx(-1.5)}
    assert curve({}) == curve({"structure": -1.5}) > 0.5 > curve({"structure": -6.0})
    measured = measure(curve, [*pictures, *empty])
    assert measured["roc_area_by_kind"] == {f"empty picture: {kind}": 1.0 for kind in EMPTY}
    assert fit(empty).typical == {"structure": pytest.approx(-6)}


def test_empty_pictures_are_what_they_are_called() -> None:
    made = {kind: empty_picture(kind, np.random.default_rng(3)).astype(float) for kind in EMPTY}
    assert {image.shape for image in made.values()} == {(128, 128, 3)}
    deviation = {kind: image.std((0, 1)).max() for kind, image in made.items()}
    step = {kind: np.abs(np.diff(image, axis=1)).max() for kind, image in made.items()}
    assert deviation["one colour"] == 0
    assert step["gradient"] <= 4 < 10 < deviation["gradient"]
    assert step["white noise"] > 200
    neighbours = np.corrcoef(made["blurred noise"][:, :-1].ravel(), made["blurred noise"][:, 1:].ravel())[0, 1]
    assert (
        neighbours
        > 0.7
        > 0.1
        > np.corrcoef(made["white noise"][:, :-1].ravel(), made["white noise"][:, 1:].ravel())[0, 1]
    )
    assert deviation["blurred noise"] > 15
    again = empty_picture("blurred noise", np.random.default_rng(4))
    assert (again != made["blurred noise"]).any()


def test_every_third_answer_is_about_an_empty_picture_or_another_style_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = {"turns": [{"task": "word", "expected": "SALE", "claims": []}]}
    row = Conversation("1", (Path("scene.png"),), (("Read it.", "SALE"),), notes)
    seen: list[object] = []

    def describe(picture: object, question: str, model: object) -> SimpleNamespace:
        seen.append(picture)
        return SimpleNamespace(text="SALE", evidence={"mean": 0.0})

    for style in ("rings", "stars"):
        (tmp_path / "dev" / style).mkdir(parents=True)
        (tmp_path / "dev" / style / "0.png").touch()
    monkeypatch.setattr(calibration_description, "read_conversations", lambda path: [row] * 21)
    monkeypatch.setattr(calibration_description, "seeing_model", lambda name, corpus: None)
    monkeypatch.setattr(calibration_description, "describe", describe)
    options = Namespace(model=None, corpus=Path("scenes"), other=tmp_path, count=21)
    (examples,) = calibration_description.described(options, "dev").values()
    styles = ["other style: rings", "other style: stars"]
    kinds = [f"empty picture: {kind}" for kind in EMPTY] + styles + [f"empty picture: {EMPTY[0]}"]
    assert [example.kind for example in examples] == [kind for other in kinds for kind in ("picture", "picture", other)]
    assert [example.right for example in examples] == [1, 1, 0] * 7
    assert [isinstance(picture, np.ndarray) for picture in seen[2::3]] == [True] * 4 + [False] * 2 + [True]
    assert seen[14::3][:2] == [tmp_path / "dev" / style / "0.png" for style in ("rings", "stars")]
    with pytest.raises(InputError, match="`other` must have a folder of PNG"):
        calibration_description.described(options, "test")


def test_noise_has_its_level_and_nonsense_its_length() -> None:
    draw = np.random.default_rng(1)
    speech = np.sin(np.arange(16000) / 20).astype(np.float32) * 0.3
    for level in LEVELS[1:]:
        mixed = noisy(speech, level, draw)
        scale = float((mixed @ speech) / (speech @ speech))
        rest = mixed / scale - speech
        assert 10 * np.log10(np.mean(speech**2) / np.mean(rest**2)) == pytest.approx(level, abs=1.0)
    for kind in {*NONSENSE[:-1], *NO_SPEECH["dev"], *NO_SPEECH["test"]}:
        sound = nonsense(kind, draw)
        assert 16000 <= len(sound) <= 80000
        assert 0 < np.abs(sound).max() <= 1
    assert np.abs(nonsense("silence", draw)).max() < 0.005


def test_a_translation_is_right_by_chrf() -> None:
    assert rightness("Where is the station?", ["Hello.", "Where is the station?"]) == 1
    assert rightness("I have two sisters.", ["Where is the station?"]) == 0
    assert 0 < rightness("Where is this stadium?", ["Where is the station?"]) < 1


def test_what_is_sure_and_wrong_is_counted_among_all_inputs() -> None:
    examples = [
        Example({"mean": 0.0}, 1.0, "speech"),
        Example({"mean": 0.0}, 1.0, "speech at 5 dB"),
        Example({"mean": 0.0}, 0.5, "speech"),
        Example({"mean": 0.0}, 0.0, "speech"),
        Example({"mean": 0.0}, 0.0, "backwards"),
    ]
    found = above([0.9, 0.7, 0.9, 0.9, 0.95], examples)
    assert (found["wrong_of_all"]["value"], found["wrong_of_all"]["n"]) == (2 / 5, 5)
    assert (found["of_right"]["value"], found["of_right"]["n"]) == (1 / 2, 2)  # 0.7 is not above 0.7
    assert found["wrong_by_kind"] == {"speech": 1, "backwards": 1}


def test_where_nothing_was_said_nothing_is_fitted_and_nothing_is_sure() -> None:
    said = [Example({"mean": value}, float(value < 0), "speech") for value in (-2.0, -1.0, 1.0, 2.0)]
    silent = Example({}, 0.0, "silence")
    assert fit([*said, silent]) == fit(said)
    assert measure(fit(said), [*said, silent])["above"]["wrong_by_kind"] == {}


def test_the_proof_has_other_nonsense_than_the_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, np.linspace(-0.5, 0.5, 16_000), 16_000)
    own = [(path, ("Hello.",))] * 20
    kinds = {
        split: [sound.kind for sound in translator_sounds(own, [(path, ("Hi.",), "people")], [(path, "Greek")], split)]
        for split in ("dev", "test")
    }
    nonsense_of = {
        split: {kind for kind in found if not kind.startswith(("speech", "other"))} for split, found in kinds.items()
    }
    assert nonsense_of["dev"] == set(NO_SPEECH["dev"])
    assert nonsense_of["test"] == {*NO_SPEECH["test"], "backwards"}
    for found in kinds.values():
        assert found.count("speech") == 4
        assert found.count("speech: people") == found.count("other language: Greek") == 1
    (backwards, *_) = [sound for sound in translator_sounds(own, [], [], "test") if sound.kind == "backwards"]
    assert backwards.samples[0] > 0.4 > -0.4 > backwards.samples[-1]
    assert backwards.references == ()


def test_a_translator_is_fitted_and_proved_on_manifests(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, on sounds of random speech: the fit reads dev, the proof test and what is unseen."""
    (tmp_path / "said").mkdir()
    for folder, column in (("natural", "speaker"), ("others", "chapter"), ("people", "speaker")):
        (tmp_path / folder).mkdir()
        rows = [f"path\tsplit\t{column}\ttext"]
        for split in ("dev", "test"):
            for number in range(4):
                name = f"said-{folder}{split}{number}.wav"
                soundfile.write(tmp_path / folder / name, buzz(0.6, number), RATE)
                rows.append(f"{name}\t{split}\tx\tBonjour.")
        (tmp_path / folder / "manifest.tsv").write_text("\n".join(rows) + "\n")
    for split in ("dev", "test"):
        names = [f"{folder}{split}{number}" for folder in ("natural", "people") for number in range(4)]
        lines = [f"{name}\tg\tBonjour.\tHello there." for name in names]
        (tmp_path / "said" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    corpus, other, people = (str(tmp_path / name / "manifest.tsv") for name in ("natural", "others", "people"))
    told = tmp_path / "examples.json"
    call = ["x", "speech", "--model", str(model), "--corpus", corpus, "--text", str(tmp_path / "said")]
    call += ["--other", other, "--unseen", people, "--examples", str(told), "--write"]
    monkeypatch.setattr(sys, "argv", call)
    with torch.random.fork_rng():
        main()
    torch.set_grad_enabled(True)
    examples = json.loads(told.read_text())
    kinds = {split: {row["kind"] for row in found["graph"]} for split, found in examples.items()}
    assert "speech: people" in kinds["test"]
    assert "speech: people" not in kinds["dev"]
    assert "other language: x" in kinds["dev"] & kinds["test"]
    assert all(0 <= row["right"] <= 1 for found in examples.values() for rows in found.values() for row in rows)
    assert set(read_calibrations(model)) == {"graph", "autoregressive"}
    measured = json.loads((model / "confidence.json").read_text())["measured"]["graph"]["above"]
    assert measured["wrong_of_all"]["n"] == len(examples["test"]["graph"])


def test_words_right_takes_the_nearest_reference() -> None:
    assert words_right("The train is late.", ["A bus is late", "the train is late"]) == 1
    assert words_right("The train is here.", ["the train is late"]) == pytest.approx(0.75)
    assert words_right("anything", []) == 0
