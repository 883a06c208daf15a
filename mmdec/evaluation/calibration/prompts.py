"""The prompts on which the doctor examines a drafter, and the target's inputs for them.

| file | layout |
|---|---|
| .txt | a prompt on each line |
| .jsonl | an object on each line: `messages` or `conversations`, or a text as `prompt`, `question` or `text` |
| .json | a list of such objects, as LLaVA's |

Of a chat the system's message and the first question are taken: later turns hold answers that are not the target's.
`image` names pictures, in the folder images/ beside the list, else beside the list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmdec.hub.find import find
from mmdec.hub.language_model import FILES, LoadedLanguageModel, is_language_model, load_language_model
from mmdec.hub.vlm import LoadedVlm, load_vlm
from mmdec.pipelines.description.describe import read_question
from mmdec.pipelines.description.prompts import render, tensors, user_message
from mmdec.training.corpora.admission import STRICT
from mmdec.training.corpora.chats import IMAGE, SPEAKERS
from mmdec.training.corpora.text_files import check_text, evenly_spaced, json_lines, read_json, shown, text_lines
from mmdec.types import InputError

Model = LoadedLanguageModel | LoadedVlm

MAX_BYTES = 2_000_000_000  # of a list of prompts
MAX_IMAGES = 64  # of one prompt
TEXTS = ("prompt", "question", "text")
QUESTIONS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a dog that finds a key.",
    "How do I cook rice so that it does not stick?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List five things to check before a long drive, with a reason for each.",
    "Summarise how a bill becomes a law in a parliament.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show your steps.",
    "Write a polite e-mail that asks a landlord to repair the heating.",
    "What are the differences between a virus and a bacterium?",
    "Translate into French: The library opens at ten, but the reading room is closed today.",
    "Give me a plan for a weekend in Rome with two children.",
    "What does this command do: find . -name '*.log' -mtime +7 -delete",
    "Compare renting and buying a home. Give arguments for both.",
    "Describe how photosynthesis works, from light to sugar.",
    "Write a JSON object for a book with title, authors, year and three keywords.",
    "My neighbour plays loud music at night. What can I do about it?",
)
BEGINNINGS = (  # for models without a chat template, which continue a text
    "Once upon a time, there was a little girl who",
    "The ship left the harbour at dawn, and the captain",
    "In the year 1900, the city of Paris",
    "To make bread, mix the flour with",
    "One day, Tom and his dog went to the park. They",
    "The most important difference between the two methods is",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "The cat sat by the window and looked at",
    "Water boils at a lower temperature on a mountain because",
    "Lily had a red ball. She liked to",
    "Chapter 1\n\nIt was a cold evening when",
    "The results of the experiment show that",
    "Mom said it was time to go to bed, but",
    "The first thing you should know about the moon is that",
    "There was a big tree in the garden. Under the tree",
)


@dataclass(frozen=True)
class Asked:
    """One prompt. system: the system's message, "" without one. images: files of its pictures."""

    text: str
    system: str = ""
    images: tuple[Path, ...] = ()


