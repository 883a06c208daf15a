"""Tests broken corpora of every layout: one error names file and place; and held-out data is not used for training."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mmdec.errors import InputError
from mmdec.training.corpora.librispeech import read_utterances
from tests.unit.training.corpora.small_corpora import LAYOUTS, picture, put, sound

TEXT = list(LAYOUTS)
LINES = [name for name in TEXT if not LAYOUTS[name].listed.endswith(".json")]
NAMED = [name for name in TEXT if name not in ("vqav2", "textvqa")]  # numbers name no place
SOUNDS = ["pairs", "english half", "chapters", "manifest", "json lines"]
PICTURES = ["samples"]
TRAINED = SOUNDS + PICTURES


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a layout without any damage."""
    written: dict[str, Path] = {}

    def folder(layout: str) -> Path:
        if layout not in written:
            written[layout] = tmp_path_factory.mktemp("whole")
            LAYOUTS[layout].write(written[layout])
        return written[layout]

    return folder


@pytest.fixture
def copied(whole: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy that a test may damage."""

    def folder(layout: str) -> Path:
        return Path(shutil.copytree(whole(layout), tmp_path / "corpus"))

    return folder


def assert_refused(layout: str, root: Path, *words: str, **options: Any) -> None:
    """Return one sentence, with its remedy, that has all the words."""
    with pytest.raises(InputError) as caught:
        LAYOUTS[layout].take(root, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ", but " in message
    assert len(message) < 900
    for word in words:
        assert word in message, message


def place(layout: str) -> str:
    """How the second row is called, at the beginning of a sentence or within."""
    return LAYOUTS[layout].place[1:]


def rename(root: Path, layout: str, name: str) -> None:
    """Let the second row name another file."""
    file, old = root / LAYOUTS[layout].listed, LAYOUTS[layout].name
    content = file.read_text(encoding="utf-8")
    file.write_text(content.replace(old, name if file.suffix in (".tsv", ".txt") else json.dumps(name)[1:-1]), "utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undamaged_corpora_are_accepted(layout: str, copied: Callable[[str], Path]) -> None:
    assert LAYOUTS[layout].take(copied(layout))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "latin 1": lambda content: content.replace(b"day", b"d\xe9y", 1).replace(b"What", b"Wh\xe0t", 1),
    "utf-16": lambda content: content.decode().encode("utf-16"),
    "cut": lambda content: content[: len(content) // 2] + b"\xc3",
}


@pytest.mark.parametrize("damage", BYTES)
@pytest.mark.parametrize("layout", TEXT)
def test_text_that_is_not_utf8_is_refused(layout: str, damage: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    content = file.read_bytes()
    broken = BYTES[damage](content)
    file.write_bytes(broken if broken != content else content.replace(b".", b"\xe9", 1))
    assert_refused(layout, root, "UTF-8", "line ", " has the byte 0x", file.name)


@pytest.mark.parametrize("layout", TEXT)
def test_a_byte_order_mark_is_passed_over(layout: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert LAYOUTS[layout].take(root)


@pytest.mark.parametrize("layout", TEXT)
def test_too_long_texts_are_refused(layout: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    content = file.read_text(encoding="utf-8")
    word = next(word for word in ("hold", "day", "What") if word in content)
    file.write_text(content.replace(word, "x" * 140_000, 1), encoding="utf-8")
    assert_refused(layout, root, "at most 131072 characters", file.name, "line " if layout in LINES else "row ")


@pytest.mark.parametrize(("damage", "message"), [("\0", "a NUL"), ("\r", "a carriage return")])
@pytest.mark.parametrize("layout", LINES)
def test_binary_lines_are_refused(layout: str, damage: str, message: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    lines = file.read_text(encoding="utf-8").split("\n")
    lines[1] = lines[1][:9] + damage + lines[1][9:]
    file.write_bytes("\n".join(lines).encode())
    assert_refused(layout, root, message, "line 2 of", file.name)


@pytest.mark.parametrize("damage", ["missing", "folder", "empty"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_or_empty_lists_are_refused(layout: str, damage: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "empty":
        file.touch()
    if (layout, damage) == ("questions", "empty"):  # a list of no questions: who asks them says so
        assert LAYOUTS[layout].take(root) == []
    else:
        assert_refused(layout, root, "corpus" if layout == "chapters" else file.stem)


@pytest.mark.parametrize("layout", [name for name in TEXT if name not in LINES or name in ("json lines", "questions")])
def test_truncated_json_is_refused(layout: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    file.write_bytes(file.read_bytes()[:-5])
    assert_refused(layout, root, "JSON", "column", file.name)


@pytest.mark.parametrize("name", ["absolute", "../outside/stolen", "link"])
@pytest.mark.parametrize("layout", NAMED)
def test_paths_outside_the_corpus_are_refused(layout: str, name: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    own = root / LAYOUTS[layout].file
    outside = root.parent / "outside" / f"stolen{own.suffix}"
    put(outside, own.read_bytes())
    suffix = "" if layout == "chapters" else own.suffix
    if name == "link":
        own.unlink()
        own.symlink_to(outside)
    elif layout == "english half":
        rename(root, layout, str(outside.with_suffix("")) if name == "absolute" else name)
    else:
        rename(root, layout, str(outside.with_suffix(suffix)) if name == "absolute" else name + suffix)
    message = {"absolute": "the absolute path", "link": "a link that leads out"}.get(name, "which leads out")
    words = ("inside the folder", message, Path(LAYOUTS[layout].listed).name)
    assert_refused(layout, root, *words, "" if (layout, name) == ("pairs", "link") else place(layout))
    if name == "link":
        assert LAYOUTS[layout].take(root, allow_absolute_paths=True)
    elif name.startswith(".."):
        assert_refused(layout, root, *words, allow_absolute_paths=True)
    elif layout not in ("pairs", "english half"):  # whose other tables know no such name
        assert LAYOUTS[layout].take(root, allow_absolute_paths=True)


@pytest.mark.parametrize("layout", [name for name in NAMED if LAYOUTS[name].listed.endswith(("json", "jsonl"))])
@pytest.mark.parametrize("name", ["", ".", "a\0b", "\ud800"])
def test_impossible_file_names_are_refused(layout: str, name: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    rename(root, layout, name)
    assert_refused(layout, root, place(layout), Path(LAYOUTS[layout].listed).name)


@pytest.mark.parametrize("layout", ["chapters", "manifest", "json lines", "questions", "textvqa", "vqav2"])
def test_duplicate_ids_are_refused(layout: str, copied: Callable[[str], Path]) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    if file.suffix == ".json":
        (key, rows), *_ = ((key, rows) for key, rows in json.loads(file.read_bytes()).items() if isinstance(rows, list))
        file.write_text(json.dumps({key: [*rows, rows[1]]}), encoding="utf-8")
    else:
        lines = file.read_text(encoding="utf-8").splitlines()
        file.write_text("\n".join([*lines, lines[1]]) + "\n", encoding="utf-8")
    assert_refused(layout, root, " again, as ", file.name)


@pytest.mark.parametrize("table", ["train.tsv", "train.alignment.tsv", "train.references.tsv", "../cv/fr/train.tsv"])
def test_contradicting_rows_are_refused(table: str, copied: Callable[[str], Path]) -> None:
    root = copied("pairs")
    file = root / "cvss_c" / table
    lines = file.read_text(encoding="utf-8").splitlines()
    changed = lines[1].replace("Bonjour", "Bonsoir").replace("ow:", "ax:").replace("low.", "high.")
    file.write_text("\n".join([*lines, lines[1], changed]) + "\n", encoding="utf-8")
    assert_refused("pairs", root, "again, with something else", f"line {len(lines) + 2} of", "than line 2", file.name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sounds/train-1.flac\tgood day", "has 2"),
        ("sounds/train-1.flac\tgood\tday\ttrain", "has 4"),
        ("sounds/train-1.flac\t\ttrain", "has no `text`"),
        ("\tgood day\ttrain", "has no `path`"),
        ("sounds/train-1.flac\tgood day\t", "has no `split`"),
    ],
)
def test_incomplete_manifest_rows_are_refused(line: str, message: str, copied: Callable[[str], Path]) -> None:
    root = copied("manifest")
    lines = (root / "m.tsv").read_text(encoding="utf-8").splitlines()
    lines[2] = line
    (root / "m.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert_refused("manifest", root, message, "line 3 of", "m.tsv")


@pytest.mark.parametrize("changes", [{"split": None}, {"split": ""}, {"split": 3}, {"text": None}, {"text": 5}])
def test_incomplete_json_rows_are_refused(changes: dict[str, Any], copied: Callable[[str], Path]) -> None:
    root = copied("json lines")
    lines = (root / "m.jsonl").read_text(encoding="utf-8").splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | changes)
    (root / "m.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert_refused("json lines", root, f"has no `{next(iter(changes))}`", "line 2 of", "m.jsonl")


@pytest.mark.parametrize("layout", ["manifest", "json lines"])
def test_a_manifest_without_splits_is_refused(layout: str, copied: Callable[[str], Path]) -> None:
    """Rows are divided so that no run is measured on its training data."""
    root = copied(layout)
    file = root / LAYOUTS[layout].listed
    content = file.read_text(encoding="utf-8")
    for old in ("\tsplit", "\ttrain", "\tdev", ', "split": "train"', ', "split": "dev"'):
        content = content.replace(old, "")
    file.write_text(content, encoding="utf-8")
    whole = [row.path for row in read_utterances(file)]
    parts = [[row.path for row in read_utterances(file, split)] for split in ("train", "dev")]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    with pytest.raises(InputError, match="has none for split 'test'"):
        read_utterances(file, "test")


SHARED = [
    ("manifest", {"train_split": None, "dev_split": None}),
    ("manifest", {"train_split": None}),
    ("manifest", {"train_split": ["train", "dev"]}),
    ("json lines", {"train_split": "dev"}),
    ("json lines", {"dev_split": None}),
    ("chapters", {"train_split": "dev"}),
    ("chapters", {"train_split": ["train", "dev"]}),
    ("pairs", {"validation_split": "train"}),
    ("english half", {"validation_split": "train"}),
    ("samples", {"dev_split": "train"}),
]


@pytest.mark.parametrize(("layout", "options"), SHARED)
def test_nothing_is_trained_on_what_is_held_out(
    layout: str, options: dict[str, Any], copied: Callable[[str], Path]
) -> None:
    assert_refused(layout, copied(layout), "for development than for training", "in both, '", **options)


@pytest.mark.parametrize("layout", TRAINED)
def test_a_file_in_both_splits_is_refused(layout: str, copied: Callable[[str], Path]) -> None:
    """By a row that is listed in both, or by a link."""
    root = copied(layout)
    if layout in ("pairs", "english half"):
        table = root / "cvss_c" / "dev.tsv"
        table.write_text(table.read_text() + (root / "cvss_c" / "train.tsv").read_text().splitlines()[1] + "\n")
    elif layout in PICTURES:
        row = json.loads((root / "train.json").read_text())[1]
        (root / "dev.json").write_text(json.dumps([*json.loads((root / "dev.json").read_text()), row]))
    else:
        own = root / LAYOUTS[layout].file
        other = own.with_name("train-0.flac") if layout == "chapters" else own.with_name("dev-0.flac")
        other = root / "dev" / "7" / "1" / "dev-0.flac" if layout == "chapters" else other
        own.unlink()
        own.symlink_to(other)
    assert_refused(layout, root, "for development than for training", "1 are in both", allow_absolute_paths=True)


def test_questions_held_out_of_one_list_are_not_trained_on(copied: Callable[[str], Path]) -> None:
    root = copied("samples")
    rows = json.loads((root / "train.json").read_text())
    (root / "train.json").write_text(json.dumps([*rows, rows[0]]))
    data = LAYOUTS["samples"].take(root, dev_split=None, dev_samples=2)
    held = {sample.name for sample in data.samples["dev"]}
    assert held.isdisjoint(sample.name for sample in data.samples["train"])
    assert len(data.samples["train"]) == 4


def encoded(samples: np.ndarray, rate: int = 16000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


LOUD = 0.1 * np.ones(16000, np.float32)
BAD_SOUNDS: dict[str, bytes | None] = {
    "missing": None,
    "text": b"Good day, this is text.\n" * 20,
    "cut": sound()[:2000],
    "no samples": encoded(np.zeros(0, np.float32)),
    "NaN": encoded(np.where(np.arange(16000) == 9000, np.nan, LOUD)),
    "infinite": encoded(np.where(np.arange(16000) == 9000, np.inf, LOUD)),
    "100 Hz": encoded(LOUD, 100),
    "1e30": encoded(1e30 * LOUD),
}
BAD_PICTURES: dict[str, bytes | None] = {
    "missing": None,
    "nothing": b"",
    "text": b"Good day.",
    "cut": picture(1, 64)[:2000],
    "a bomb": picture(1, 1)[:16] + b"\x00\x01\x00\x00" * 2 + picture(1, 1)[24:],
}
DAMAGES = [
    *((layout, name, content) for layout in SOUNDS for name, content in BAD_SOUNDS.items()),
    *((layout, name, content) for layout in PICTURES for name, content in BAD_PICTURES.items()),
]


def count_rows(layout: str, data: Any) -> int:
    """On how many files it is trained."""
    count: dict[str, Callable[[], int]] = {
        "pairs": lambda: len(data.train_set),
        "english half": lambda: len(data.train_items),
        "chapters": lambda: sum(map(len, data.plans["train"][0])),
        "manifest": lambda: sum(map(len, data.plans["train"][0])),
        "json lines": lambda: sum(map(len, data.plans["train"][0])),
        "samples": lambda: len(data.samples["train"]),
    }
    return count[layout]()


@pytest.mark.parametrize(
    ("layout", "content"),
    [(layout, content) for layout, _, content in DAMAGES],
    ids=[f"{layout}-{name}" for layout, name, _ in DAMAGES],
)
def test_one_bad_file_is_left_out_and_named(
    layout: str,
    content: bytes | None,
    copied: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = copied(layout)
    file = root / LAYOUTS[layout].file
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    listed = Path(LAYOUTS[layout].listed).name
    if layout != "english half":  # whose sentence is said in another recording, too
        assert_refused(layout, root, file.name, listed if layout != "manifest" else "", "`max_bad_share`", "1 of the ")
    with caplog.at_level(logging.INFO):
        data = LAYOUTS[layout].take(root, max_bad_share=0.2)
    assert file.name.removesuffix(".wav") in caplog.text
    assert "left out" in caplog.text
    if layout != "english half":
        assert count_rows(layout, data) == (7 if layout == "pairs" else 5)


@pytest.mark.parametrize("layout", ["chapters", "manifest", "json lines"])
def test_an_evaluation_counts_a_missing_recording_as_empty(layout: str, copied: Callable[[str], Path]) -> None:
    """The result names the recording; if all are missing, the corpus is a different one."""
    root = copied(layout)
    (root / LAYOUTS[layout].file).unlink()
    corpus = root if layout == "chapters" else root / LAYOUTS[layout].listed
    rows = read_utterances(corpus, "train")
    assert [row.path.is_file() for row in rows] == [True, False, True, True, True, True]
    for path in root.rglob("train-*.flac"):
        path.unlink()
    with pytest.raises(InputError, match=r"none of 6 is there: .*train-0\.flac' of line \d of '.*does not exist"):
        read_utterances(corpus, "train")


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("layout", TRAINED)
def test_the_tolerated_share_is_between_zero_and_one(layout: str, share: float, copied: Callable[[str], Path]) -> None:
    assert_refused(layout, copied(layout), "`max_bad_share` must be from 0 to 1", max_bad_share=share)
