"""Times Medusa heads against transformers' own loops with the same Whisper, after a check that tokens are equal.

Before any timing, each method decodes each recording once. If mmdec's tokens differ from those of greedy `generate`,
there is no report. A recording on which the tokens of another method differ is left out of the comparison with this
method, and counted. Then all methods run in turn, A B C D A B C D, recording by recording: mmdec through
`mmdec.transcribe`, transformers through `model.generate` on the same features. Decoder seconds are the seconds of a
call without features and encoder; wall clock is from samples in memory to text (see
`mmdec/evaluation/transcription.py`).

Another engine with the same weights is in `peer_transcription.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.bench.pairing import LOOKUP, Group, MethodTimings, length_groups, time_methods
from mmdec.bench.report import BenchReport, Comparison, Exactness, Quantity
from mmdec.checks.arguments import check_threads
from mmdec.errors import InputError
from mmdec.evaluation.harness import Log, Method, describe_measurement, no_log, parse_plan
from mmdec.evaluation.transcription import TranscriptionHarness
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.admission import STRICT, Admission
from mmdec.training.corpora.librispeech import read_splits
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.whisper.checkpoint import DEFAULT_MODEL, LoadedWhisper, load_whisper
from mmdec.whisper.decoder import decoder_of_layers

SPLITS = ("test", "paragraphs")
WORD_BINS = ((1, 5), (6, 10), (11, 20), (21, 39), (40, 10_000))  # least and most words of each bin of recordings
LONGEST_BIN = WORD_BINS[-1]


@dataclass(frozen=True)
class BenchRecording:
    """A recording to decode, with the number of words of its transcript."""

    name: str
    words: int
    samples: Tensor  # (T,) 16 kHz mono


def bench_asr(
    recordings: Sequence[Path] = (),
    corpus: str | os.PathLike[str] = "data/english",
    splits: Sequence[str] = SPLITS,
    model: str | os.PathLike[str] | LoadedWhisper = DEFAULT_MODEL,
    *,
    allow_absolute_paths: bool = False,
    heads: str | os.PathLike[str] | None = None,
    assistant: str | os.PathLike[str] | None = None,
    plan: str = "learned",
    per_bin: int = 6,
    repeats: int = 5,
    batch: int = 8,
    language: str | None = "en",
    max_new_tokens: int | None = None,
    device: str | None = "cpu",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time Medusa heads against greedy decoding, prompt lookup and an assistant.

    Args:
        recordings: Audio files; if empty, `per_bin` recordings of each length are taken from the corpus's splits.
        heads: Directory of Medusa heads; None: those in the model's folder.
        assistant: Directory of a smaller Whisper; None: build one from the model's own layers.
        plan: Draft size: "learned", a chain such as "8", or a tree such as "16x6" (16 nodes, at most 6 deep).
        repeats: Timed calls of each method and recording.
        batch: Number of long recordings in a batch.
        language: None: detect it.
        allow_absolute_paths: Accept absolute paths in the corpus's lists.

    Raises:
        InputError: If an argument is invalid.
        MmdecError: If mmdec's tokens differ from those of greedy decoding.
    """
    if min(per_bin, repeats, batch) < 1:
        values = f"{repeats}, {per_bin}, {batch}"
        raise InputError(f"`repeats`, `per_bin` and `batch` must be at least 1, but are {values}.")
    nodes = parse_plan(plan)
    check_threads(threads)
    keep_threads(threads)
    whisper = model if isinstance(model, LoadedWhisper) else load_whisper(model, device)
    harness = TranscriptionHarness(whisper, language, max_new_tokens)
    medusa, greedy = Method.with_drafter("medusa", whisper.heads(heads), nodes), Method.greedy()
    admission = Admission(allow_absolute_paths)
    chosen = _read_recordings(harness, recordings) or from_corpus(harness, corpus, splits, per_bin, admission)
    long = _long(chosen)
    longest = [chosen[index].samples for index in long]
    helper = fastest(harness, assistants(whisper.model, assistant), longest[:1])
    methods = [medusa, greedy, LOOKUP, helper]
    names = ", ".join(method.name for method in methods)
    log(f"{len(chosen)} recordings, {len(long)} of them long; methods: {names}")
    alone = time_methods(harness, methods, [[recording.samples] for recording in chosen], repeats, log)
    batches = in_batches(longest, batch)
    together = time_methods(harness, [medusa, greedy], batches, repeats, log)
    return _report(
        chosen,
        long,
        alone,
        rows=together.rows("medusa", "greedy", Group(f"{batch} together", "batch", range(len(batches)))),
        title=f"Medusa heads: {whisper.directory.name if whisper.directory else 'given'}, drafts {plan}",
        machine=describe_measurement(whisper.model, (1, batch)),
    )


