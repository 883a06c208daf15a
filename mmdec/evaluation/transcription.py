"""Scores a Whisper on a split: word and character errors, and what its decoding costs with drafts and without.

    evaluate_asr(split="test", corpus="data/english", model="whisper-phrasebook", *, heads=None, plan=None, plain=True,
                 language="en", batch_size=1, limit=None, max_new_tokens=None, device=None, threads=2, worst=10,
                 log=None) -> dict, ready for json.dumps

`scorecard.asr_table(report)` shows the result to people. The corpus is in LibriSpeech's layout or a manifest:
see `utterances.py`.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.checks.arguments import check_threads
from mmdec.corpora.librispeech import Utterance, read_utterances
from mmdec.evaluation.harness import Contest, Run, Way, drafted, greedy, has_heads, same
from mmdec.generation.speculation import Nodes
from mmdec.hub.whisper import DEFAULT_MODEL, Whisper, load_whisper
from mmdec.metrics import text as metrics
from mmdec.metrics.word_errors import Edits, character_edits, rate, ratio, word_edits
from mmdec.provenance import hardware
from mmdec.types import InputError

ENGLISH = ("en", "english")
EVERY = 50  # utterances between two lines of progress


@dataclass(frozen=True)
class Heard:
    """One utterance and its transcript; empty where the recording was refused."""

    row: Utterance
    text: str
    seconds: float
    identical: bool = True  # to transformers' own
    error: str = ""


def evaluate_asr(
    split: str | None = "test",
    corpus: str | os.PathLike[str] = "data/english",
    model: str | os.PathLike[str] | Whisper = DEFAULT_MODEL,
    *,
    heads: str | os.PathLike[str] | None = None,
    plan: Nodes = None,
    plain: bool = True,
    language: str | None = "en",
    batch_size: int = 1,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    device: str | None = None,
    threads: int = 2,
    worst: int = 10,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Every figure as a JSON-ready dict.

    heads: a directory; None takes the model's own. Without heads the text is transformers' own, and there is no
    speedup. plan: nodes of a draft, as `num_speculative_tokens` of `mmdec.speculate`. plain: decode with transformers'
    own loop, too, each batch after the drafted run of the same batch, for the speedup and to compare the tokens.
    language: None has it detected. limit: that many utterances, evenly spaced. worst: how many examples are listed.
    A recording that cannot be read counts as an empty transcript and is named. Sound of more than a window (30 s) is
    decoded by itself, in transformers' long-form code.
    """
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be at least 1, but is {limit}. Leave it out for the whole split.")
    if batch_size < 1:
        raise InputError(f"`batch_size` must be at least 1, but is {batch_size}. 1 decodes one by one.")
    rows = spaced(read_utterances(os.fspath(corpus), split), limit)
    check_threads(threads)
    torch.set_num_threads(threads)
    whisper = model if isinstance(model, Whisper) else load_whisper(model, device)
    contest = Contest(whisper, language, max_new_tokens)
    ways = _ways(whisper, heads, plan, plain)
    say = log if log is not None else _silent
    heard: list[Heard] = []
    runs: dict[str, list[tuple[int, Run]]] = {way.name: [] for way in ways}
    for group in _batches(rows, batch_size):
        _decode(contest, ways, group, heard, runs)
        if len(heard) // EVERY > (len(heard) - len(group)) // EVERY or len(heard) == len(rows):
            say(f"transcribed {len(heard)} of {len(rows)}")
    normalise, name = normaliser(whisper.tokenizer, language)
    report: dict[str, Any] = {
        "model": whisper.directory.name if whisper.directory else "given",
        "split": split,
        "n": len(rows),
        "source_seconds": sum(one.seconds for one in heard),
        "batch_size": batch_size,
        "language": language,
        "normaliser": name,
        **_scores(heard, normalise),
        "by_speaker": _by_speaker(heard, normalise),
        "worst": _worst(heard, normalise, worst),
        "refused": {one.row.path.name: one.error for one in heard if one.error},
        "decoding": {way.name: _cost(runs[way.name], heard) for way in ways},
    }
    if len(ways) == 2:
        ours, theirs = ([run for _, run in runs[way.name]] for way in ways)
        kept = [one for one in heard if not one.error]
        report["identical"] = {"count": sum(one.identical for one in kept), "n": len(kept)}
        report["speedup"] = {
            "what": "transformers' greedy seconds over ours, same batches in turn",
            "decoder": _ratio(ours, theirs, lambda run: run.decoder),
            "wall": _ratio(ours, theirs, lambda run: run.total),
        }
    report["hardware"] = {**hardware(threads, device), "batch": batch_size}
    return report


def normaliser(tokenizer: Any, language: str | None) -> tuple[Callable[[str], str], str]:
    """Whisper's own, and which it is: the English one spells British words and numbers alike ("twenty five", "25"),
    as far as spellings came with the tokenizer (normalizer.json); the basic one drops case, marks and what is in
    brackets."""
    if language is None or language.lower() not in ENGLISH:
        return tokenizer.basic_normalize, "basic"
    if tokenizer.english_spelling_normalizer is not None:
        return tokenizer.normalize, "english"
    bare = copy.copy(tokenizer)
    bare.english_spelling_normalizer = {}
    return bare.normalize, "english, without British spellings"


