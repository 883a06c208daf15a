"""Scores a Whisper on a split: word and character errors, and what its decoding costs with drafts and without.

What is scored and timed is `mmdec.transcribe`; transformers' own loop gets the same features (`evaluation/harness.py`).
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

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_threads
from mmdec.corpora.librispeech import Utterance, read_utterances
from mmdec.evaluation.harness import Harness, Measurement, Method, has_heads
from mmdec.generation.speculation import Nodes
from mmdec.hub.whisper import DEFAULT_MODEL, LoadedWhisper, load_whisper
from mmdec.metrics import text as metrics
from mmdec.metrics.word_errors import Edits, character_edits, rate, ratio, word_edits
from mmdec.provenance import hardware
from mmdec.runtime import dtype_of
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
    model: str | os.PathLike[str] | LoadedWhisper = DEFAULT_MODEL,
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
    A recording that `mmdec.transcribe` refuses counts as an empty transcript and is named. Sound of more than a window
    (30 s) is decoded by itself, in transformers' long-form code.
    """
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be at least 1, but is {limit}. Leave it out for the whole split.")
    if batch_size < 1:
        raise InputError(f"`batch_size` must be at least 1, but is {batch_size}. 1 decodes one by one.")
    rows = spaced(read_utterances(os.fspath(corpus), split), limit)
    check_threads(threads)
    torch.set_num_threads(threads)
    whisper = model if isinstance(model, LoadedWhisper) else load_whisper(model, device)
    harness = Harness(whisper, language, max_new_tokens)
    methods = _methods(whisper, heads, plan, plain)
    say = log if log is not None else _silent
    heard: list[Heard] = []
    measured: dict[str, list[Measurement]] = {method.name: [] for method in methods}
    for group in _batches(rows, batch_size):
        _decode(harness, methods, group, heard, measured)
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
        "decoding": {method.name: _cost(measured[method.name], heard) for method in methods},
    }
    if len(methods) == 2:
        ours, theirs = (measured[method.name] for method in methods)
        kept = [one for one in heard if not one.error]
        report["identical"] = {"count": sum(one.identical for one in kept), "n": len(kept)}
        report["speedup"] = {
            "what": "transformers' greedy seconds over ours, same batches in turn",
            "decoder": _ratio(ours, theirs, lambda one: one.decoder),
            "wall": _ratio(ours, theirs, lambda one: one.total),
        }
    network = whisper.model
    report["hardware"] = hardware(
        device=network.device, dtype=dtype_of(network), batch=batch_size, threads=torch.get_num_threads()
    )
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
    return [rows[number * len(rows) // limit] for number in range(limit)]


def _methods(whisper: LoadedWhisper, heads: str | os.PathLike[str] | None, plan: Nodes, plain: bool) -> list[Method]:
    if heads is None and not has_heads(whisper):
        return [Method.greedy()]
    ours = Method.drafted("medusa", whisper.heads(heads), plan)
    return [ours, Method.greedy()] if plain else [ours]


def _batches(rows: Sequence[Utterance], size: int) -> Iterator[list[Utterance]]:
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def _decode(
    harness: Harness,
    methods: Sequence[Method],
    group: Sequence[Utterance],
    heard: list[Heard],
    measured: dict[str, list[Measurement]],
) -> None:
    """One batch by all methods in turn; recordings of more than a window by themselves."""
    sounds: list[tuple[Utterance, Tensor]] = []
    for row in group:
        try:
            sounds.append((row, harness.read(row.path)))
        except InputError as error:
            heard.append(Heard(row, "", 0.0, error=str(error)))
    short = [pair for pair in sounds if not harness.is_long(pair[1])]
    for batch in [short, *([pair] for pair in sounds if harness.is_long(pair[1]))]:
        if not batch:
            continue
        samples = [sound for _, sound in batch]
        if not any(measured.values()):
            for method in methods:
                harness.measure(samples, method)  # the first call pays for lazy set-up
        results = [harness.measure(samples, method) for method in methods]
        for method, result in zip(methods, results, strict=True):
            measured[method.name].append(result)
        ours, theirs = results[0], results[-1]
        for (row, sound), text, a, b in zip(batch, ours.texts, ours.tokens, theirs.tokens, strict=True):
            heard.append(Heard(row, text, len(sound) / SAMPLE_RATE, identical=a == b))


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


def _cost(calls: Sequence[Measurement], heard: Sequence[Heard]) -> dict[str, Any]:
    """Seconds, passes and rounds of one method."""
    if not calls:
        return {}
    total = sum(one.total for one in calls)
    rounds, tokens = sum(one.rounds for one in calls), sum(one.drafted_tokens for one in calls)
    latencies = [one.total for one in calls]
    return {
        "seconds": {
            "features": sum(one.features for one in calls),
            "encoder": sum(one.encoder for one in calls),
            "decoder": sum(one.decoder for one in calls),  # the drafter included
            "drafter": sum(one.drafter for one in calls),
            "total": total,  # reading included
        },
        "decoder_share": sum(one.decoder for one in calls) / total,
        "decoder_passes": sum(one.passes for one in calls),
        "rounds": rounds,  # each row's, the prompt's left out
        "tokens_per_round": tokens / rounds if rounds else None,
        "latency": {"median": median(latencies), "p90": metrics.percentile(latencies, 0.9), "of": "a batch"},
        "real_time_factor": total / sum(one.seconds for one in heard if not one.error),
    }


def _ratio(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], seconds: Callable[[Measurement], float]
) -> dict[str, float]:
    value, low, high = ratio([seconds(one) for one in theirs], [seconds(one) for one in ours])
    return {"value": value, "low": low, "high": high}


def _silent(line: str) -> None:
    """No progress lines."""
