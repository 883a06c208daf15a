"""Measures a small model that reads a long prompt whole or only a part of it (`mmdec.small_model(prompt=...)`).

python recipes/measure/short_prompt.py --model MODEL [--small FOLDER]

Each prompt is the beginning of a page of docs/ and a question about it. The ways take turns at each prompt, and each
text must equal plain decoding's. Passes are counted; seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmdec
from mmdec.errors import exit_on_error
from mmdec.pretrained.language_model import LoadedLanguageModel, load_language_model

sys.path.insert(0, str(Path(__file__).parent))
from drawn_drafts import rounded  # beside this script

PAGES = Path(__file__).parents[2] / "docs"
QUESTIONS = (
    ("guide/transcribe.md", "Summarise this page in three sentences."),
    ("which_drafter.md", "Which drafter should I take first, and why?"),
    ("exactness.md", "What does exact mean here? Quote the page."),
    ("add_a_drafter.md", "List the steps that the page names."),
)


def prompt_of(language: LoadedLanguageModel, page: str, question: str, length: int) -> Tensor:
    """Return the ids (1, P) of a chat with the first `length` tokens of a page and a question."""
    tokenizer = language.tokenizer
    ids = tokenizer((PAGES / page).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    text = f"{tokenizer.decode(ids[:length])}\n\n{question}"
    return language.chat_inputs([{"role": "user", "content": text}])["input_ids"]


class Passes:
    """Counts the passes of a model, and the tokens of the longest."""

    def __init__(self, model: Any) -> None:
        self.count = self.longest = 0
        model.register_forward_hook(self._add, with_kwargs=True)

    def _add(self, model: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        self.count, self.longest = self.count + 1, max(self.longest, named["input_ids"].shape[1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id of a chat model")
    parser.add_argument("--small", help="a smaller model with its tokenizer; default: its copy, rounded to 4 bits")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a page that a prompt holds")
    parser.add_argument("--read", type=int, nargs="*", default=[256], help="values of `prompt` beside None")
    parser.add_argument("--tokens", type=int, default=32, help="maximum tokens of an answer")
    parser.add_argument("--chain", type=int, default=4, help="drafted tokens of a round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    language = load_language_model(options.model, "cpu")
    small = load_language_model(options.small, "cpu").model if options.small else rounded(language.model, 4)
    passes = Passes(small)
    ways: dict[str, Any] = {"plain": None}
    ways |= {f"prompt={read}": mmdec.small_model(small, prompt=read) for read in (None, *options.read)}
    settings: dict[str, Any] = {"max_new_tokens": options.tokens, "do_sample": False}
    settings["num_speculative_tokens"] = options.chain
    mmdec.generate(language.model, torch.ones(1, 40, dtype=torch.long), ways["prompt=None"], **settings)
    for page, question in QUESTIONS:
        prompt = prompt_of(language, page, question, options.length)
        expected: Tensor | None = None
        for way, drafter in ways.items():
            passes.count, passes.longest, began = 0, 0, time.process_time()
            made = mmdec.generate(language.model, prompt, drafter, **settings)
            seconds = time.process_time() - began
            expected = made.sequences if expected is None else expected
            if not torch.equal(made.sequences, expected):
                raise SystemExit(f"error: {way} changed the text of {page}")
            rounds, new = len(made.rounds) - 1, made.sequences.shape[1] - prompt.shape[1] - 1
            row: dict[str, Any] = {"page": page, "prompt": prompt.shape[1], "way": way, "passes": rounds + 1}
            row |= {"tokens per round": round(new / rounds, 2), "CPU s": round(seconds, 2)}
            row |= {"small passes": passes.count, "small model reads": passes.longest}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
