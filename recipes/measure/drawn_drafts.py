"""Measures what drafts gain that are drawn through the target's own top-k, top-p, min-p and penalty.

python recipes/measure/drawn_drafts.py --model MODEL --drafter FOLDER [--data prompts.txt]

Each prompt is continued under each sampling with drafts drawn as the target draws (`mirrored`), and at its temperature
alone. Both are lossless. Rounds are counted, not timed, so the figures do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import mmdec
from mmdec.bench.prompts import BEGINNINGS, INSTRUCTIONS, encode_prompts, read_chat_prompts
from mmdec.core.sampling import DraftWarp
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.errors import exit_on_error
from mmdec.pretrained.language_model import load_language_model
from mmdec.targets.text import TextTarget
from mmdec.types import Draft, Drafter, Plan

TEMPERATURE = 0.8
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top-k 20": {"top_k": 20},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.1": {"min_p": 0.1},
    "penalty 1.1": {"repetition_penalty": 1.1},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "all four": {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
}


class AtTemperature(ForwardingDrafter):
    """Draws drafts at the target's temperature, whatever else the target's distribution is cut by."""

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        warp = DraftWarp(warpers=[lambda ids, scores: scores / TEMPERATURE])
        return super().propose(state, roots, replace(plan, warp=partial(warp, cast(Any, None))))


def rounded(model: Any, bits: int) -> Any:
    """Return a copy of a model whose layers' matrices have rows of 2 ** bits - 1 levels."""
    small, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for name, weight in small.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            step = weight.data.abs().amax(1, keepdim=True) / most
            weight.data = (weight.data / step).round() * step
    return small


def make_drafter(folder: str, model: Any) -> Drafter:
    """Return a trained drafter, a smaller model, or with "N-bit" the model's own copy, rounded to N bits."""
    bits = folder.removesuffix("-bit")
    if bits != folder:
        return SmallModelDrafter(TextTarget(rounded(model, int(bits))))
    if (Path(folder) / "tokenizer.json").exists():
        return SmallModelDrafter(TextTarget(load_language_model(folder, model.device).model))
    return mmdec.load_drafter(folder, model)


def count(model: Any, prompts: list[Tensor], drafter: Drafter, seed: int, options: dict[str, Any]) -> list[int]:
    """Return new tokens, rounds, and drafted and accepted tokens, without the passes over the prompts."""
    totals = [0, 0, 0, 0]
    for at, prompt in enumerate(prompts):
        made = mmdec.generate(model, prompt, drafter, seed=seed + at, rule="residual", **options)
        rounds = made.rounds[1:]
        parts = (round_.tokens[0] for round_ in rounds), (round_.drafted for round_ in rounds)
        found = (
            sum(map(len, parts[0])),
            len(rounds),
            sum(map(sum, parts[1])),
            sum(sum(round_.accepted) for round_ in rounds),
        )
        totals = [total + new for total, new in zip(totals, found, strict=True)]
    return totals


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id of a language model")
    parser.add_argument("--drafter", required=True, help='a drafter, a smaller model, or "4-bit": a rounded copy')
    parser.add_argument("--data", type=Path, help="prompts, as of `mmdec bench drafters`; default: the built-in ones")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens of an answer")
    parser.add_argument("--chain", type=int, default=4, help="drafted tokens of a round")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samplings", nargs="*", default=list(SAMPLINGS), choices=list(SAMPLINGS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    language = load_language_model(options.model, "cpu")
    given = INSTRUCTIONS if language.tokenizer.chat_template else BEGINNINGS
    chats = read_chat_prompts(options.data) if options.data else given
    step = max(1, len(chats) // options.prompts)
    chosen = encode_prompts(language, chats[::step][: options.prompts], options.tokens)
    prompts = [prompt.ids for prompt in chosen]
    mirrored = make_drafter(options.drafter, language.model)
    ways = {"temperature": AtTemperature(mirrored), "mirrored": mirrored}
    for name in options.samplings:
        settings = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, **SAMPLINGS[name]}
        settings |= {"max_new_tokens": options.tokens, "num_speculative_tokens": options.chain}
        rates: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for seed in range(options.seeds):
            for way, drafter in ways.items():
                tokens, rounds, drafted, taken = count(language.model, prompts, drafter, 1000 * seed, settings)
                rates[way].append((tokens / rounds, taken / drafted))
        row: dict[str, Any] = {"sampling": name}
        for way, each in rates.items():
            for what, values in zip(("tokens per round", "accepted"), zip(*each, strict=True), strict=True):
                mean = sum(values) / len(values)
                row[f"{way}, {what}"] = [round(value, 3) for value in (mean, min(values), max(values))]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
