"""Tests drawn scenes: their texts are true, splits share nothing, a seed gives the same files, and wording varies."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))

import scene_canvas
import scene_fonts
import scene_object_talk
import scene_objects
import scene_print_talk
import scene_prints
import scene_wordings
import scene_words
import scenes
from splits import share

from tests.support import scene_claims

needs_fonts = pytest.mark.skipif(
    bool(scene_fonts.missing_fonts()), reason=f"no pictures: {scene_fonts.missing_fonts()}"
)
COUNT = 200  # scenes of each kind


def graphs(kind: str) -> list[dict[str, Any]]:
    return [scenes.draw_graph(kind, scenes.random.Random(f"{kind} {number}")) for number in range(COUNT)]


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_every_claim_of_every_answer_holds(kind: str) -> None:
    read = 0
    for number, graph in enumerate(graphs(kind)):
        for held in (False, True):
            for turn in scenes.talk(graph, scenes.random.Random(f"talk {number} {held}"), held):
                wrong, count = scene_claims.false_claims(graph, turn.answer)
                assert not wrong, (turn, graph)
                assert right_core(graph, turn), (turn, graph)
                for claim in turn.claims:
                    assert all(word.lower() in turn.answer.lower() for word in claim), (turn, claim)
                if turn.task == "describe":
                    assert count >= len(turn.claims) / 2, (turn, count)
                read += count
    assert read > 2 * COUNT


def right_core(graph: dict[str, Any], turn: scene_wordings.Turn) -> bool:
    """Whether a short answer's core is what the graph gives, found another way than the answer was."""
    text, objects = turn.question.lower(), graph.get("objects", [])
    if turn.task == "count":
        colour = next((c for c in scene_words.COLOURS if f"{c} objects" in text), None)
        thing = next((t for t in scene_words.THINGS if scene_object_talk.plural(t) in text), None)
        return scene_claims.rows_hold(
            graph, turn.answer, lambda one: colour in (None, one["colour"]) and thing in (None, one["thing"])
        )
    if turn.task == "yes_no":
        colour, thing = re.findall(rf"({'|'.join(scene_words.COLOURS)}) ({'|'.join(scene_words.THINGS)})", text)[0]
        shown = any((one["colour"], one["thing"]) == (colour, thing) for one in objects)
        return turn.expected == ("yes" if shown else "no")
    if turn.task in ("price_of", "time_of") and "rows" in graph:
        pair = [row for row in graph["rows"] if any(re.search(rf"\b{cell}\b", turn.question) for cell in row)]
        return len(pair) == 1 and turn.expected in pair[0]
    if turn.task == "relation":
        side = next(side for side in scene_object_talk.SIDES if side in text)
        one = [one for one in objects if re.search(rf"\b{scene_object_talk.single(graph, one)}[?.]?$", text)]
        found = scene_object_talk.beside(graph, one[0], side)
        named = "nothing" if found is None else f"a {found['size']} {found['colour']} {found['thing']}"
        return len(one) == 1 and turn.expected == named
    if turn.task == "colour" and objects:
        return sum(f"the {one['thing']}" in text and one["colour"] == turn.expected for one in objects) == 1
    return turn.task == "describe" or turn.expected in turn.answer or turn.expected.capitalize() in turn.answer


def test_the_check_finds_what_is_false() -> None:
    graph = {
        "kind": "room",
        "wall": "grey",
        "objects": [
            {"thing": "star", "colour": "red", "size": "large", "place": 0},
            {"thing": "ball", "colour": "blue", "size": "small", "place": 1},
        ],
    }
    held = "A large red star in the top left. The star is to the left of the ball. That makes 2 objects."
    assert scene_claims.false_claims(graph, held) == ([], 3)
    for wrong in (
        held.replace("large", "small"),
        held.replace("red", "blue"),
        held.replace("top left", "top right"),
        held.replace("to the left of", "above"),
        held.replace("2 objects", "3 objects"),
    ):
        assert len(scene_claims.false_claims(graph, wrong)[0]) == 1, wrong
    menu = {"kind": "menu", "title": "CAFE", "rows": [["SOUP", "4.50"], ["TEA", "2.20"]]}
    assert scene_claims.false_claims(menu, "CAFE: SOUP costs 4.50; TEA costs 2.20.")[0] == []
    assert scene_claims.false_claims(menu, "SOUP costs 2.20.")[0] == ["SOUP costs 2.20"]
    assert scene_claims.false_claims(menu, "SOAP costs 4.50.")[0] == ["SOAP", "SOAP costs 4.50"]


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_graph_has_one_split(kind: str) -> None:
    found = Counter(scenes.split_of(graph) for graph in graphs(kind))
    assert set(found) <= {"train", "dev", "test"}
    assert found["train"] > COUNT * 0.6
    graph = graphs(kind)[0]
    assert scenes.split_of(json.loads(json.dumps(graph))) == scenes.split_of(graph)
    assert 0 <= share(scenes.SALT, json.dumps(graph, sort_keys=True)) < 1


