"""Medusa heads against transformers' own ways to decode with the same Whisper: exactness-gated, interleaved.

Before any timing every way decodes every recording once. mmdec's tokens must be those of greedy `generate`, or there is
no report; where another way's differ, its recording is left out of that comparison and counted. Then all ways take
turns, A B C D A B C D, recording by recording. Decoder seconds are `generate` without the encoder's pass, the same for
all; wall clock is samples in memory to token ids, log-mels included (see `contest.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.checks.arguments import check_threads
from mmdec.corpora.librispeech import read_splits
from mmdec.evaluation.assistants import assistants
from mmdec.evaluation.comparison import Runs, compare
from mmdec.evaluation.harness import Contest, Way, drafted, greedy, parse_plan, same
from mmdec.hub.whisper import DEFAULT_MODEL, Whisper, load_whisper
from mmdec.provenance import hardware
from mmdec.types import InputError, MmdecError

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
    model: str | os.PathLike[str] | Whisper = DEFAULT_MODEL,
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
    whisper = model if isinstance(model, Whisper) else load_whisper(model, device)
    contest = Contest(whisper, language, max_new_tokens)
    drafter = whisper.heads(heads)
    chosen = _given(contest, recordings) if recordings else _from_corpus(corpus, splits, per_bin)
    longest = [one for one in chosen if one.bin == LONG] or [max(chosen, key=lambda one: one.words)]

    plain, ours = greedy(), drafted("medusa", drafter, nodes)
    lookup = Way("prompt lookup", {"prompt_lookup_num_tokens": COPIED})
    helpers = assistants(whisper.model, assistant)
    helper = _fastest(contest, helpers, [longest[0].sound]) if len(helpers) > 1 else helpers[0]
    ways = [ours, plain, lookup, helper]
    say(f"{len(chosen)} recordings, {len(longest)} of them long; ways: {', '.join(way.name for way in ways)}")
    singles = [[one.sound] for one in chosen]
    equal = _gate(contest, ways, singles, say)
    runs = _interleave(contest, ways, singles, repeats, say)
    places = {bin: [at for at, one in enumerate(chosen) if one.bin == bin] for bin in BINS}
    long = [at for at, one in enumerate(chosen) if one in longest]
    against = {
        way.name: {
            "identical": sum(equal[way.name][at] for at in long),
            "of": len(long),
            **compare(runs, ours, way, [at for at in long if equal[way.name][at]]),
        }
        for way in (lookup, helper)
    }
    report: dict[str, Any] = {
        "what": "a = mmdec with Medusa heads, b = the other; ratios are b / a",
        "model": whisper.directory.name if whisper.directory else "given",
        "drafter": drafter.name,
        "plan": plan,
        "recordings": len(chosen),
        "long": {"words": f"{LONG[0]} and more", **compare(runs, ours, plain, long)},
        "curve": [
            {"words": f"{low}-{high}" if (low, high) != LONG else f"{low}+", **compare(runs, ours, plain, at)}
            for (low, high), at in places.items()
            if at
        ],
        "clips": _clips(runs, ours, plain, places[SHORT], chosen),
        "against": against,
        "batch": _batch(contest, [ours, plain], longest, batch, repeats, say),
        "seconds_of_audio": sum(len(one.sound) for one in chosen) / SAMPLE_RATE,
    }
    if plans:
        report["sweep"] = _sweep(contest, drafter, plans, longest, batch, repeats, say)
    return {**report, "hardware": hardware(threads, device)}


def _from_corpus(corpus: str | os.PathLike[str], splits: Sequence[str], per_bin: int) -> list[Recording]:
    """`per_bin` of each length, evenly spaced over the splits."""
    rows = read_splits(os.fspath(corpus), list(splits))
    chosen = []
    for low, high in BINS:
        fitting = [row for row in rows if low <= len(row.text.split()) <= high]
        count = min(per_bin, len(fitting))
        for row in (fitting[place * len(fitting) // count] for place in range(count)):
            chosen.append(Recording(row.path.name, len(row.text.split()), load_audio(row.path)))
    return chosen


def _given(contest: Contest, paths: Sequence[Path]) -> list[Recording]:
    """Their words are those of greedy decoding."""
    found = []
    for path in paths:
        sound = load_audio(path)
        found.append(Recording(path.name, len(contest.text(contest.run([sound], greedy()))[0].split()), sound))
    return found


def _gate(
    contest: Contest, ways: Sequence[Way], groups: Sequence[Sequence[Tensor]], say: Callable[[str], None]
) -> dict[str, list[bool]]:
    """For each way and group whether its tokens are greedy decoding's; the first way's must be."""
    first, plain = ways[0], ways[1]
    equal: dict[str, list[bool]] = {way.name: [] for way in ways}
    pad = contest.model.generation_config.pad_token_id
    for place, sounds in enumerate(groups):
        wanted = contest.run(sounds, plain)
        for way in ways:
            found = contest.run(sounds, way)
            equal[way.name].append(all(same(found, wanted, -1 if pad is None else int(pad))))
        if not equal[first.name][-1]:
            raise MmdecError(
                f"`{first.name}` differs from greedy decoding on recording {place}: no timing is reported. Report this "
                "as a bug."
            )
    for way in ways[2:]:
        say(f"{way.name}: {sum(equal[way.name])} of {len(groups)} as greedy decoding")
    return equal


def _interleave(
    contest: Contest,
    ways: Sequence[Way],
    groups: Sequence[Sequence[Tensor]],
    repeats: int,
    say: Callable[[str], None],
) -> Runs:
    """The gate was the warm-up."""
    runs: Runs = {way.name: [[] for _ in groups] for way in ways}
    for repeat in range(repeats):
        for place, sounds in enumerate(groups):
            for way in ways:
                runs[way.name][place].append(contest.run(sounds, way))
        say(f"repeat {repeat + 1} of {repeats}")
    return runs


def _clips(runs: Runs, ours: Way, plain: Way, places: Sequence[int], chosen: Sequence[Recording]) -> dict[str, Any]:
    """Each short clip by itself: none may be slower."""
    rows = []
    for place in places:
        found = compare(runs, ours, plain, [place])
        rows.append({"name": chosen[place].name, "words": chosen[place].words, "wall": found["wall"]["median"]})
    rows.sort(key=lambda row: row["wall"])
    return {"words": f"{SHORT[1]} and fewer", "slower": sum(row["wall"] < 1 for row in rows), "each": rows}


def _groups(longest: Sequence[Recording], batch: int) -> list[list[Tensor]]:
    """All long recordings in batches; the last is filled up from the beginning."""
    count = max(1, len(longest) // batch)
    return [[longest[(at * batch + row) % len(longest)].sound for row in range(batch)] for at in range(count)]


def _batch(
    contest: Contest,
    ways: Sequence[Way],
    longest: Sequence[Recording],
    batch: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    groups = _groups(longest, batch)
    _gate(contest, ways, groups, say)
    runs = _interleave(contest, ways, groups, repeats, say)
    return {"size": batch, **compare(runs, ways[0], ways[1], range(len(groups)))}


def _sweep(
    contest: Contest,
    drafter: Any,
    plans: dict[str, Any],
    longest: Sequence[Recording],
    batch: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Every plan against greedy decoding: long recordings one by one, and in batches."""
    plain, found = greedy(), []
    tried = [drafted(name, drafter, nodes) for name, nodes in plans.items()]
    for size, groups in ((1, [[one.sound] for one in longest]), (batch, _groups(longest, batch))):
        for way in tried:
            _gate(contest, [way, plain], groups, say)
        runs = _interleave(contest, [plain, *tried], groups, repeats, say)
        for way in tried:
            row = compare(runs, way, plain, range(len(groups)))
            found.append(
                {
                    "plan": way.name,
                    "batch": size,
                    "decoder": row["decoder"]["ratio"],
                    "wall": row["wall"]["ratio"],
                    "tokens_per_round": row["a_tokens_per_round"],
                }
            )
    return found


def _fastest(contest: Contest, helpers: Sequence[Way], sounds: Sequence[Tensor]) -> Way:
    """The assistant that decodes these fastest, the second time."""
    seconds = []
    for way in helpers:
        contest.run(sounds, way)
        seconds.append(contest.run(sounds, way).decoder)
    return helpers[seconds.index(min(seconds))]


def _silent(line: str) -> None:
    """No progress lines."""
