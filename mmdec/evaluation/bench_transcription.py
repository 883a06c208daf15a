"""Medusa heads against transformers' own ways to decode with the same Whisper: exactness-gated, interleaved.

Before any timing every method decodes every recording once. mmdec's tokens must be those of greedy `generate`, or there
is no report; where another method's differ, its recording is left out of that comparison and counted. Then all methods
take turns, A B C D A B C D, recording by recording. mmdec is timed through `mmdec.transcribe`, transformers through
`model.generate` on the same features. Decoder seconds are those of the call without features and the encoder's pass;
wall clock is samples in memory to text (see `evaluation/harness.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_threads
from mmdec.corpora.librispeech import read_splits
from mmdec.evaluation.assistants import assistants
from mmdec.evaluation.harness import Harness, Measurements, Method, parse_plan
from mmdec.evaluation.pairing import compare
from mmdec.hub.whisper import DEFAULT_MODEL, LoadedWhisper, load_whisper
from mmdec.provenance import hardware
from mmdec.runtime import dtype_of
from mmdec.types import InputError

SPLITS = ("test", "paragraphs")
BINS = ((1, 5), (6, 10), (11, 20), (21, 39), (40, 10_000))  # words
SHORT, LONG = BINS[0], BINS[-1]
COPIED = 10  # tokens that transformers' prompt lookup copies at most: its documentation's value
PLANS = ("learned", "2", "4", "6", "8", "10", "8x4", "12x6", "16x6", "16x8", "24x8", "32x8", "48x8")


@dataclass(frozen=True)
class Recording:
    """What is decoded, and how long it is."""

    name: str
    words: int
    sound: Tensor  # (T,)

    @property
    def bin(self) -> tuple[int, int]:
        return next(one for one in BINS if one[0] <= max(self.words, 1) <= one[1])


def bench_asr(
    recordings: Sequence[Path] = (),
    corpus: str | os.PathLike[str] = "data/english",
    splits: Sequence[str] = SPLITS,
    model: str | os.PathLike[str] | LoadedWhisper = DEFAULT_MODEL,
    *,
    heads: str | os.PathLike[str] | None = None,
    assistant: str | os.PathLike[str] | None = None,
    plan: str = "learned",
    sweep: Sequence[str] = (),
    per_bin: int = 6,
    repeats: int = 5,
    batch: int = 8,
    language: str | None = "en",
    max_new_tokens: int | None = None,
    device: str | None = "cpu",
    threads: int = 2,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """All rows of the table.

    recordings: sound files; none takes `per_bin` of each length from the corpus's splits. assistant: a smaller
    Whisper's directory; None makes one of the model's own layers. plan: "learned", "8" (a chain of 8 nodes) or "16x6"
    (a tree). sweep: more plans, timed on the long recordings alone and in batches. Raises MmdecError where mmdec's
    tokens differ from greedy decoding's.
    """
    if min(per_bin, repeats, batch) < 1:
        raise InputError(f"`repeats`, `per_bin` and `batch` must be at least 1, but are {repeats}, {per_bin}, {batch}.")
    nodes, plans = parse_plan(plan), {one: parse_plan(one) for one in sweep}
    check_threads(threads)
    torch.set_num_threads(threads)
    say = log if log is not None else _silent
    whisper = model if isinstance(model, LoadedWhisper) else load_whisper(model, device)
    harness = Harness(whisper, language, max_new_tokens)
    drafter = whisper.heads(heads)
    chosen = _given(harness, recordings) if recordings else _from_corpus(harness, corpus, splits, per_bin)
    longest = [one for one in chosen if one.bin == LONG] or [max(chosen, key=lambda one: one.words)]

    plain, ours = Method.greedy(), Method.drafted("medusa", drafter, nodes)
    lookup = Method("prompt lookup", "generate", {"prompt_lookup_num_tokens": COPIED})
    helpers = assistants(whisper.model, assistant)
    helper = _fastest(harness, helpers, [longest[0].sound]) if len(helpers) > 1 else helpers[0]
    methods = [ours, plain, lookup, helper]
    say(f"{len(chosen)} recordings, {len(longest)} of them long; methods: {', '.join(one.name for one in methods)}")
    singles = [[one.sound] for one in chosen]
    equal = harness.gate(methods, singles, say)
    measured = harness.interleave(methods, singles, repeats, say)
    of_length = {bin: [number for number, one in enumerate(chosen) if one.bin == bin] for bin in BINS}
    long = [number for number, one in enumerate(chosen) if one in longest]
    against = {
        method.name: {
            "identical": sum(equal[method.name][number] for number in long),
            "of": len(long),
            **compare(measured, ours, method, [number for number in long if equal[method.name][number]]),
        }
        for method in (lookup, helper)
    }
    report: dict[str, Any] = {
        "what": "a = mmdec with Medusa heads, b = the other; ratios are b / a",
        "model": whisper.directory.name if whisper.directory else "given",
        "drafter": drafter.name,
        "plan": plan,
        "recordings": len(chosen),
        "long": {"words": f"{LONG[0]} and more", **compare(measured, ours, plain, long)},
        "curve": [
            {"words": f"{low}-{high}" if (low, high) != LONG else f"{low}+", **compare(measured, ours, plain, numbers)}
            for (low, high), numbers in of_length.items()
            if numbers
        ],
        "clips": _clips(measured, ours, plain, of_length[SHORT], chosen),
        "against": against,
        "batch": _batch(harness, [ours, plain], longest, batch, repeats, say),
        "seconds_of_audio": sum(len(one.sound) for one in chosen) / SAMPLE_RATE,
    }
    if plans:
        report["sweep"] = _sweep(harness, drafter, plans, longest, batch, repeats, say)
    network = whisper.model
    return {
        **report,
        "hardware": hardware(
            device=network.device, dtype=dtype_of(network), batch=(1, batch), threads=torch.get_num_threads()
        ),
    }


def _from_corpus(
    harness: Harness, corpus: str | os.PathLike[str], splits: Sequence[str], per_bin: int
) -> list[Recording]:
    """`per_bin` of each length, evenly spaced over the splits."""
    rows = read_splits(os.fspath(corpus), list(splits))
    chosen = []
    for low, high in BINS:
        fitting = [row for row in rows if low <= len(row.text.split()) <= high]
        count = min(per_bin, len(fitting))
        for row in (fitting[number * len(fitting) // count] for number in range(count)):
            chosen.append(Recording(row.path.name, len(row.text.split()), harness.read(row.path)))
    return chosen


def _given(harness: Harness, paths: Sequence[Path]) -> list[Recording]:
    """Their words are those of greedy decoding."""
    given = []
    for path in paths:
        sound = harness.read(path)
        text = harness.measure([sound], Method.greedy()).texts[0]
        given.append(Recording(path.name, len(text.split()), sound))
    return given


def _clips(
    measured: Measurements, ours: Method, plain: Method, numbers: Sequence[int], chosen: Sequence[Recording]
) -> dict[str, Any]:
    """Each short clip by itself: none may be slower."""
    rows = []
    for number in numbers:
        wall = compare(measured, ours, plain, [number])["wall"]
        rows.append({"name": chosen[number].name, "words": chosen[number].words, "wall": wall["median"]})
    rows.sort(key=lambda row: row["wall"])
    return {"words": f"{SHORT[1]} and fewer", "slower": sum(row["wall"] < 1 for row in rows), "each": rows}


def _groups(longest: Sequence[Recording], batch: int) -> list[list[Tensor]]:
    """All long recordings in batches; the last is filled up from the beginning."""
    count = max(1, len(longest) // batch)
    return [[longest[(at * batch + row) % len(longest)].sound for row in range(batch)] for at in range(count)]


def _batch(
    harness: Harness,
    methods: Sequence[Method],
    longest: Sequence[Recording],
    batch: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    groups = _groups(longest, batch)
    harness.gate(methods, groups, say)
    measured = harness.interleave(methods, groups, repeats, say)
    return {"size": batch, **compare(measured, methods[0], methods[1], range(len(groups)))}


def _sweep(
    harness: Harness,
    drafter: Any,
    plans: dict[str, Any],
    longest: Sequence[Recording],
    batch: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Every plan against greedy decoding: long recordings one by one, and in batches."""
    plain, rows = Method.greedy(), []
    tried = [Method.drafted(name, drafter, nodes) for name, nodes in plans.items()]
    for size, groups in ((1, [[one.sound] for one in longest]), (batch, _groups(longest, batch))):
        for method in tried:
            harness.gate([method, plain], groups, say)
        measured = harness.interleave([plain, *tried], groups, repeats, say)
        for method in tried:
            row = compare(measured, method, plain, range(len(groups)))
            rows.append(
                {
                    "plan": method.name,
                    "batch": size,
                    "decoder": row["decoder"]["ratio"],
                    "wall": row["wall"]["ratio"],
                    "tokens_per_round": row["a_tokens_per_round"],
                }
            )
    return rows


def _fastest(harness: Harness, helpers: Sequence[Method], recordings: Sequence[Tensor]) -> Method:
    """The assistant that decodes these fastest, the second time."""
    seconds = []
    for method in helpers:
        harness.measure(recordings, method)
        seconds.append(harness.measure(recordings, method).decoder)
    return helpers[seconds.index(min(seconds))]


def _silent(line: str) -> None:
    """No progress lines."""