@needs_fonts
def test_splits_share_no_graph_and_held_out_words_are_not_trained() -> None:
    seen = {
        split: {json.dumps(scenes.draw_scene(split, 0, number).graph, sort_keys=True) for number in range(60)}
        for split in scenes.SPLITS
    }
    for split in ("dev", "test", "test_fonts", "test_templates"):
        assert not seen["train"] & seen[split]
    assert not seen["dev"] & seen["test"]
    assert not set(scene_fonts.TRAIN) & set(scene_fonts.HELD_OUT)
    for task, wordings in scene_wordings.HELD_OUT.items():
        assert not {question for question, _ in wordings} & {question for question, _ in scene_wordings.WORDINGS[task]}


@needs_fonts
def test_the_same_seed_gives_the_same_bytes_and_a_build_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes, "SHARD", 4)
    for name in ("whole", "parts"):
        scenes.write_shard(tmp_path / name, "train", 3, 0, 8)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").rglob("*") if path.is_file()}
    for name in ("whole", "parts"):
        scenes.write_shard(tmp_path / name, "train", 3, 0, 8)
        scenes.write_shard(tmp_path / name, "train", 3, 1, 8)
        scenes.join(tmp_path / name, "train", 2)
    assert all(path.stat().st_mtime_ns == before for path, before in written.items())
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert len(files) == 8 + 4 + 2
    for path in files:
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "parts" / path).read_bytes(), path
    rows = json.loads((tmp_path / "whole" / "train.json").read_text())
    cells = np.load(tmp_path / "whole" / "train.cells.npy", allow_pickle=False)
    assert len(rows) == 8
    assert cells.shape == (8, 64, 8, 2)
    other = scenes.draw_scene("train", 4, 0)
    assert scenes.png(other.pixels) != (tmp_path / "whole" / "images" / rows[0]["image"]).read_bytes()


@needs_fonts
def test_cells_say_where_letters_and_things_are() -> None:
    canvas = scene_canvas.Canvas((200, 200, 200), scenes.random.Random(1))
    canvas.text((2, 20), "AB", scene_fonts.TRAIN[0], 14, (0, 0, 0))
    canvas.thing("star", "red", (100, 100), 16)
    canvas.draw = scenes.random.Random(8)
    monkey = scene_canvas.label_cells(canvas.classes, canvas.tints, canvas.letters)
    grid = monkey.reshape(8, 8, 2, 4, 2).transpose(0, 2, 1, 3, 4).reshape(16, 32, 2)  # back to rows and columns
    a, b = (scene_canvas.CLASSES.index(letter) for letter in "AB")
    assert sorted(grid[..., 0][grid[..., 0] > 0].tolist())[:2] == [a, b]
    assert [int(where) for where in np.argwhere(grid[..., 0] == a)[0]] == [2, 1]
    star = grid[..., 0] == scene_canvas.CLASSES.index("star")
    assert star[12, 25]
    assert not star[8, 25]
    assert (grid[..., 1][star] == scene_canvas.TINTS.index("red")).all()


class Chances(scenes.random.Random):
    """Chances that are given: first these, then never."""

    def __init__(self, *chances: float) -> None:
        super().__init__(0)
        self.chances = list(chances)

    def random(self) -> float:
        return self.chances.pop(0) if self.chances else 0.99


PLAIN, LEFT, RIGHT = (0.99,), (0.99, 0.0, 1.0), (0.99, 0.0, 0.0)  # as drawn; turned by 5 degrees either way
CORNERS = (("SOUP 4.50", (3, 9)), ("09:30-X", (66, 12)), ("MEW 17", (4, 117)), ("QUIZ8", (78, 118)))


@needs_fonts
@pytest.mark.parametrize("chances", [PLAIN, LEFT, RIGHT], ids=["plain", "left", "right"])
@pytest.mark.parametrize("font", [scene_fonts.TRAIN[0], scene_fonts.TRAIN[-1], scene_fonts.HELD_OUT[0]])
def test_a_character_covers_its_patch(font: str, chances: tuple[float, ...]) -> None:
    size = 13
    for text, at in CORNERS:

        def drawn(said: str, at: tuple[int, int] = at) -> scene_canvas.Canvas:
            canvas = scene_canvas.Canvas((255, 255, 255), Chances(*chances))
            canvas.text(at, said, font, size, (0, 0, 0))
            return canvas

        *_, [(printed, patches)] = drawn(text).finish()
        assert printed == text
        assert len(patches) == len(text)
        for index, letter in enumerate(text):
            if letter == " ":
                assert patches[index] == -1
                continue
            before, after = (drawn(text[: index + more]).finish()[0].astype(float).sum(2) for more in (0, 1))
            ink = np.abs(before - after)  # of this letter
            row, column = divmod(patches[index], 8)
            y, x = ((ink * place).sum() / ink.sum() for place in np.mgrid[:128, :128])
            near = 1.5 if letter.isalnum() else size / 2  # a full stop stands on the line, below its middle
            assert 16 * column - 1.5 <= x + 0.5 <= 16 * column + 17.5, (letter, x, column)
            assert 16 * row - near <= y + 0.5 <= 16 * row + 16 + near, (letter, y, row)
            if letter.isalnum():
                assert ink[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].sum() > ink.sum() / 8


