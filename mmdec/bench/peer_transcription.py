"""Times mmdec, transformers and another engine with the same Whisper, on given recordings.

The other engine is CTranslate2, which faster-whisper uses. CTranslate2's own converter writes the weights, and
CTranslate2 gets the same features. CTranslate2 decodes single windows; `long_form` moves from window to window by
transformers' rule: it keeps whole segments, and the next window begins at the end of the last segment. All engines
decode greedily, and never retry a window at a higher temperature.

Calls go A B C D A B C D, recording by recording, from samples in memory to text. Each engine runs with one thread and
with `threads`; a ratio of wall clocks takes each engine with the number of threads that is faster. CPU seconds
are those of calls with one thread: on a busy machine they vary less. In int8, texts may differ from those of float32,
so the word error rate of each engine is given, too, if transcripts (.txt) lie next to the recordings.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from mmdec.bench.pairing import PairedTiming
from mmdec.bench.report import WALL_CLOCK, BenchReport, Comparison, Exactness, Quantity
from mmdec.checks.arguments import check_threads, check_whole
from mmdec.core.timing import Stopwatch
from mmdec.drafters.built_in import AUTO
from mmdec.errors import InputError
from mmdec.evaluation.harness import CPU, Log, Method, no_log
from mmdec.evaluation.transcription import TranscriptionHarness, normaliser
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.hub.provenance import measurement_conditions
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.threads import with_threads
from mmdec.training.metrics.text import ratio, word_edits
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.special_tokens import first_timestamp_token

PEERS = ("ctranslate2",)
STOCK, OURS, OURS_INT8 = "transformers float32", "mmdec float32", "mmdec int8"
PEER, PEER_INT8 = "ctranslate2 float32", "ctranslate2 int8"
PAIRS = ((OURS, STOCK), (OURS, PEER), (OURS_INT8, PEER_INT8), (PEER, STOCK), (OURS, PEER_INT8))
CPU_TIME = "CPU time, one thread"
Call = Callable[[Tensor], str]  # samples (T,) of 16 kHz -> text
DecodeWindow = Callable[[Tensor], list[int]]  # a window's features (1, mels, F) -> its tokens, without prompt


@final
@dataclass
class TimedEngine:
    """One engine with one number of threads.

    Holds its texts and the seconds of its calls, by index of the recording.
    """

    call: Call
    texts: dict[int, str] = field(default_factory=dict)
    # wall-clock and CPU seconds of each repeat
    seconds: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_seconds: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


Sides = dict[tuple[str, int], TimedEngine]  # (name, threads) -> its texts and seconds


def bench_peer(
    recordings: Sequence[Path],
    model: str | os.PathLike[str],
    peer: str,
    *,
    heads: DrafterChoice = AUTO,
    repeats: int = 5,
    language: str | None = "en",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time mmdec, transformers and another engine on recordings of any length.

    Args:
        recordings: Audio files; the transcript of each may lie next to it (.txt).
        model: A shipped name, a folder or a Hugging Face id.
        peer: "ctranslate2".
        heads: mmdec's drafter, by name, folder or object.
        repeats: Timed calls of each engine and recording.
        language: None: detected.
        threads: Each engine runs with one thread and with this number.

    Returns:
        The report; its ratios are the baseline's seconds over the subject's.

    Raises:
        InputError: Where the peer is unknown or not installed, or there are no recordings.
    """
    if peer not in PEERS:
        raise InputError(f"`peer` must be one of {', '.join(PEERS)}, but is {peer!r}. Leave it out for none.")
    check_whole("repeats", repeats, 1, 1000, "Leave it out for 5.")
    check_threads(threads)
    if not recordings:
        raise InputError("`recordings` must be named for a peer, but none are. Name files, or a folder of them.")
    whisper, int8_whisper = (load_whisper(model, "cpu", dtype) for dtype in (torch.float32, torch.int8))
    harness = TranscriptionHarness(whisper, language)
    sounds = [harness.read(path) for path in recordings]
    counts = sorted({1, threads})
    with tempfile.TemporaryDirectory() as folder:
        named: dict[tuple[str, int], Call] = {}
        for count in counts:
            drafted = Method.with_drafter("mmdec", heads)
            named |= {
                (STOCK, count): partial(_transcribe, harness, Method.greedy(), count),
                (OURS, count): partial(_transcribe, harness, drafted, count),
                (OURS_INT8, count): partial(_transcribe, TranscriptionHarness(int8_whisper, language), drafted, count),
            }
        named |= peer_calls(whisper, Path(folder) / "model", harness, counts)
        sides = {key: TimedEngine(call) for key, call in named.items()}
        time_in_turn(list(sides.values()), sounds, repeats, log)
    return _report(harness, sides, dict(zip(recordings, sounds, strict=True)), peer, threads)


