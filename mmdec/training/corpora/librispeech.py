"""Speech with its transcript, read from LibriSpeech's layout or from a manifest."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmdec.types import InputError

SOUNDS = (".flac", ".wav", ".mp3", ".ogg")


@dataclass(frozen=True)
class Utterance:
    """One recording. Those of one chapter have one speaker, and follow each other."""

    path: Path
    text: str
    speaker: str
    chapter: str


def read_utterances(root: str | Path, split: str | None = None) -> list[Utterance]:
    """The utterances of a corpus, in order.

    root: a folder in LibriSpeech's layout ({split}/{speaker}/{chapter}/*.trans.txt beside the sound files), or a
    manifest, .tsv with a header or .jsonl, of `path` (relative to the manifest), `text`, perhaps `speaker`, `chapter`
    and `split`. split: a folder below root, or the manifest's rows of that split. Raises InputError for what is not
    there.
    """
    path = Path(root)
    if path.is_file():
        utterances = list(_manifest(path, split))
    elif path.suffix in (".tsv", ".jsonl"):
        raise InputError(f"`root` must be an existing manifest, but '{path}' is no file. Check the path of the corpus.")
    else:
        folder = path / split if split else path
        if not folder.is_dir():
            raise InputError(f"`root` must hold '{split or ''}', but '{folder}' is no folder. Check corpus and split.")
        utterances = [row for file in sorted(folder.rglob("*.trans.txt")) for row in _chapter(file)]
    if not utterances:
        raise InputError(
            f"`root` must hold transcripts (*.trans.txt, or a manifest's rows), but '{path}' has none for split "
            f"{split!r}. LibriSpeech's layout or a .tsv or .jsonl of `path` and `text` is read."
        )
    return utterances


def read_recordings(paths: Sequence[str | Path]) -> list[Utterance]:
    """Recordings of one's own; the transcript of each lies beside it, under its name with .txt. Raises InputError."""
    utterances = []
    for number, path in enumerate(map(Path, paths)):
        beside = path.with_suffix(".txt")
        try:
            text = beside.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            raise InputError(
                f"`recordings` must have their transcripts beside them, but '{beside}' cannot be read. Write what is "
                "said there, as UTF-8; `mmdec bench asr` needs none."
            ) from None
        if not path.is_file():
            raise InputError(f"`recordings` must be sound files, but '{path}' is none. Check the path.")
        utterances.append(Utterance(path, " ".join(text.split()), str(number), str(number)))
    return utterances


def read_splits(root: str | Path, splits: str | list[str] | None) -> list[Utterance]:
    """Those of one split, of several, or (None) of a whole manifest."""
    named = splits if isinstance(splits, list) else [splits]
    return [row for split in named for row in read_utterances(root, split)]


def _chapter(file: Path) -> Iterator[Utterance]:
    speaker, chapter = file.parent.parent.name, f"{file.parent.parent.name}-{file.parent.name}"
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, text = line.strip().partition(" ")
        if not name:
            continue
        paths = [path for suffix in SOUNDS if (path := file.parent / f"{name}{suffix}").is_file()]
        if not paths:
            raise InputError(f"`root` must hold each utterance's sound, but '{file.parent / name}.flac' is missing.")
        yield Utterance(paths[0], text.strip(), speaker, chapter)


def _manifest(file: Path, split: str | None) -> Iterator[Utterance]:
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
        for number, row in enumerate(rows):
            if split is not None and row.get("split") not in (None, split):
                continue
            speaker = str(row.get("speaker") or number)
            path = file.parent / row["path"]
            if not path.is_file():
                raise InputError(
                    f"`root` must name existing sound files, but '{path}' does not exist. Check row {number + 1}."
                )
            yield Utterance(path, str(row["text"]).strip(), speaker, str(row.get("chapter") or speaker))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"`root` must be a manifest with `path` and `text`, but '{file}' is not ({error}). Give .tsv with a "
            "header, or .jsonl."
        ) from error
