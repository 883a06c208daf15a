"""Corpora of a few short files in every layout that mmdec reads, and the data module or reader of each."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from mmdec.daspeech.training.acoustic import AcousticData
from mmdec.daspeech.training.data import SpeechTranslationData
from mmdec.drafters.medusa.training.data import HeadData
from mmdec.drafters.networks.training.data import DraftData
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.image_text import read_questions
from tests.support.tiny_corpus import write_corpus

SIDE = 8  # pixels of a picture
SPLITS = {"train": 6, "dev": 2}


@dataclass(frozen=True)
class Layout:
    """One layout of a corpus. Paths are relative to the corpus's folder."""

    write: Callable[[Path], None]  # writes the corpus
    take: Callable[..., Any]  # reads it, as training does
    listed: str  # path of the file that lists the recordings or pictures
    name: str  # the recording or picture in the second row of that file, as written there
    file: str  # path of this recording or picture
    place: str  # what error messages call the second row


@cache
def sound(seed: int = 0, seconds: float = 1.0) -> bytes:
    buffer = io.BytesIO()
    samples = 0.2 * np.random.default_rng(seed).standard_normal(round(16000 * seconds))
    soundfile.write(buffer, samples.clip(-1, 1), 16000, format="FLAC")
    return buffer.getvalue()


def picture(seed: int = 0, side: int = SIDE) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def put_lines(path: Path, lines: Sequence[str]) -> None:
    put(path, "".join(f"{line}\n" for line in lines).encode())


def write_chapters(root: Path) -> None:
    for split, count in SPLITS.items():
        folder = root / split / "7" / "1"
        for number in range(count):
            put(folder / f"{split}-{number}.flac", sound(number))
        put_lines(folder / "7-1.trans.txt", [f"{split}-{number} good day number {number}" for number in range(count)])


def rows_of_recordings(root: Path) -> list[dict[str, str]]:
    rows = []
    for split, count in SPLITS.items():
        for number in range(count):
            put(root / "sounds" / f"{split}-{number}.flac", sound(number))
            rows.append({"path": f"sounds/{split}-{number}.flac", "text": f"good day {number}", "split": split})
    return rows


def write_manifest(root: Path) -> None:
    rows = rows_of_recordings(root)
    put_lines(root / "m.tsv", ["path\ttext\tsplit", *("\t".join(row.values()) for row in rows)])


def write_json_lines(root: Path) -> None:
    put_lines(root / "m.jsonl", [json.dumps(row) for row in rows_of_recordings(root)])


def write_conversations(root: Path) -> None:
    for split, count in SPLITS.items():
        rows = []
        for number in range(count):
            put(root / "images" / f"{split}-{number}.png", picture(number + 100 * len(split)))
            texts = [f"<image>\nWhat is in {split} {number}?", "A square. " * (number + 1)]
            turns = [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts, strict=True)]
            note = {"task": "what", "expected": "square", "claims": []}
            rows.append({"id": number, "image": f"{split}-{number}.png", "conversations": turns, "turns": [note]})
        put(root / f"{split}.json", json.dumps(rows, indent=0).encode())


def write_questions(root: Path) -> None:
    rows = [{"question_id": n, "image": f"{n}.png", "question": "What?", "answer": "a"} for n in range(4)]
    put_lines(root / "q.jsonl", [json.dumps(row) for row in rows])
    write_pictures(root, "{}.png")


def write_question_table(root: Path) -> None:
    put_lines(root / "q.tsv", ["file\ttask\tquestion\tanswer", *(f"{n}.png\tall\tWhat?\tA." for n in range(4))])
    write_pictures(root, "{}.png")


def write_textvqa(root: Path) -> None:
    rows = [{"question_id": n, "image_id": str(n), "question": "What?", "answers": ["a"] * 10} for n in range(4)]
    put(root / "t.json", json.dumps({"data": rows}, indent=0).encode())
    write_pictures(root / "train_images", "{}.jpg")


def write_vqav2(root: Path) -> None:
    rows = [{"question_id": n, "image_id": n, "question": "What?"} for n in range(4)]
    put(root / "v.json", json.dumps({"data_subtype": "val2014", "questions": rows}, indent=0).encode())
    write_pictures(root / "val2014", "COCO_val2014_{:012d}.jpg")


def write_pictures(folder: Path, named: str) -> None:
    for number in range(4):
        put(folder / named.format(number), picture(number))


def take_pairs(root: Path, **options: Any) -> SpeechTranslationData:
    data = SpeechTranslationData(
        str(root / "cv" / "fr"), str(root / "cvss_c"), upsample=0.25, min_vertices=16, jobs=1, **options
    )
    data.prepare_data()
    data.setup("fit")
    return data


def take_english_half(root: Path, **options: Any) -> AcousticData:
    data = AcousticData(str(root / "cvss_c"), **options)
    data.prepare_data()
    data.setup("fit")
    return data


def heads_taker(name: str) -> Callable[..., HeadData]:
    def take(root: Path, **options: Any) -> HeadData:
        data = HeadData("none", str(root / name), cache_dir=str(root / "cache"), **options)
        data.setup("fit")
        return data

    return take


def take_samples(root: Path, **options: Any) -> DraftData:
    data = DraftData("none", str(root), cache_dir=str(root / "cache"), **options)
    assert data.samples
    return data


def questions_taker(name: str) -> Callable[..., Any]:
    def take(root: Path, *, allow_absolute_paths: bool = False) -> Any:
        return read_questions(root / name, admission=Admission(allow_absolute_paths))

    return take


def write_pairs(root: Path) -> None:
    write_corpus(root, recordings=2, dev=2)


CLIP = "common_voice_fr_00000002.mp3"
LAYOUTS = {
    "pairs": Layout(write_pairs, take_pairs, "cvss_c/train.tsv", CLIP, f"cv/fr/clips/{CLIP}", "line 2 of"),
    "english half": Layout(
        write_pairs, take_english_half, "cvss_c/train.tsv", CLIP, f"cvss_c/train/{CLIP}.wav", "line 2 of"
    ),
    "chapters": Layout(
        write_chapters,
        heads_taker("."),
        "train/7/1/7-1.trans.txt",
        "train-1",
        "train/7/1/train-1.flac",
        "line 2 of",
    ),
    "manifest": Layout(
        write_manifest, heads_taker("m.tsv"), "m.tsv", "sounds/train-1.flac", "sounds/train-1.flac", "line 3 of"
    ),
    "json lines": Layout(
        write_json_lines, heads_taker("m.jsonl"), "m.jsonl", "sounds/train-1.flac", "sounds/train-1.flac", "line 2 of"
    ),
    "samples": Layout(write_conversations, take_samples, "train.json", "train-1.png", "images/train-1.png", "row 1 of"),
    "questions": Layout(write_questions, questions_taker("q.jsonl"), "q.jsonl", "1.png", "1.png", "line 2 of"),
    "question table": Layout(write_question_table, questions_taker("q.tsv"), "q.tsv", "1.png", "1.png", "line 3 of"),
    "conversations": Layout(
        write_conversations,
        questions_taker("train.json"),
        "train.json",
        "train-1.png",
        "images/train-1.png",
        "row 1 of",
    ),
    "textvqa": Layout(write_textvqa, questions_taker("t.json"), "t.json", '"1"', "train_images/1.jpg", "row 1 of"),
    "vqav2": Layout(write_vqav2, questions_taker("v.json"), "v.json", "1", "", "row 1 of"),
}
