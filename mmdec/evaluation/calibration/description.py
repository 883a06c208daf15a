"""Examples for calibrating the confidence of answers about pictures: see `__main__.py`.

Every third question is asked about an empty picture, or about a picture of another style than the model's training
pictures. The other styles are the folders of `--other` (`data/build/other_pictures.py`). They differ between
development and test split, so the test measures styles that the fit has not seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mmdec.evaluation.calibration.examples import EMPTY, SEEDS, Example, empty_picture
from mmdec.hub.vlm import FamiliarPictures, LoadedVlm, load_vlm
from mmdec.pipelines.description.answer import ANSWER, summaries
from mmdec.pipelines.description.describe import describe
from mmdec.training.corpora.chats import read_conversations
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.training.metrics.text import claims_held, right_answer
from mmdec.types import InputError

FAMILIAR = 4000  # number of training pictures for the statistics


@cache
def model(name: str | None, corpus: Path) -> LoadedVlm:
    """The model, with statistics of the pictures in this corpus's training split."""
    vlm = load_vlm(name or "vlm-scenes")
    rows = [row for row in evenly_spaced(read_conversations(corpus / "train.json"), FAMILIAR) if row.images]
    seen = summaries(vlm, [row.images[0] for row in rows])
    kinds = [row.notes.get("graph", {}).get("kind", "") for row in rows]  # kinds of scene, if the corpus has them
    return replace(vlm, familiar=None if seen is None else FamiliarPictures.of(seen, kinds))


def described(options: argparse.Namespace, split: str) -> dict[str, list[Example]]:
    """The answers of a split as examples: all tasks in turn, and questions about empty pictures and other styles."""
    vlm = model(options.model, options.corpus)
    draw = np.random.default_rng(SEEDS[split])
    others = _others(options.other / split, draw)
    examples = []
    rows = evenly_spaced(read_conversations(options.corpus / f"{split}.json"), options.count)
    for index, conversation in enumerate(rows):
        turn = int(draw.integers(len(conversation.turns)))
        (question, reference), note = conversation.turns[turn], conversation.notes["turns"][turn]
        kind, picture = next(others) if index % 3 == 2 else ("picture", conversation.images[0])
        out = describe(picture, question, model=vlm)
        if note["task"] == "describe":
            right = claims_held(out.text, note["claims"]) / max(len(note["claims"]), 1)
        else:
            right = float(right_answer(out.text, reference, note["expected"], note["task"]))
        examples.append(Example(out.evidence, right if kind == "picture" else 0.0, kind))
    return {ANSWER: examples}


def _others(folder: Path, draw: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Endlessly yield (kind, picture): empty pictures, generated at random, and pictures of each style in turn."""
    styles = {path.name: sorted(path.glob("*.png")) for path in sorted(folder.glob("*")) if path.is_dir()}
    if not all(styles.values()) or not styles:
        raise InputError(
            f"`other` must have a folder of PNG for each style in '{folder}', but has {sorted(styles) or 'none'}. Draw "
            "them with `python data/build/other_pictures.py --out data/other_pictures`."
        )
    number = 0
    while True:
        for empty in EMPTY:
            yield f"empty picture: {empty}", empty_picture(empty, draw)
        for style, paths in styles.items():
            yield f"other style: {style}", paths[number % len(paths)]
        number += 1


def folder(options: argparse.Namespace) -> Path:
    """The model's directory."""
    directory = model(options.model, options.corpus).directory
    assert directory is not None
    return directory


def write_familiar(options: argparse.Namespace) -> None:
    """Write the statistics of the training pictures beside the model's confidence.json."""
    familiar = model(options.model, options.corpus).familiar
    if familiar is not None:
        familiar.write(folder(options))
