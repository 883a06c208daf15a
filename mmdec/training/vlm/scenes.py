"""Drawn scenes as their list has them: conversations with notes, and the questions that are answered at validations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.image_text import Conversation, read_conversations
from mmdec.types import InputError

LEARNED = 40_000  # conversations that the tokenizer is learned from


@dataclass
class Question:
    """One to be answered. claims: of a description; expected: of a short answer."""

    image: Path
    question: str
    reference: str
    task: str
    expected: str
    claims: list[list[str]]


def read_scenes(listed: Path, admission: Admission) -> list[Conversation]:
    """The conversations of a list, each with one picture at least and with notes as the drawn scenes have them.

    Raises InputError, naming the row.
    """
    conversations = read_conversations(listed, admission=admission)
    for row in conversations:
        if not row.images:
            raise InputError(f"`corpus` must have a picture in each row, but {row.place} has none. Leave the row out.")
        try:
            for text, patches in row.notes.get("prints", ()):
                assert isinstance(text, str)
                np.asarray(patches, np.uint8)
        except (TypeError, ValueError, OverflowError, AssertionError):
            raise InputError(
                f"`corpus` must have texts with their patches as `prints`, but {row.place} has something else. Build "
                "it again."
            ) from None
    return conversations


def texts(conversations: Sequence[Conversation]) -> list[str]:
    """What is said, as much of it as the tokenizer is learned from."""
    turns = [turn for conversation in conversations[:LEARNED] for turn in conversation.turns]
    return [part for question, answer in turns for part in (question, f" {answer}")][: 40 * LEARNED]


def choose(conversations: Sequence[Conversation], count: int) -> list[Question]:
    """`count` questions of each task, at most two of a task about one picture."""
    chosen: dict[str, list[Question]] = defaultdict(list)
    for conversation in conversations:
        used: dict[str, int] = defaultdict(int)
        for (question, answer), note in zip(conversation.turns, notes_of(conversation), strict=True):
            task = note["task"]
            if used[task] < 2 and len(chosen[task]) < count:
                used[task] += 1
                image = conversation.images[0]
                chosen[task].append(Question(image, question, answer, task, note["expected"], note["claims"]))
    return [question for task in sorted(chosen) for question in chosen[task]]


def notes_of(conversation: Conversation) -> list[dict[str, Any]]:
    """What each turn asks for, as the drawn scenes say it. Raises InputError, naming the row."""
    notes = conversation.notes.get("turns")
    kinds = {"task": str, "expected": str, "claims": list}
    if (
        not isinstance(notes, list)
        or len(notes) != len(conversation.turns)
        or not all(isinstance(note, dict) for note in notes)
        or not all(isinstance(note.get(name), kind) for note in notes for name, kind in kinds.items())
    ):
        raise InputError(
            f"`corpus` must have task, expected and claims of each question as `turns`, but {conversation.place} has "
            "not. Build it again."
        )
    return notes