@needs_fonts
def test_characters_outside_the_picture_have_no_patch() -> None:
    for chances in (PLAIN, LEFT):
        canvas = scene_canvas.Canvas((255, 255, 255), Chances(*chances))
        canvas.text((100, 64), "OUTSIDE", scene_fonts.TRAIN[0], 14, (0, 0, 0))
        canvas.text((10, -20), "ABOVE", scene_fonts.TRAIN[0], 14, (0, 0, 0))
        pixels, _, [(_, outside), (_, above)] = canvas.finish()
        assert (pixels < 128).any()
        assert above == [-1] * 5
        assert outside == [*sorted(outside[:3]), *[-1] * 4]
        assert all(number % 8 in (6, 7) for number in outside[:3])  # columns of patches that begin at 96
    assert [scene_canvas.patch_at(*at) for at in ((0, 0), (127.9, 127.9), (16, 15.9), (15.9, 16))] == [0, 63, 1, 8]
    assert [scene_canvas.patch_at(*at) for at in ((-0.1, 5), (5, -0.1), (128, 5), (5, 128))] == [-1] * 4


@needs_fonts
@pytest.mark.parametrize("kind", scene_prints.KINDS)
def test_what_is_said_of_prints_is_printed(kind: str) -> None:
    """Every printed word and number of an answer lies in `prints`, with a patch of each of its characters."""
    found = 0
    for number in range(8):
        scene = scenes.draw_scene("train", 5, number, kind)
        row = json.loads(json.dumps(scenes.record(scene, "name", "file")))
        assert [tuple(entry) for entry in row["prints"]] == scene.prints
        for text, patches in scene.prints:
            assert len(text) == len(patches)
            assert all(-1 <= patch < 64 for patch in patches)
            assert all(patch == -1 for letter, patch in zip(text, patches, strict=True) if letter == " ")
            shown = {letter for letter, patch in zip(text, patches, strict=True) if patch >= 0}
            inside = scene.cells[..., 0][[patch for patch in patches if patch >= 0]]
            assert shown & {scene_canvas.CLASSES[label] for label in inside.flatten()} or not shown, text
        words = " ".join(text for text, _ in scene.prints)
        said = {word for turn in scene.turns for word in re.findall(r"\b[A-Z]{2,}\b|\d+[.:]\d\d", turn.answer)}
        if not scene.graph.get("hands"):  # a clock with hands is read from them
            assert {word for word in said if word not in words} == set(), (words, said)
            found += len(said)
    assert found or kind in ("thermometer", "map")


@needs_fonts
def test_shipped_samples_are_what_the_builder_writes(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "data" / "samples" / "images"
    scenes.write_samples(tmp_path, 0)
    assert (shipped / "samples.tsv").read_text() == (tmp_path / "samples.tsv").read_text()
    for kind in scenes.SAMPLES:
        with Image.open(shipped / f"{kind}.png") as one, Image.open(tmp_path / f"{kind}.png") as other:
            difference = np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int))
        assert difference.mean() < 4  # another FreeType draws letters' edges a little differently


def test_missing_fonts_are_named_with_their_packages(tmp_path: Path) -> None:
    said = scene_fonts.missing_fonts(tmp_path)
    assert "fonts-freefont-ttf" in said
    assert str(len(scene_fonts.TRAIN) + len(scene_fonts.HELD_OUT)) in said


def test_every_kind_is_drawn_apart_from_others() -> None:
    assert set(scenes.KINDS) == {"room", "street", *scene_prints.KINDS} == {"room", "street", *scene_print_talk.KINDS}
    for kind in ("room", "street"):
        for graph in graphs(kind):
            places = [one["place"] for one in graph["objects"]]
            assert len(places) == len(set(places))
            assert 1 <= len(places) <= 9
    counts = Counter(len(graph["objects"]) for kind in ("room", "street") for graph in graphs(kind))
    assert set(counts) == set(range(1, 10))


def test_wording_varies_with_the_scene_and_descriptions_are_long() -> None:
    openings, lengths = Counter(), []
    for kind in scenes.KINDS:
        for number, graph in enumerate(graphs(kind)[:60]):
            turn = scenes.talk(graph, scenes.random.Random(str(number)), False)[0]
            openings[" ".join(turn.answer.split()[:3])] += 1
            lengths.append(len(re.findall(r"[A-Z](?=[A-Z])|[a-z]+|\d|[A-Z]|[^\w\s]", turn.answer)))
            again = scenes.talk(graph, scenes.random.Random("else"), False)[0]
            assert turn.answer == again.answer  # follows from the scene, not from chance
    assert len(openings) > 25
    assert max(openings.values()) < 0.35 * sum(openings.values())
    assert np.median(lengths) > 50
    assert scene_objects.THIRD * 3 == scene_canvas.SIDE
