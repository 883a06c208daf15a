"""The prompts on which the doctor examines a drafter, and the target's inputs for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmdec.evaluation.bench.text_prompts import INSTRUCTIONS
from mmdec.hub.find import find
from mmdec.hub.language_model import FILES, LoadedLanguageModel, is_language_model, load_language_model
from mmdec.hub.vlm import LoadedVlm, load_vlm
from mmdec.pipelines.description.describe import read_question
from mmdec.pipelines.description.prompts import render, tensors, user_message
from mmdec.training.corpora.chats import SYSTEM, read_chats
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.types import InputError

Model = LoadedLanguageModel | LoadedVlm

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
    """The prompts that are used without a file. chat: instructions, for a model with a chat template."""
    return [Asked(text) for text in ([one.messages[0]["content"] for one in INSTRUCTIONS] if chat else BEGINNINGS)]


def read_prompts(path: Path, limit: int | None) -> list[Asked]:
    """The prompts of a file, see `read_chats`; `limit` of them, evenly spaced; None: all.

    A chat gives its system message and first question: later turns contain answers that are not the target's.
    Raises: InputError for a file in none of the layouts, naming the line or row.
    """
    return [
        Asked(chat.turns[0][0], str(chat.notes.get(SYSTEM, "")), chat.images)
        for chat in evenly_spaced(read_chats(path), limit)
    ]


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
