"""Counts the rounds that Whisper needs with `mmdec.hypothesis`, for several kinds of text.

python recipes/measure/hypothesis.py --model MODEL --other MODEL --manifest manifest.jsonl --nodes 31

Each line of the manifest names a recording (`file`, beside the manifest or in `--folder`) and its text (`text`). Each
transcript must equal the one decoded without drafts. Tokens per round do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mmdec
from mmdec.tasks.threads import keep_threads
from mmdec.whisper.checkpoint import load_whisper


def without_marks(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s']", " ", text).lower().split())


def with_changes(text: str, share: float = 0.1) -> str:
    """Replace, drop or double a share of a text's words."""
    rng, changed = Random(0), list[str]()
    for word in text.split():
        kind = rng.randrange(3) if rng.random() < share else 3
        changed += [["river"], [], [word, word], [word]][kind]
    return " ".join(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--other", required=True, help="another Whisper, whose text is drafted")
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--files", default="", help="regular expression: recordings to decode")
    parser.add_argument("--nodes", type=int, default=31)
    options = parser.parse_args()
    keep_threads(1)
    model, other = load_whisper(options.model, "cpu"), load_whisper(options.other, "cpu")
    folder = options.folder or options.manifest.parent
    lines = [json.loads(line) for line in options.manifest.read_text(encoding="utf-8").splitlines()]
    entries = [one for one in lines if one.get("text") and re.search(options.files, one["file"])]
    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "true text without case and marks": lambda entry: without_marks(entry["text"]),
        "text of the other model": lambda entry: entry["other"],
        "own text": lambda entry: entry["own"],
        "own text, 10 % of words changed": lambda entry: with_changes(entry["own"]),
    }
    totals = {kind: [0, 0] for kind in kinds}
    for entry in entries:
        path = folder / entry["file"]
        plain = mmdec.transcribe(path, model=model, drafter=None)
        entry["own"] = plain.text
        entry["other"] = mmdec.transcribe(path, model=other).text
        for kind, text_of in kinds.items():
            drafter = mmdec.hypothesis([text_of(entry)])
            found = mmdec.transcribe(path, model=model, drafter=drafter, num_speculative_tokens=options.nodes)
            if found.tokens != plain.tokens:
                raise SystemExit(f"{entry['file']}: the {kind} changes the transcript")
            rounds = found.rounds - found.windows
            totals[kind][0] += round(found.tokens_per_round * rounds)
            totals[kind][1] += rounds
            print(
                f"{entry['file']}: {kind}: {found.tokens_per_round:.2f} tokens per round, {rounds} rounds", flush=True
            )
    for kind, (tokens, rounds) in totals.items():
        print(f"all: {kind}: {tokens / rounds:.2f} tokens per round, {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
