"""mmdec against CTranslate2, faster-whisper's engine, with the same weights: transcripts compared, then timed in turn.

The model is converted by CTranslate2's own converter; features are made by the same extractor. Each side runs with one
and with two threads, CTranslate2 in float32 and int8, mmdec in float32, and in bfloat16 where the processor is fast in
it. Calls go A B C D A B C D, from samples in memory to text. The ratio is that of each side's best setting: the one
with the least sum of medians over recordings. bfloat16 writes texts of its own, which are those of its plain decoding.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.devices import fast_bfloat16
from mmdec.decode.watch import Stopwatch
from mmdec.evaluation.bench.report import Quantity
from mmdec.evaluation.quality.harness import Method
from mmdec.evaluation.quality.harness_transcription import TranscriptionHarness
from mmdec.hub.whisper import LoadedWhisper
from mmdec.pipelines.threads import with_threads
from mmdec.runtime import CPU, Log, no_log
from mmdec.types import Drafter, InputError

PEERS = ("ctranslate2",)
THREADS = (1, 2)
TYPES = ("float32", "int8")
Call = Callable[[Tensor], str]


def against_peer(
    whisper: LoadedWhisper,
    drafter: Drafter,
    recordings: Sequence[Tensor],
    peer: str,
    *,
    heads: str | os.PathLike[str] | None = None,
    repeats: int,
    language: str | None = "en",
    log: Log = no_log,
) -> dict[str, Any]:
    """Seconds and transcripts of both sides on recordings (T,) of one window each; a JSON-ready report.

    heads: directory of the drafter's heads, for the copy in bfloat16; None: the model's own. Raises InputError where
    the peer is unknown or not installed, or no recording fits one window.
    """
    if peer not in PEERS:
        raise InputError(f"`peer` must be one of {', '.join(PEERS)}, but is {peer!r}. Leave it out for none.")
    directory = whisper.directory
    if directory is None or whisper.model.device.type != "cpu":
        raise InputError("`peer` must run a model of a folder on the CPU, but this one is elsewhere. Give its folder.")
    harness = TranscriptionHarness(whisper, language)
    fitting = [samples for samples in recordings if not harness.is_long(samples)]
    if not fitting:
        raise InputError("`recordings` must hold one of at most 30 s for a peer, but holds none. Give a shorter one.")
    half = _in_bfloat16(whisper, language) if fast_bfloat16(CPU) else None
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            **_mmdec_calls("float32", harness, drafter),
            **(_mmdec_calls("bfloat16", half, half.whisper.heads(heads)) if half else {}),
            **_peer_calls(whisper, directory, Path(folder) / "model", language),
        }
        seconds, texts = _in_turn(sides, fitting, repeats, log)
    reference = texts[f"mmdec float32, {THREADS[0]} threads"]
    rows = {
        name: {
            "seconds": sum(statistics.median(laps) for laps in timings),
            "equal_transcripts": sum(a == b for a, b in zip(texts[name], reference, strict=True)),
        }
        for name, timings in seconds.items()
    }
    mmdec_best = _best(rows, "mmdec float32")
    best = {kind: _best(rows, f"ctranslate2 {kind}") for kind in TYPES}
    return {
        "peer": peer,
        "recordings": len(fitting),
        "sides": rows,
        "best": {
            kind: {"a": mmdec_best, "b": name, "ratio": rows[name]["seconds"] / rows[mmdec_best]["seconds"]}
            for kind, name in best.items()
        },
        "bfloat16": "not measured: this processor is slow in it"
        if half is None
        else _plain_equal(half, fitting, texts),
    }


def peer_quantities(found: dict[str, Any]) -> list[Quantity]:
    """The peer's seconds over mmdec's, each at its best setting, and the seconds of each."""
    count = found["recordings"]
    times = [Quantity(f"{row['b']} over {row['a']}", row["ratio"], "times", count) for row in found["best"].values()]
    return times + [
        Quantity(f"all recordings, {name}", row["seconds"], "s", count) for name, row in found["sides"].items()
    ]


def _in_turn(
    sides: dict[str, Call], recordings: Sequence[Tensor], repeats: int, log: Log
) -> tuple[dict[str, list[list[float]]], dict[str, list[str]]]:
    """Of each side and recording: the seconds of its repeats, and its text. The first round warms up."""
    seconds = {name: [[] for _ in recordings] for name in sides}
    texts = {name: [""] * len(recordings) for name in sides}
    stopwatch = Stopwatch()
    for number in range(repeats + 1):
        for index, samples in enumerate(recordings):
            for name, call in sides.items():
                stopwatch.lap()
                texts[name][index] = call(samples)
                lap = stopwatch.lap()
                if number:
                    seconds[name][index].append(lap)
        log(f"peer: round {number} of {repeats}")
    return seconds, texts


def _mmdec_calls(dtype: str, harness: TranscriptionHarness, drafter: Drafter) -> dict[str, Call]:
    method = Method.drafted("medusa", drafter)

    def call(threads: int, samples: Tensor) -> str:
        with with_threads(threads):
            return harness.measure([samples], method).texts[0]

    return {f"mmdec {dtype}, {threads} threads": partial(call, threads) for threads in THREADS}


def _in_bfloat16(whisper: LoadedWhisper, language: str | None) -> TranscriptionHarness:
    model: Any = copy.deepcopy(whisper.model)
    model = model.to(torch.bfloat16)
    return TranscriptionHarness(LoadedWhisper(model, whisper.processor, whisper.directory), language)


def _plain_equal(half: TranscriptionHarness, recordings: Sequence[Tensor], texts: dict[str, list[str]]) -> str:
    """How many of its texts are those of plain decoding in bfloat16."""
    plain = [half.measure([samples], Method.greedy()).texts[0] for samples in recordings]
    same = sum(a == b for a, b in zip(plain, texts[f"mmdec bfloat16, {THREADS[0]} threads"], strict=True))
    return f"{same} of {len(plain)} transcripts are those of greedy decoding in bfloat16"


def _peer_calls(whisper: LoadedWhisper, directory: Path, converted: Path, language: str | None) -> dict[str, Call]:
    """CTranslate2's models, one for each type and number of threads. directory: whisper's; converted: a new folder."""
    try:  # by name: where the package is not installed, its types cannot be read
        engine: Any = import_module("ctranslate2")
        converters: Any = import_module("ctranslate2.converters")
    except ImportError as error:
        raise InputError(
            "`peer` must be installed, but ctranslate2 is not. Install it: pip install 'mmdec[peer]'."
        ) from error
    settings: Any = whisper.model.generation_config
    prompt = [settings.decoder_start_token_id]
    if getattr(settings, "is_multilingual", False):
        prompt += [settings.lang_to_id[f"<|{language or 'en'}|>"], settings.task_to_id["transcribe"]]
    prompt.append(settings.no_timestamps_token_id)
    target = os.fspath(converted)
    converters.TransformersConverter(os.fspath(directory)).convert(target)
    return {
        f"ctranslate2 {kind}, {threads} threads": _peer_call(
            whisper, engine.models.Whisper(target, compute_type=kind, intra_threads=threads), prompt, engine
        )
        for kind in TYPES
        for threads in THREADS
    }


def _peer_call(whisper: LoadedWhisper, model: Any, prompt: list[int], engine: Any) -> Call:
    def call(samples: Tensor) -> str:
        with torch.inference_mode():
            read = whisper.extractor(samples.numpy(), sampling_rate=SAMPLE_RATE, return_tensors="np")
        features = engine.StorageView.from_array(read.input_features)
        outputs = model.generate(features, [prompt], beam_size=1, max_length=whisper.model.config.max_target_positions)
        return whisper.tokenizer.decode(outputs[0].sequences_ids[0], skip_special_tokens=True).strip()

    return call


def _best(rows: dict[str, dict[str, Any]], prefix: str) -> str:
    return min((name for name in rows if name.startswith(prefix)), key=lambda name: rows[name]["seconds"])
