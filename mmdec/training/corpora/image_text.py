"""Reads questions about pictures with their right answers, from a user's own list or from published benchmarks.

| file of questions | format |
|---|---|
| .jsonl | a user's list, or LLaVA-Bench-in-the-Wild: `image`, `text` or `question`; optionally `answer`, `category` |
| .jsonl with `turns` | MMSpec: `image` in images/ next to the list, `topic`; the first of the `turns` is asked |
| .json with `data` | TextVQA 0.5.1: pictures are {image_id}.jpg |
| .json with `questions` | VQAv2: pictures are COCO_{subset}_{image_id}.jpg; annotations lie next to the file |
| .json, a list | llava_v1_5_mix665k, or the built-in synthetic test pictures, in the same format |
| .tsv | `data/samples/images`: columns `file`, `task`, `question`, `answer`; pictures next to the list |
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmdec.checks.files import quote_path
from mmdec.checks.sampling import evenly_spaced
from mmdec.errors import InputError
from mmdec.io.suffixes import PICTURE_SUFFIXES
from mmdec.training.corpora.admission import STRICT, Admission
from mmdec.training.corpora.chats import Conversation, malformed_row_error, read_conversations
from mmdec.training.corpora.text_files import check_text, json_lines, read_json, read_table

MAX_IMAGES = 64  # the most pictures of one question in a .jsonl list; more are an error
COLUMNS = ["file", "task", "question", "answer"]
SHORT_ANSWER_PROMPT = "\nAnswer the question using a single word or phrase."  # LLaVA's prompt for VQAv2 and TextVQA


@dataclass(frozen=True)
class ImageQuestion:
    """One question about pictures.

    In `question`, the text `<image>` stands where a picture belongs; without this text, all pictures come before the
    question.
    """

    id: str
    question: str
    images: tuple[Path | bytes, ...]
    task: str  # name of the group of questions for which scores are averaged
    scoring: str = ""  # the rule by which an answer is scored: "exact" or "claims"; "": answers are not scored
    answers: tuple[str, ...] = ()  # all answers that count as right; in VQAv2 and TextVQA the answers of ten people
    # facts that a right answer states; each fact is a tuple of words that the answer must have in this order
    claims: tuple[tuple[str, ...], ...] = ()
    reference: str = ""  # a right answer as a whole sentence


def read_questions(
    listed: str | Path, images: str | Path | None = None, limit: int | None = None, admission: Admission = STRICT
) -> list[ImageQuestion]:
    """Read the questions of a file, whose format is recognised. Picture files are not opened.

    Args:
        images: Folder of the pictures. Default, next to the file: "train_images" for TextVQA, a folder such as
            "val2014" for VQAv2, "images" for llava_v1_5_mix665k; for .tsv and .jsonl the file's own folder, and for
            .jsonl also "images" in it.
        limit: Take this many questions of each task, evenly spaced; None: all.

    Raises:
        InputError: For a file that is missing, too large or in no known format. The message names the row.
    """
    path = Path(listed)
    folder = None if images is None else Path(images)
    if path.suffix == ".tsv":
        return by_task(_table(path, folder or path.parent, admission), limit)
    if path.suffix == ".jsonl":
        return by_task(_lines(path, folder, admission), limit)
    rows = read_json(path, "questions")
    if isinstance(rows, dict) and isinstance(rows.get("data"), list):
        questions = _textvqa(rows["data"], path, folder or path.parent / "train_images", admission)
    elif isinstance(rows, dict) and isinstance(rows.get("questions"), list):
        questions = _vqav2(rows, path, folder)
    elif isinstance(rows, list):
        questions = _conversations(read_conversations(path, folder, admission))
    else:
        raise InputError(
            f"`questions` must be .jsonl, .tsv, a JSON list, or TextVQA's or VQAv2's JSON, but '{path}' is "
            f"none. Write one JSON object a line with `image` and `question`."
        )
    return by_task(questions, limit)


def ask_about(pictures: str | Path, question: str) -> list[ImageQuestion]:
    """Ask the same question about one picture, or about each picture of a folder in the order of their names.

    The questions have no right answers.

    Args:
        pictures: A picture file or a folder.

    Raises:
        InputError: If `pictures` is neither, or a folder without pictures.
    """
    path = Path(pictures)
    if not question.strip():
        raise InputError("`question` must be a text, but is empty. Ask something.")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURE_SUFFIXES and file.is_file())
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise InputError(
            f"`images` must be a picture or a folder of pictures ({', '.join(PICTURE_SUFFIXES)}), but '{path}' is not "
            "one. Check the path."
        )
    return [ImageQuestion(file.name, question, (file,), "own pictures") for file in files]


def by_task(questions: Iterable[ImageQuestion], limit: int | None) -> list[ImageQuestion]:
    """Take `limit` questions of each task, evenly spaced; None: all.

    Returns:
        The questions, grouped by task, in the tasks' alphabetical order.
    """
    tasks: dict[str, list[ImageQuestion]] = defaultdict(list)
    for question in questions:
        tasks[question.task].append(question)
    return [question for task in sorted(tasks) for question in evenly_spaced(tasks[task], limit)]


def swap_pictures(questions: Sequence[ImageQuestion]) -> list[ImageQuestion]:
    """Give each question wrong pictures, to measure how many answers are right from the text alone.

    They are the pictures of another question of the same task, with the same number of pictures. A question keeps its
    pictures if there is no such question.
    """
    tasks: dict[str, list[ImageQuestion]] = defaultdict(list)
    for question in questions:
        tasks[question.task].append(question)
    others = {}
    for group in tasks.values():
        for index, question in enumerate(group):
            rest = (*group[index + 1 :], *group[:index])
            fitting = (other.images for other in rest if other.images != question.images)
            others[id(question)] = next(
                (pictures for pictures in fitting if len(pictures) == len(question.images)), question.images
            )
    return [replace(question, images=others[id(question)]) for question in questions]


def _check_once(names: dict[str, str], name: str, place: str) -> str:
    """Check that a question's id is new, and return it.

    Args:
        names: Where each id was found so far; the new id is added.
        place: Where the new id is.

    Raises:
        InputError: If it is repeated.
    """
    if names.setdefault(name, place) != place:
        raise InputError(
            f"`questions` must have an id for each question, but {place} has '{name:.80}' again, as {names[name]}. "
            "Give it another."
        )
    return check_text(name, "questions", place)


def _lines(path: Path, given: Path | None, admission: Admission) -> list[ImageQuestion]:
    """Read a .jsonl list.

    Args:
        given: The pictures' folder. None: the list's own folder or, for pictures that are not there, "images" beside
            the list.
    """
    questions, names_seen = [], dict[str, str]()
    resolve, apart = admission.path_resolver(given or path.parent), path.parent / "images"
    resolve_apart = admission.path_resolver(apart) if given is None and apart.is_dir() else None
    for index, (number, row) in enumerate(json_lines(path, "questions")):
        place = f"line {number} of '{quote_path(path)}'"
        if not isinstance(row, dict):
            raise malformed_row_error(place, "fields", row)
        # a field that is null counts as missing
        row = {name: value for name, value in row.items() if value is not None}
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        text = row.get("question", row.get("text", first))
        if not isinstance(text, str) or not text.strip():
            raise malformed_row_error(place, "a text as `question` or `text`, or a list of texts as `turns`", text)
        named = row.get("image", [])
        named = [named] if isinstance(named, str) else named
        if not isinstance(named, list) or len(named) > MAX_IMAGES or not all(isinstance(name, str) for name in named):
            raise malformed_row_error(place, f"at most {MAX_IMAGES} paths as `image`", named)
        answers = row.get("answers", row.get("answer", []))
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise malformed_row_error(place, "a text, or a list of texts, as `answer`", answers)
        for text_part in (text, *answers):
            check_text(text_part, "questions", place)
        pictures = tuple(resolve(name, place) for name in named)
        if resolve_apart is not None:
            # os.path.exists gives False for an impossible file name
            pictures = tuple(
                picture if os.path.exists(picture) else resolve_apart(name, place)
                for picture, name in zip(pictures, named, strict=True)
            )
        name = row.get("question_id", row.get("id"))
        name = str(index) if name is None else _check_once(names_seen, str(name), place)
        kinds = ("topic", "category") if turns else ("category", "task")  # MMSpec's task is its `topic`
        task = str(row.get(kinds[0], row.get(kinds[1], "all")))
        scoring = "exact" if 0 < len(answers) < 10 else ""
        questions.append(ImageQuestion(name, text.strip(), pictures, task, scoring, tuple(answers)))
    return questions


def _table(path: Path, folder: Path, admission: Admission) -> list[ImageQuestion]:
    """Read a .tsv list, whose answers are whole sentences and become `reference`.

    Exact scoring is impossible, because the list does not say which words must be right.
    """
    questions, resolve = [], admission.path_resolver(folder)
    rows = list(read_table(path, "questions"))
    columns = f"the columns {', '.join(COLUMNS)}"
    if not rows or rows[0][1] != COLUMNS:
        raise malformed_row_error(f"line 1 of '{quote_path(path)}'", columns, rows[0][1] if rows else "no row")
    for index, (number, row) in enumerate(rows[1:], 1):
        place = f"line {number} of '{quote_path(path)}'"
        if len(row) != len(COLUMNS) or not row[2].strip():
            raise malformed_row_error(place, f"{columns}, with a text as `question`", row)
        file, task, text, answer = row
        questions.append(ImageQuestion(f"{file}-{index}", text, (resolve(file, place),), task, reference=answer))
    return questions


def _textvqa(rows: Sequence[Any], path: Path, folder: Path, admission: Admission) -> list[ImageQuestion]:
    questions, resolve, ids = [], admission.path_resolver(folder), dict[str, str]()
    for number, row in enumerate(rows):
        place = f"row {number} of '{quote_path(path)}'"
        try:
            file = f"{row['image_id']}.jpg"
            answers = tuple(str(answer) for answer in row.get("answers", ()))
            text = check_text(str(row["question"]).strip() + SHORT_ANSWER_PROMPT, "questions", place)
            name = _check_once(ids, str(row["question_id"]), place)
        except (KeyError, TypeError, AttributeError) as error:
            raise malformed_row_error(place, "`image_id`, `question` and `question_id`, as TextVQA's", error) from None
        questions.append(ImageQuestion(name, text, (resolve(file, place),), "textvqa", answers=answers))
    return questions


def _vqav2(rows: Mapping[str, Any], path: Path, folder: Path | None) -> list[ImageQuestion]:
    """Read VQAv2. The task of a question is its type of answer: yes/no, number or other; "all" without annotations."""
    subset = str(rows.get("data_subtype", "val2014"))
    if not re.fullmatch(r"\w+", subset):
        raise InputError(
            f"`questions` must name its `data_subtype` in letters, but '{path}' has {subset[:80]!r}. Correct the file."
        )
    coco = subset.replace("test-dev", "test")
    notes = _annotations(path)
    questions, names = [], dict[str, str]()
    for number, row in enumerate(rows["questions"]):
        place = f"row {number} of '{quote_path(path)}'"
        try:
            name, picture = int(row["question_id"]), int(row["image_id"])
            text = check_text(str(row["question"]).strip() + SHORT_ANSWER_PROMPT, "questions", place)
            note = notes.get(name, {})
            answers = tuple(str(answer["answer"]) for answer in note.get("answers", ()))
            task = str(note.get("answer_type", "all"))
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise malformed_row_error(place, "`question_id`, `image_id` and `question`, as VQAv2's", error) from None
        _check_once(names, str(name), place)
        file = (folder or path.parent / coco) / f"COCO_{coco}_{picture:012d}.jpg"
        questions.append(ImageQuestion(str(name), text, (file,), task, answers=answers))
    return questions


def _annotations(path: Path) -> dict[int, Mapping[str, Any]]:
    """Read VQAv2's annotation file next to the questions.

    Returns:
        The annotations by question id; {} if there is no file.
    """
    name = re.sub(
        r"OpenEnded_|_questions(?=\.json$)", lambda match: "" if "Open" in match[0] else "_annotations", path.name
    )
    beside = path.with_name(name)
    if beside == path or not beside.is_file():
        return {}
    rows = read_json(beside, "questions")
    try:
        return {int(row["question_id"]): row for row in rows["annotations"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"`questions` must have VQAv2's annotations next to it, but '{beside}' holds none ({error!r}). Download it "
            "again."
        ) from None


def _conversations(conversations: Sequence[Conversation]) -> list[ImageQuestion]:
    """Turn conversations into single questions, at most two of each task from one conversation."""
    questions = []
    for conversation in conversations:
        notes = conversation.notes.get("turns")
        counts: dict[str, int] = defaultdict(int)
        for index, (question, answer) in enumerate(conversation.turns):
            note = notes[index] if isinstance(notes, list) and index < len(notes) else {}
            note = note if isinstance(note, dict) else {}
            claim_list = note["claims"] if isinstance(note.get("claims"), list) else []
            task = str(note.get("task", "all"))
            counts[task] += 1
            if counts[task] > 2:
                continue
            claims = tuple(tuple(map(str, claim)) for claim in claim_list if isinstance(claim, list))
            scoring = ""
            if claims:
                scoring = "claims"
            elif note:
                scoring = "exact"
            questions.append(
                ImageQuestion(
                    f"{conversation.id}-{index}",
                    question,
                    conversation.images,
                    task,
                    scoring,
                    (str(note["expected"]),) if note.get("expected") else (),
                    claims=claims,
                    reference=answer,
                )
            )
    return questions