def _report(
    harness: TranscriptionHarness, sides: Sides, sounds: dict[Path, Tensor], peer: str, threads: int
) -> BenchReport:
    whisper, long = harness.whisper, [harness.is_long(sound) for sound in sounds.values()]
    groups = {
        "more than 30 s": [index for index, is_long in enumerate(long) if is_long],
        "up to 30 s": [index for index, is_long in enumerate(long) if not is_long],
    }
    rows = [_beside(path) for path in sounds]
    return BenchReport(
        bench="engines",
        title=f"mmdec and {peer}: {whisper.directory.name if whisper.directory else 'given'}",
        hardware=measurement_conditions(device=CPU, dtype=torch.float32, batch=1, threads=threads)
        | {"kernels": torch.backends.cpu.get_cpu_capability()},
        exactness=tuple(
            Exactness(
                f"texts of {name} and of transformers",
                sum(side.texts[index] == text for index, text in sides[STOCK, 1].texts.items()),
                len(sounds),
            )
            for (name, count), side in sides.items()
            if count == 1 and name != STOCK
        ),
        comparisons=tuple(
            row for group, indices in groups.items() if indices for row in compare_engines(sides, group, indices)
        ),
        quantities=(*_words_wrong(sides, rows, harness), *_totals(sides, len(sounds))),
        not_measured={} if any(rows) else {"words wrong": "no transcripts lie next to the recordings (.txt)"},
        details={
            "recordings": [{"name": path.name, "seconds": len(sound) / SAMPLE_RATE} for path, sound in sounds.items()],
            "sides": [
                {
                    "engine": name,
                    "threads": count,
                    "texts": list(side.texts.values()),
                    "seconds": list(side.seconds.values()),
                    "cpu_seconds": list(side.cpu_seconds.values()),
                }
                for (name, count), side in sides.items()
            ],
        },
    )


def time_in_turn(sides: Sequence[TimedEngine], sounds: Sequence[Tensor], repeats: int, log: Log) -> None:
    """Call all engines in turn on every recording, (T,) of 16 kHz, after one untimed call of each.

    The engines in `sides` record texts and seconds.
    """
    stopwatch = Stopwatch()
    for side in sides:
        side.call(sounds[0][: 5 * SAMPLE_RATE])
    for repeat in range(repeats):
        for index, samples in enumerate(sounds):
            for side in sides:
                stopwatch.lap()
                # CPU time of all threads: the other engine has threads of its own
                start = stopwatch.process_cpu_time()
                side.texts[index] = side.call(samples)
                side.cpu_seconds[index].append(stopwatch.process_cpu_time() - start)
                side.seconds[index].append(stopwatch.lap())
        log(f"round {repeat + 1} of {repeats}")


def compare_engines(sides: Sides, group: str, indices: Sequence[int]) -> list[Comparison]:
    """Compare each pair of engines on some recordings, by wall clock and by CPU seconds.

    Args:
        sides: The engines.
        group: Name of this group of recordings.
        indices: Indices of these recordings.

    Returns:
        Rows of the report. The wall clock takes each engine with the number of threads that is faster, CPU
        seconds are with one thread.
    """
    rows: list[Comparison] = []
    for subject, baseline in PAIRS:
        a, b = (
            min((side for (of, _), side in sides.items() if of == name), key=lambda side: _total(side.seconds))
            for name in (subject, baseline)
        )
        for timed, ours, theirs in (
            (WALL_CLOCK, a.seconds, b.seconds),
            (CPU_TIME, sides[subject, 1].cpu_seconds, sides[baseline, 1].cpu_seconds),
        ):
            pairs = PairedTiming.from_pairs(
                [pair for index in indices for pair in zip(ours[index], theirs[index], strict=True)]
            )
            total, other = (_total({index: laps[index] for index in indices}) for laps in (ours, theirs))
            rows.append(
                Comparison(
                    subject,
                    baseline,
                    group,
                    "length",
                    timed,
                    times=other / total,
                    low=pairs.low,
                    high=pairs.high,
                    pairs=pairs.n,
                    inputs=len(indices),
                    subject_ms=1e3 * total / len(indices),
                    baseline_ms=1e3 * other / len(indices),
                )
            )
    return rows


def long_form(decode: DecodeWindow, features: Tensor, size: int, first: int) -> list[int]:
    """Decode a recording that is longer than a window.

    Args:
        decode: Decodes one window.
        features: (1, mels, T), T frames of 10 ms.
        size: Frames of a window.
        first: Id of the timestamp token 0.00; later timestamps have higher ids.

    Returns:
        The recording's tokens.

    References:
        The same rule as transformers' `_retrieve_segment`.
    """
    text_tokens, at = list[int](), 0
    while at < features.shape[-1]:
        part = features[..., at : at + size]
        tokens = decode(torch.nn.functional.pad(part, (0, size - part.shape[-1])))
        times = [token >= first for token in tokens]
        ends = [place for place in range(1, len(tokens)) if times[place - 1] and times[place]]
        # no segment ends in this window, or only at its end: keep all tokens, and go on after the window
        if not ends or times[-2:] == [False, True]:
            text_tokens, at = text_tokens + tokens, at + part.shape[-1]
        else:
            text_tokens += tokens[: ends[-1] + 1]
            at += max(2 * (tokens[ends[-1] - 1] - first), 1)  # a timestamp counts steps of 20 ms, which are two frames
    return text_tokens