def load_target(
    model: str | os.PathLike[str], device: str | torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Model:
    """Load a language model, or one that reads images, with what makes its inputs; arguments as for `load_vlm`."""
    if is_language_model(find(model, None, FILES)):
        return load_language_model(model, device, dtype)
    return load_vlm(model, device, dtype)


def built_in(chat: bool) -> list[Asked]:
    """The prompts that are used without a file. chat: questions, for a model with a chat template."""
    return [Asked(text) for text in (QUESTIONS if chat else BEGINNINGS)]


def read_prompts(path: Path, limit: int | None) -> list[Asked]:
    """The prompts of a file, see above; `limit` of them, evenly spaced; None: all.

    Raises: InputError for a file in none of the layouts, naming the line or row.
    """
    if path.suffix == ".txt":
        lines = [(check_text(line.strip(), "data", f"line {n}"), n) for n, line in text_lines(path, "data")]
        found = [Asked(line) for line, _ in lines]
    elif path.suffix == ".jsonl":
        rows = json_lines(path, "data")
        found = [_row(row, f"line {number} of {shown(path)}", path.parent) for number, row in rows]
    elif path.suffix == ".json":
        listed = read_json(path, "data", "a JSON list", MAX_BYTES)
        if not isinstance(listed, list):
            raise InputError(f"`data` must be a JSON list, but {shown(path)} holds a {type(listed).__name__}.")
        found = [_row(row, f"row {number} of {shown(path)}", path.parent) for number, row in enumerate(listed)]
    else:
        raise InputError(f"`data` must end in .txt, .jsonl or .json, but is {shown(path)}. Name it by its layout.")
    if not found:
        raise InputError(f"`data` must hold prompts, but {shown(path)} holds none. Write one on each line.")
    return evenly_spaced(found, limit)


def _row(row: object, place: str, folder: Path) -> Asked:
    def refuse(rule: str) -> InputError:
        return InputError(f"`data` must have {rule}, but {place} has {str(row)[:80]!r}. Mend it.")

    if not isinstance(row, dict):
        raise refuse("an object in each row")
    turns = row.get("messages", row.get("conversations"))
    system, text = "", next((row[name] for name in TEXTS if isinstance(row.get(name), str)), "")
    if turns is not None:
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise refuse("a list of turns as `messages` or `conversations`")
        for turn in turns:
            speaker, said = str(turn.get("role", turn.get("from"))), _said(turn.get("content", turn.get("value")))
            if said is None:
                raise refuse("texts as the turns' `content` or `value`; pictures stand in `image`")
            if speaker == "system":
                system = said
            elif SPEAKERS.get(speaker) == 0:
                text = said
                break
    text = text.replace(IMAGE, "").strip()
    if not text:
        raise refuse(f"`messages`, `conversations`, or a text as {', '.join(f'`{name}`' for name in TEXTS)}")
    named = row.get("image") or []
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or len(named) > MAX_IMAGES or not all(isinstance(name, str) for name in named):
        raise refuse(f"at most {MAX_IMAGES} paths as `image`")
    apart = folder / "images"
    names = STRICT.names(apart if apart.is_dir() else folder)
    for said in (system, text):
        check_text(said, "data", place)
    return Asked(text, system, tuple(names(name, place) for name in named))


def _said(content: object) -> str | None:
    """The text of a turn, whole or in parts; None for anything else."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    return None if None in texts else "\n".join(map(str, texts))


def has_template(model: Model) -> bool:
    """Whether the model has a chat template."""
    return isinstance(model, LoadedVlm) or bool(getattr(model.tokenizer, "chat_template", None))


def inputs_of(model: Model, asked: Asked, template: bool) -> dict[str, Any]:
    """The model's inputs for a prompt, a batch of one. template: whether the chat template is applied.

    Raises: InputError for pictures and a model that reads none.
    """
    if isinstance(model, LoadedVlm):
        return _seen(model, asked, template)
    if asked.images:
        raise InputError(
            f"`model` must read images for these prompts, but {type(model.model).__name__} does not. Leave `image` out."
        )
    tokenizer = model.tokenizer
    if template:
        messages = [{"role": "system", "content": asked.system}] * bool(asked.system)
        messages.append({"role": "user", "content": asked.text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer("\n\n".join(filter(None, (asked.system, asked.text))), return_tensors="pt")
    taken: Mapping[str, Any] = inputs
    return {name: taken[name].to(model.model.device) for name in ("input_ids", "attention_mask")}


def _seen(vlm: LoadedVlm, asked: Asked, template: bool) -> dict[str, Any]:
    question = read_question(asked.images, asked.text)
    text = "\n".join([*[vlm.image_token] * len(asked.images), *filter(None, (asked.system, asked.text))])
    if template:
        system = {"role": "system", "content": [{"type": "text", "text": asked.system}]}
        text = render(vlm, [*[system] * bool(asked.system), user_message(vlm, question)])
    return tensors(vlm, [text], [question])