def spaced(rows: Sequence[Utterance], limit: int | None) -> list[Utterance]:
    """`limit` rows, evenly spaced; all where there are no more."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[place * len(rows) // limit] for place in range(limit)]


def _ways(whisper: Whisper, heads: str | os.PathLike[str] | None, plan: Nodes, plain: bool) -> list[Way]:
    if heads is None and not has_heads(whisper):
        return [greedy()]
    ours = drafted("medusa", whisper.heads(heads), plan)
    return [ours, greedy()] if plain else [ours]


def _batches(rows: Sequence[Utterance], size: int) -> Iterator[list[Utterance]]:
    for place in range(0, len(rows), size):
        yield list(rows[place : place + size])


def _decode(
    contest: Contest,
    ways: Sequence[Way],
    group: Sequence[Utterance],
    heard: list[Heard],
    runs: dict[str, list[tuple[int, Run]]],
) -> None:
    """One batch by all ways in turn; recordings of more than a window by themselves."""
    sounds: list[tuple[Utterance, Tensor]] = []
    for row in group:
        try:
            sounds.append((row, load_audio(row.path)))
        except InputError as error:
            heard.append(Heard(row, "", 0.0, error=str(error)))
    short = [pair for pair in sounds if len(pair[1]) <= contest.window]
    for batch in [short, *([pair] for pair in sounds if len(pair[1]) > contest.window)]:
        if not batch:
            continue
        samples = [sound for _, sound in batch]
        if not any(runs.values()):
            for way in ways:
                contest.run(samples, way)  # the first call pays for lazy set-up
        found = [contest.run(samples, way) for way in ways]
        for way, run in zip(ways, found, strict=True):
            runs[way.name].append((len(batch), run))
        pad = contest.model.generation_config.pad_token_id
        equal = same(found[0], found[-1], -1 if pad is None else int(pad))
        for (row, sound), text, identical in zip(batch, contest.text(found[0]), equal, strict=True):
            heard.append(Heard(row, text, len(sound) / SAMPLE_RATE, identical))


def _scores(heard: Sequence[Heard], normalise: Callable[[str], str]) -> dict[str, Any]:
    plain = [(normalise(one.row.text), normalise(one.text)) for one in heard]
    raw = [(" ".join(one.row.text.split()), " ".join(one.text.split())) for one in heard]
    return {
        "wer": rate([word_edits(*pair) for pair in plain]),
        "cer": rate([character_edits(*pair) for pair in plain]),
        "wer_raw": rate([word_edits(*pair) for pair in raw]),
        "cer_raw": rate([character_edits(*pair) for pair in raw]),
        "exact": metrics.Rate(sum(a == b for a, b in plain), len(plain)).summary(),
        "exact_raw": metrics.Rate(sum(a == b for a, b in raw), len(raw)).summary(),
    }


def _by_speaker(heard: Sequence[Heard], normalise: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    edits: dict[str, list[Edits]] = defaultdict(list)
    for one in heard:
        edits[one.row.speaker].append(word_edits(normalise(one.row.text), normalise(one.text)))
    return {speaker: {"n": len(found), "wer": rate(found)["value"]} for speaker, found in sorted(edits.items())}


def _worst(heard: Sequence[Heard], normalise: Callable[[str], str], count: int) -> list[dict[str, Any]]:
    """Those with most errors; of equals the shorter ones first."""
    scored = [(word_edits(normalise(one.row.text), normalise(one.text)), one) for one in heard]
    scored.sort(key=lambda pair: (-pair[0].errors, pair[0].length))
    return [
        {
            "path": one.row.path.name,
            "speaker": one.row.speaker,
            "errors": edits.errors,
            "words": edits.length,
            "reference": one.row.text,
            "transcript": one.text,
        }
        for edits, one in scored[:count]
        if edits.errors
    ]


def _cost(runs: Sequence[tuple[int, Run]], heard: Sequence[Heard]) -> dict[str, Any]:
    """Seconds, passes and rounds of one way."""
    if not runs:
        return {}
    calls = [run for _, run in runs]
    total = sum(run.total for run in calls)
    rounds, tokens = sum(run.rounds for run in calls), sum(run.drafted_tokens for run in calls)
    latencies = [run.total for run in calls]
    return {
        "seconds": {
            "features": sum(run.features for run in calls),
            "encoder": sum(run.encoder for run in calls),
            "decoder": sum(run.decoder for run in calls),
            "total": total,
        },
        "decoder_share": sum(run.decoder for run in calls) / total,
        "decoder_passes": sum(run.passes for run in calls),
        "rounds": rounds,  # each row's, the prompt's left out
        "tokens_per_round": tokens / rounds if rounds else None,
        "latency": {"median": median(latencies), "p90": metrics.percentile(latencies, 0.9), "of": "a batch"},
        "real_time_factor": total / sum(one.seconds for one in heard if not one.error),
    }


def _ratio(ours: Sequence[Run], theirs: Sequence[Run], seconds: Callable[[Run], float]) -> dict[str, float]:
    value, low, high = ratio([seconds(run) for run in theirs], [seconds(run) for run in ours])
    return {"value": value, "low": low, "high": high}


def _silent(line: str) -> None:
    """No progress lines."""
