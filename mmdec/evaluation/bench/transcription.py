"""Times Medusa heads against transformers' own loops with the same Whisper, after a check that tokens are equal.

Before any timing, each method decodes each recording once. If mmdec's tokens differ from those of greedy `generate`,
there is no report. A recording on which another method differs is left out of that comparison and counted. Then all
methods run in turn, A B C D A B C D, recording by recording: mmdec through `mmdec.transcribe`, transformers through
`model.generate` on the same features. Decoder seconds are all of a call except features and encoder; wall clock is from
samples in memory to text (see `quality/transcription.py`).

Another engine with the same weights is in `peer_transcription.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_threads
from mmdec.decode.budget import Nodes
from mmdec.evaluation.bench.pairing import compare, comparisons, middle, recorded, stages
from mmdec.evaluation.bench.report import DECODER, WALL, BenchReport, Comparison, Exactness, Quantity
from mmdec.evaluation.quality.harness import Log, Measurements, Method, dtype_of, no_log, parse_plan
from mmdec.evaluation.quality.transcription import TranscriptionHarness
from mmdec.hub.provenance import hardware
from mmdec.hub.whisper import DEFAULT_MODEL, LoadedWhisper, load_whisper
from mmdec.pipelines.threads import keep_threads
from mmdec.targets.whisper_decoder import decoder_of_layers
from mmdec.training.corpora.admission import STRICT, Admission
from mmdec.training.corpora.librispeech import read_splits
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.types import Drafter, InputError

SPLITS = ("test", "paragraphs")
BINS = ((1, 5), (6, 10), (11, 20), (21, 39), (40, 10_000))  # least and most words of each bin of recordings
SHORT, LONG = BINS[0], BINS[-1]
COPIED = 10  # the most tokens that transformers' prompt lookup copies: the value in its documentation
PLANS = ("learned", "2", "4", "6", "8", "10", "8x4", "12x6", "16x6", "16x8", "24x8", "32x8", "48x8")


@dataclass(frozen=True)
class Recording:
    """A recording to decode, and its length."""

    name: str
    words: int
    samples: Tensor  # (T,) 16 kHz mono

    @property
    def bin(self) -> tuple[int, int]:
        return next(words for words in BINS if words[0] <= max(self.words, 1) <= words[1])


@final
@dataclass(frozen=True)
class AsrBench:
    """The options of `bench_asr`, which documents them."""

    allow_absolute_paths: bool = False
    heads: str | os.PathLike[str] | None = None
    assistant: str | os.PathLike[str] | None = None
    plan: str = "learned"
    sweep: Sequence[str] = ()
    per_bin: int = 6
    repeats: int = 5
    batch: int = 8
    language: str | None = "en"
    max_new_tokens: int | None = None
    device: str | None = "cpu"
    threads: int = 2
    log: Log = no_log


def bench_asr(
    recordings: Sequence[Path] = (),
    corpus: str | os.PathLike[str] = "data/english",
    splits: Sequence[str] = SPLITS,
    model: str | os.PathLike[str] | LoadedWhisper = DEFAULT_MODEL,
    **options: Any,
) -> BenchReport:
    """Time Medusa heads against greedy decoding, prompt lookup and an assistant.

    recordings: audio files; if empty, `per_bin` recordings of each length are taken from the corpus's splits.
    assistant: directory of a smaller Whisper; None: build one from the model's own layers.
    plan: draft size, see `parse_plan`. sweep: further draft sizes, for long recordings, one by one and in batches.
    batch: number of long recordings in a batch. allow_absolute_paths: accept absolute paths in the corpus's lists.
    Raises InputError, and MmdecError if mmdec's tokens differ from those of greedy decoding.
    """
    how = AsrBench(**options)
    if min(how.per_bin, how.repeats, how.batch) < 1:
        given = f"{how.repeats}, {how.per_bin}, {how.batch}"
        raise InputError(f"`repeats`, `per_bin` and `batch` must be at least 1, but are {given}.")
    nodes, plans = parse_plan(how.plan), {size: parse_plan(size) for size in how.sweep}
    check_threads(how.threads)
    keep_threads(how.threads)
    whisper = model if isinstance(model, LoadedWhisper) else load_whisper(model, how.device)
    bench = _Bench(TranscriptionHarness(whisper, how.language, how.max_new_tokens), how.repeats, how.batch, how.log)
    drafter = whisper.heads(how.heads)
    admission = Admission(how.allow_absolute_paths)
    chosen = _given(bench.harness, recordings) or from_corpus(bench.harness, corpus, splits, how.per_bin, admission)
    report = {
        "what": "a = mmdec with Medusa heads, b = the other; ratios are b / a",
        "model": whisper.directory.name if whisper.directory else "given",
        "drafter": drafter.name,
        "plan": how.plan,
        **bench.all_methods(Method.drafted("medusa", drafter, nodes), assistants(whisper.model, how.assistant), chosen),
    }
    if plans:
        report["sweep"] = bench.sweep(drafter, plans, [chosen[index] for index in _long(chosen)])
    network = whisper.model
    report["hardware"] = hardware(
        device=network.device, dtype=dtype_of(network), batch=(1, how.batch), threads=torch.get_num_threads()
    )
    return _report(report)


def _report(found: dict[str, Any]) -> BenchReport:
    clips, batch, recordings = found["clips"], found["batch"], found["recordings"]
    rows: list[Comparison] = []
    for row in found["curve"]:
        group = f"{row['words']} words"
        rows += comparisons(row, "medusa", "greedy", group, "length", size=middle(group), unit="words")
    exact = [Exactness("tokens of medusa and of transformers' greedy loop", recordings, recordings)]
    for name, row in found["against"].items():
        rows += comparisons(row, "medusa", name, found["long"]["words"], "all")
        exact.append(Exactness(f"tokens of {name} and of the greedy loop", row["identical"], row["of"]))
    rows += comparisons(batch, "medusa", "greedy", f"{batch['size']} together", "batch")
    rows += [
        Comparison(
            *(f"medusa {row['plan']}", "greedy", f"batch {row['batch']}", "draft size", timed, row[key], None, None),
            pairs=0,
            inputs=1,
            tokens_per_round=row["tokens_per_round"],
        )
        for row in found.get("sweep", ())
        for timed, key in ((DECODER, "decoder"), (WALL, "wall"))
    ]
    return BenchReport(
        bench="asr",
        title=f"Medusa heads: {found['model']}, drafts {found['plan']}",
        hardware=found["hardware"],
        exactness=tuple(exact),
        comparisons=tuple(rows),
        quantities=(
            Quantity("clips of few words slower than greedy decoding", clips["slower"], "clips", len(clips["each"])),
            Quantity("audio decoded in a repeat", found["seconds_of_audio"], "s", recordings),
        ),
        stages=found["stages"],
        depths={name: tuple(shares) for name, shares in found["depths"].items() if shares},
        not_measured={"another engine": "--peer ctranslate2 was not given"},
        details=found,
    )


@dataclass(frozen=True)
class _Bench:
    """The settings that all comparisons share."""

    harness: TranscriptionHarness
    repeats: int
    batch_size: int
    log: Log

    def all_methods(self, medusa: Method, helpers: Sequence[Method], chosen: Sequence[Recording]) -> dict[str, Any]:
        """Compare our method with greedy decoding by length, and with the other methods on long recordings."""
        long = _long(chosen)
        longest = [chosen[index] for index in long]
        greedy, lookup = Method.greedy(), Method("prompt lookup", "transformers", {"prompt_lookup_num_tokens": COPIED})
        helper = fastest(self.harness, helpers, [longest[0].samples]) if len(helpers) > 1 else helpers[0]
        methods = [medusa, greedy, lookup, helper]
        names = ", ".join(method.name for method in methods)
        self.log(f"{len(chosen)} recordings, {len(longest)} of them long; methods: {names}")
        singles = [[recording.samples] for recording in chosen]
        watched, recorders = recorded(methods)
        equal = self.harness.gate(watched, singles, self.log)
        measured = self.harness.interleave(methods, singles, self.repeats, self.log)
        of_length = {bin: [index for index, recording in enumerate(chosen) if recording.bin == bin] for bin in BINS}
        return {
            "recordings": len(chosen),
            "stages": stages(measured, range(len(chosen))),
            "depths": {name: recorder.shares() for name, recorder in recorders.items()},
            "long": {"words": f"{LONG[0]} and more", **compare(measured, medusa, greedy, long)},
            "curve": [
                {
                    "words": f"{low}-{high}" if (low, high) != LONG else f"{low}+",
                    **compare(measured, medusa, greedy, indices),
                }
                for (low, high), indices in of_length.items()
                if indices
            ],
            "clips": _clips(measured, medusa, greedy, of_length[SHORT], chosen),
            "against": {
                method.name: {
                    "identical": sum(equal[method.name][index] for index in long),
                    "of": len(long),
                    **compare(measured, medusa, method, [index for index in long if equal[method.name][index]]),
                }
                for method in (lookup, helper)
            },
            "batch": self.batches([medusa, greedy], longest),
            "seconds_of_audio": sum(len(recording.samples) for recording in chosen) / SAMPLE_RATE,
        }

    def batches(self, methods: Sequence[Method], longest: Sequence[Recording]) -> dict[str, Any]:
        """Compare the first method with the second on long recordings in batches."""
        groups = _groups(longest, self.batch_size)
        self.harness.gate(methods, groups, self.log)
        measured = self.harness.interleave(methods, groups, self.repeats, self.log)
        return {"size": self.batch_size, **compare(measured, methods[0], methods[1], range(len(groups)))}

    def sweep(self, drafter: Drafter, plans: dict[str, Nodes], longest: Sequence[Recording]) -> list[dict[str, Any]]:
        """Compare each draft size with greedy decoding on long recordings, one by one and in batches."""
        greedy, rows = Method.greedy(), []
        drafted = [Method.drafted(name, drafter, nodes) for name, nodes in plans.items()]
        singles = [[recording.samples] for recording in longest]
        for size, groups in ((1, singles), (self.batch_size, _groups(longest, self.batch_size))):
            for method in drafted:
                self.harness.gate([method, greedy], groups, self.log)
            measured = self.harness.interleave([greedy, *drafted], groups, self.repeats, self.log)
            for method in drafted:
                row = compare(measured, method, greedy, range(len(groups)))
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


def _long(chosen: Sequence[Recording]) -> list[int]:
    """Return the indices of the recordings in the bin of the longest lengths, else of the longest recording."""
    indices = [index for index, recording in enumerate(chosen) if recording.bin == LONG]
    return indices or [max(range(len(chosen)), key=lambda index: chosen[index].words)]


def from_corpus(
    harness: TranscriptionHarness,
    corpus: str | os.PathLike[str],
    splits: Sequence[str],
    per_bin: int,
    admission: Admission = STRICT,
) -> list[Recording]:
    """Choose `per_bin` recordings of each length, evenly spaced over the splits. admission: which paths are
    accepted."""
    rows = read_splits(os.fspath(corpus), list(splits), admission)
    chosen = []
    for low, high in BINS:
        fitting = [row for row in rows if low <= len(row.text.split()) <= high]
        for row in evenly_spaced(fitting, per_bin):
            chosen.append(Recording(row.path.name, len(row.text.split()), harness.read(row.path)))
    return chosen


def _given(harness: TranscriptionHarness, paths: Sequence[Path]) -> list[Recording]:
    """Read the given recordings; their length is the number of words in the greedy transcript."""
    given = []
    for path in paths:
        samples = harness.read(path)
        text = harness.measure([samples], Method.greedy()).texts[0]
        given.append(Recording(path.name, len(text.split()), samples))
    return given


def _clips(
    measured: Measurements, medusa: Method, greedy: Method, indices: Sequence[int], chosen: Sequence[Recording]
) -> dict[str, Any]:
    """Compare each short clip by itself: none should be slower than greedy decoding."""
    rows = []
    for index in indices:
        wall = compare(measured, medusa, greedy, [index])["wall"]
        rows.append({"name": chosen[index].name, "words": chosen[index].words, "wall": wall["median"]})
    rows.sort(key=lambda row: row["wall"])
    return {"words": f"{SHORT[1]} and fewer", "slower": sum(row["wall"] < 1 for row in rows), "each": rows}


def _groups(longest: Sequence[Recording], size: int) -> list[list[Tensor]]:
    """Group long recordings into full batches of `size`; a single batch repeats recordings if there are too few."""
    count = max(1, len(longest) // size)
    return [[longest[(batch * size + row) % len(longest)].samples for row in range(size)] for batch in range(count)]


def fastest(harness: TranscriptionHarness, helpers: Sequence[Method], recordings: Sequence[Tensor]) -> Method:
    """Return the assistant whose second call on the recordings has the fewest decoder seconds."""
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