def _report(
    chosen: Sequence[BenchRecording],
    long: Sequence[int],
    alone: MethodTimings,
    rows: Sequence[Comparison],
    title: str,
    machine: dict[str, Any],
) -> BenchReport:
    """Build the report.

    Args:
        chosen: All recordings.
        long: Indices of the long ones.
        alone: Timings of the recordings one by one.
        rows: Rows of the report for batches.
        machine: The report's `hardware`.
    """
    count, whole = len(chosen), Group(f"{LONGEST_BIN[0]} and more", "all", long)
    lengths = length_groups([max(recording.words, 1) for recording in chosen], WORD_BINS, "words")
    comparisons = [row for group in lengths for row in alone.rows("medusa", "greedy", group)]
    exact = [Exactness("tokens of medusa and of transformers' greedy loop", count, count)]
    for name in list(alone.measured)[2:]:
        comparisons += alone.rows("medusa", name, whole)
        same = sum(alone.equal[name][index] for index in long)
        exact.append(Exactness(f"tokens of {name} and of the greedy loop", same, len(long)))
    clips = []  # short recordings one by one: none should be slower than with greedy decoding
    for index in lengths[0].indices:
        wall = alone.rows("medusa", "greedy", Group(chosen[index].name, "all", [index]))[-1].times or 0.0
        clips.append({"name": chosen[index].name, "words": chosen[index].words, "wall": wall})
    return BenchReport(
        bench="asr",
        title=title,
        hardware=machine,
        exactness=tuple(exact),
        comparisons=(*comparisons, *rows),
        quantities=(
            Quantity(
                "clips of few words slower than greedy decoding",
                sum(clip["wall"] < 1 for clip in clips),
                "clips",
                len(clips),
            ),
            Quantity(
                "audio decoded in a repeat",
                sum(len(recording.samples) for recording in chosen) / SAMPLE_RATE,
                "s",
                count,
            ),
        ),
        stages=alone.stages(),
        depths=alone.depths,
        not_measured={"another engine": "--peer ctranslate2 was not given"},
        details={"clips": sorted(clips, key=lambda clip: clip["wall"])},
    )


def _long(chosen: Sequence[BenchRecording]) -> list[int]:
    """Return the indices of the recordings in `LONGEST_BIN`; if there are none, the index of the longest recording."""
    indices = [index for index, recording in enumerate(chosen) if recording.words >= LONGEST_BIN[0]]
    return indices or [max(range(len(chosen)), key=lambda index: chosen[index].words)]


def from_corpus(
    harness: TranscriptionHarness,
    corpus: str | os.PathLike[str],
    splits: Sequence[str],
    per_bin: int,
    admission: Admission = STRICT,
) -> list[BenchRecording]:
    """Choose `per_bin` recordings for each range of lengths in `WORD_BINS`, evenly spaced over the splits.

    Args:
        admission: Which paths in the corpus's lists are accepted.
    """
    rows = read_splits(os.fspath(corpus), list(splits), admission)
    chosen = []
    for low, high in WORD_BINS:
        fitting = [row for row in rows if low <= len(row.text.split()) <= high]
        for row in evenly_spaced(fitting, per_bin):
            chosen.append(BenchRecording(row.path.name, len(row.text.split()), harness.read(row.path)))
    return chosen


def _read_recordings(harness: TranscriptionHarness, paths: Sequence[Path]) -> list[BenchRecording]:
    """Read recordings that the user named. The length of each, by which results are grouped, is the number of words in
    its greedy transcript."""
    recordings = []
    for path in paths:
        samples = harness.read(path)
        text = harness.measure([samples], Method.greedy()).texts[0]
        recordings.append(BenchRecording(path.name, len(text.split()), samples))
    return recordings


def in_batches(longest: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Group long recordings into full batches of `size`. If there are fewer than `size`, some are repeated in the only
    batch."""
    count = max(1, len(longest) // size)
    return [[longest[(batch * size + row) % len(longest)] for row in range(size)] for batch in range(count)]


def fastest(harness: TranscriptionHarness, helpers: Sequence[Method], recordings: Sequence[Tensor]) -> Method:
    """Return the assistant with the fewest decoder seconds in its second call on the recordings; the first is a
    warm-up."""
    if len(helpers) == 1:
        return helpers[0]
    seconds = []
    for method in helpers:
        harness.measure(recordings, method)
        seconds.append(harness.measure(recordings, method).decoder)
    return helpers[seconds.index(min(seconds))]


def assistants(model: WhisperForConditionalGeneration, directory: str | os.PathLike[str] | None) -> list[Method]:
    """Make the methods with an assistant: the Whisper in `directory`; for None, several choices of the model's own
    layers.

    A distilled assistant shares the large model's encoder, as in distil-whisper (Gandhi et al. 2023, section 3.3). An
    assistant of the model's own layers needs no training; a trial finds the fastest choice.
    """
    if directory is not None:
        networks: dict[str, Any] = {os.path.basename(os.fspath(directory)): load_whisper(directory, model.device).model}
    else:
        last = model.config.decoder_layers - 1
        choices = {(0, last), (*range(0, last, 2), last), tuple(range(last))}
        networks = {
            f"of decoder layers {', '.join(map(str, layers))}": decoder_of_layers(model, layers)
            for layers in sorted(choices)
            if layers
        }
    return [
        Method(f"assistant {name}", "transformers", {"assistant_model": network}, networks=[network])
        for name, network in networks.items()
    ]