def peer_calls(
    whisper: LoadedWhisper, converted: Path, harness: TranscriptionHarness, threads: Sequence[int]
) -> dict[tuple[str, int], Call]:
    """Convert the model to CTranslate2's format, and return functions that transcribe with it.

    Their keys are (engine's name, threads).

    Args:
        converted: A new folder for the converted weights.

    Raises:
        InputError: If CTranslate2 is not installed, or the model was not loaded from a folder.
    """
    try:  # imported by name, because type checkers cannot find a missing package
        engine: Any = import_module("ctranslate2")
        converters: Any = import_module("ctranslate2.converters")
    except ImportError as error:
        raise InputError(
            "`peer` must be installed, but ctranslate2 is not. Run `pip install 'mmdec[peer]'`."
        ) from error
    if whisper.directory is None:
        raise InputError("`model` must be a folder for a peer, but is a network in memory. Give its folder.")
    target = os.fspath(converted)
    converters.TransformersConverter(os.fspath(whisper.directory)).convert(target)
    return {
        (name, count): partial(
            _peer_said, engine, engine.models.Whisper(target, compute_type=kind, intra_threads=count), harness
        )
        for name, kind in ((PEER, "float32"), (PEER_INT8, "int8"))
        for count in threads
    }


def _peer_said(engine: Any, model: Any, harness: TranscriptionHarness, samples: Tensor) -> str:
    whisper, long = harness.whisper, harness.is_long(samples)
    settings: Any = whisper.model.generation_config
    with torch.inference_mode():
        features = harness.features(samples)

    def decode(window: Tensor) -> list[int]:
        states = engine.StorageView.from_array(window.numpy())
        prompt = [settings.decoder_start_token_id]
        if getattr(settings, "is_multilingual", False):
            named = f"<|{harness.language}|>" if harness.language else model.detect_language(states)[0][0][0]
            prompt += [settings.lang_to_id[named], settings.task_to_id["transcribe"]]
        if not long:
            prompt.append(settings.no_timestamps_token_id)
        max_length = whisper.model.config.max_target_positions
        return list(model.generate(states, [prompt], beam_size=1, max_length=max_length)[0].sequences_ids[0])

    if long:
        tokens = long_form(decode, features, whisper.extractor.nb_max_frames, first_timestamp_token(whisper.model))
    else:
        tokens = decode(features)
    return str(whisper.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _transcribe(harness: TranscriptionHarness, method: Method, threads: int, samples: Tensor) -> str:
    with with_threads(threads):
        return harness.measure([samples], method).texts[0]


def _beside(path: Path) -> str:
    """Read the transcript next to a recording; "" if there is none."""
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8").strip() if text.is_file() else ""


def _words_wrong(sides: Sides, references: Sequence[str], harness: TranscriptionHarness) -> list[Quantity]:
    """Compute each engine's word error rate, in percent, with one thread.

    Args:
        references: The transcript of each recording; "": it has none.
    """
    whisper = harness.whisper
    multilingual = getattr(whisper.model.generation_config, "is_multilingual", False)
    normalise, _ = normaliser(whisper.tokenizer, harness.language if multilingual else "en")
    expected = {index: normalise(text) for index, text in enumerate(references) if text}
    if not expected:
        return []
    errors = []
    for (name, count), side in sides.items():
        if count == 1:
            edits = [word_edits(text, normalise(side.texts[index])) for index, text in expected.items()]
            value, low, high = ratio([edit.errors for edit in edits], [edit.length for edit in edits])
            errors.append(Quantity(f"words wrong, {name}", 100 * value, "%", len(expected), 100 * low, 100 * high))
    return errors


def _totals(sides: Sides, recordings: int) -> list[Quantity]:
    return [
        Quantity(f"{name}, {count} threads, {clock}", _total(laps), "s", recordings)
        for (name, count), side in sides.items()
        for clock, laps in ((WALL_CLOCK, side.seconds), ("CPU time", side.cpu_seconds))
    ]


def _total(laps: Mapping[int, Sequence[float]]) -> float:
    """Sum the seconds of all recordings; a recording's seconds are the median of its repeats.

    Args:
        laps: Index of a recording -> the seconds of each repeat.
    """
    return sum(map(statistics.median, laps.values()))
