"""Counts the rounds that Whisper needs with `mmdec.hypothesis`, for several kinds of text.

python recipes/measure/hypotheses.py --model MODEL --other MODEL --manifest manifest.jsonl [--nodes 31]

Each line of the manifest names a recording (`file`, beside the manifest or in `--folder`) and its text (`text`). Each
transcript must equal the one decoded without drafts. With `--nodes`, tokens per round do not depend on what else the
machine does; seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mmdec
from mmdec.tasks.threads import keep_threads
from mmdec.whisper.checkpoint import load_whisper

SHARES = (0.05, 0.1, 0.2)  # of the own text's words that are changed


def without_marks(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s']", " ", text).lower().split())


def with_changes(text: str, share: float) -> str:
    """Replace, drop or double a share of a text's words."""
    rng, changed = Random(0), list[str]()
    for word in text.split():
        kind = rng.randrange(3) if rng.random() < share else 3
        changed += [["river"], [], [word, word], [word]][kind]
    return " ".join(changed)


def texts_of(entry: Mapping[str, Any], own: str, other: str) -> dict[str, str]:
    """Return name -> text that is drafted.

    Args:
        entry: The recording's line of the manifest.
        own: What the model writes without drafts.
        other: What the other model writes.
    """
    texts = {"true text without case and marks": without_marks(entry["text"]), "text of the other model": other}
    changed = {f"own text, {100 * share:.0f} % of words changed": with_changes(own, share) for share in SHARES}
    return {**texts, "own text": own, **changed}


@dataclass
class Total:
    """What decoding with one kind of text took."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def decode(self, path: Path, drafter: Any, options: Mapping[str, Any]) -> mmdec.Transcript:
        began = time.process_time()
        found = mmdec.transcribe(path, drafter=drafter, **options)
        self.seconds += time.process_time() - began
        rounds = found.rounds - found.windows  # without the passes over the prompts
        self.tokens += round(found.tokens_per_round * rounds)
        self.rounds += rounds
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--other", required=True, help="another Whisper, whose text is drafted")
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--files", default="", help="regular expression: recordings to decode")
    parser.add_argument("--nodes", type=int, help="of the trees that are drafted; default: the learned budget")
    options = parser.parse_args()
    keep_threads(1)
    model, other = load_whisper(options.model, "cpu"), load_whisper(options.other, "cpu")
    decoding = {"model": model, "num_speculative_tokens": options.nodes}
    folder = options.folder or options.manifest.parent
    lines = [json.loads(line) for line in options.manifest.read_text(encoding="utf-8").splitlines()]
    entries = [entry for entry in lines if entry.get("text") and re.search(options.files, entry["file"])]
    totals = defaultdict[str, Total](Total)
    for number, entry in enumerate(entries):
        path = folder / entry["file"]
        if number == 0:
            Total().decode(path, None, decoding)  # the first call is slower
        plain = totals["no text"].decode(path, None, decoding)
        for kind, text in texts_of(entry, plain.text, mmdec.transcribe(path, model=other).text).items():
            found = totals[kind].decode(path, mmdec.hypothesis([text]), decoding)
            if found.tokens != plain.tokens:
                raise SystemExit(f"{entry['file']}: the {kind} changes the transcript")
        print(f"{entry['file']}: {len(plain.tokens)} tokens", flush=True)
    for kind, total in totals.items():
        speed = f"{total.tokens / total.rounds:.2f} tokens per round, {total.rounds} rounds"
        print(f"{kind}: {speed}, {total.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
