"""Times speech translation. Outputs are compared first, then the two methods of a ratio run in turn, A B A B.

Linguistic decoding turns the encoder's states into English units: phones or word pieces. `bench_speech` times the
shipped model: `mmdec.translate_speech` from file to samples, and in it the linguistic decoding of each strategy against
autoregressive decoding, the baseline. It also times the two decoders alone by source length. To time the decoders
alone, it does not call `translate_speech`, because the baseline must decode a fixed number of units. Reports give the
median of the paired ratios, their spread and the hardware. With a judge (a speech model that translates,
`mmdec/evaluation/judge.py`), calls are also timed against its translation.

Checked before any timing: verified units equal the baseline's, and the baseline's cached decoding gives the units
of its full pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mmdec.bench.pairing import PairedTiming, prepare_device, quartiles, time_pairs
from mmdec.bench.report import BenchReport, Comparison, Exactness, Quantity
from mmdec.core.timing import Stopwatch
from mmdec.daspeech.ar_decoder import ArDecoder
from mmdec.daspeech.model import EncodedSpeech
from mmdec.daspeech.options import DEFAULT_TRANSLATOR
from mmdec.daspeech.translate import Translation, load_translator, translate_speech
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.daspeech.units import BOS, EOS
from mmdec.errors import InputError, MmdecError
from mmdec.evaluation.harness import Log, describe_measurement, no_log
from mmdec.evaluation.judge import Judge
from mmdec.io import audio
from mmdec.kernels.dag_decode import LatticePath

UNITS_A_SECOND = 10.0  # assumed number of English phones for a second of French, as in the phrasebook corpus
PIECES_A_SECOND = 4.4  # English pieces for a second of French, as in everyday sentences of neural TTS voices
TIMED_STRATEGIES = ("lookahead", "reranked", "verified")  # strategies that are timed on whole recordings
WHOLE_CALL_SECONDS = (3.0, 10.0)  # seconds of speech in the two recordings on which whole calls are timed
GATE_UNITS = 40  # the most units that `gate` decodes
# maximum difference of logits: cached and full pass round differently, so two units with near-equal logits may change
# order
GATE_SLACK = 1e-3


def bench_speech(
    recordings: Sequence[Path],
    model: str = DEFAULT_TRANSLATOR,
    seconds: Sequence[float] = (1.5, 3, 6, 10, 20),
    repeats: int = 15,
    device: str = "cpu",
    threads: int = 2,
    judge: Judge | None = None,
    log: Log = no_log,
) -> BenchReport:
    """Time the shipped model: linguistic decoding by source length, and `mmdec.translate_speech` on `recordings`.

    By length, the baseline decodes exactly `UNITS_A_SECOND` phones, or `PIECES_A_SECOND` pieces, for each second; the
    graph's size follows from the source frames or pieces. "From file to samples" includes reading, features, all
    networks and words. Strategies are compared by the seconds of linguistic decoding that the call returns. Whole calls
    on speech of `WHOLE_CALL_SECONDS` seconds are timed against the baseline and the judge.

    Args:
        recordings: Files of speech. For a source length, they are joined end to end and cut.
        seconds: The source lengths.
        repeats: Timed pairs of calls.
        judge: A model to compare whole calls with; it returns only text.

    Raises:
        InputError: If an argument is not valid.
        MmdecError: If an output is wrong: then nothing is timed.
    """
    if not recordings:
        raise InputError("`recordings` must name at least one sound file, but is empty. Try data/samples/*.wav.")
    if judge is not None:
        judge.check_french()
    prepare_device(device, threads)
    translator = load_translator(model, device)
    if translator.model.decoder is None:
        raise InputError(f"`model` must have a graph to compare, but '{model}' has none. Name one that was trained.")
    log(f"decoders by length of the source: {', '.join(f'{length:g}' for length in seconds)} s")
    with torch.inference_mode():
        rows = _by_length(translator, recordings, seconds, repeats)
    log(f"{len(recordings)} recordings: {', '.join(TIMED_STRATEGIES)} against the baseline, then file to samples")
    against = {name: _against_baseline(recordings, translator, name, repeats) for name in TIMED_STRATEGIES}
    calls = [call for path in recordings for call in _calls(path, translator)]
    rates = [1e3 * rate for rate, _ in calls]
    whole_calls = _whole_calls(translator, recordings, repeats, judge, log)
    count = len(recordings)
    stages = {stage: 1e3 * statistics.median(spent[stage] for _, spent in calls) for stage in calls[0][1]}
    return BenchReport(
        bench="speech",
        title="Speech translation: the graph against the autoregressive baseline",
        hardware=describe_measurement(translator.model),
        exactness=(Exactness("units of verified and of autoregressive decoding", count, count),),
        comparisons=(*rows, *(row for row, _ in against.values()), *whole_calls.rows),
        quantities=(
            Quantity("verified: units in each pass of the baseline", against["verified"][1], "units", count),
            Quantity(
                "file to samples, for a second of source",
                statistics.median(rates),
                "ms",
                len(rates),
                high=max(rates),
            ),
            *whole_calls.rates,
        ),
        stages={translator.decoding.strategy: stages},
        details={"texts of whole calls": whole_calls.texts},
    )


def _by_length(
    translator: SpeechTranslator, recordings: Sequence[Path], seconds: Sequence[float], repeats: int
) -> list[Comparison]:
    """Time the graph decoder against autoregressive decoding, after the encoder, for source lengths in seconds.

    Args:
        recordings: Joined end to end and cut to each length.

    Returns:
        A row of the report for each length.
    """
    network, device = translator.model, translator.device
    sounds = [audio.load_audio(path) for path in recordings]
    first = _source(translator, sounds[0])
    check_baseline(translator.model.autoregressive, first.states, first.lengths)
    rows = []
    for length in seconds:
        source = _source(translator, _join_recordings(sounds, length))
        count = round(length * (UNITS_A_SECOND if source.transcripts is None else PIECES_A_SECOND))

        def graph(source: EncodedSpeech = source) -> LatticePath:
            return network.lattice(source.states, source.lengths, source.sizes).path("lookahead")

        def baseline(source: EncodedSpeech = source, count: int = count) -> list[list[int]]:
            return translator.model.autoregressive.generate(source.states, source.lengths, count, min_length=count)

        rows.append(
            time_pairs(graph, baseline, repeats, device).row(
                "lookahead",
                "autoregressive",
                f"{length:g} s, fixed lengths",
                "length",
                "after encoder",
                size=float(length),
                unit="s of source",
            )
        )
    return rows


def _source(translator: SpeechTranslator, samples: Tensor) -> EncodedSpeech:
    """Encode samples (T,) of 16 kHz into the decoders' input.

    Raises:
        InputError: If the model recognises nothing.
    """
    source = translator.layout.source(translator.layout.features([samples]))
    if not int(source.lengths[0]):
        raise InputError("`recordings` must hold speech that the model recognises, but it finds none. Name others.")
    return source


def _calls(path: Path, translator: SpeechTranslator) -> list[tuple[float, Mapping[str, float]]]:
    """Time three calls after a warm-up.

    Returns:
        For each call: its seconds from file to samples divided by the source's seconds, and the seconds of each stage.
    """
    translate_speech(path, model=translator)
    calls = []
    for _ in range(3):
        stopwatch = Stopwatch(translator.device)
        translation = translate_speech(path, model=translator)
        calls.append((stopwatch.lap() / translation.source_seconds, translation.timings))
    return calls


@dataclass
class WholeCalls:
    """Results of timing whole calls of `translate_speech`."""

    rows: list[Comparison] = field(default_factory=list)
    rates: list[Quantity] = field(default_factory=list)  # milliseconds of `translate_speech` for a second of source
    texts: dict[str, str] = field(default_factory=dict)  # "method, seconds of speech" -> English text


def _whole_calls(
    translator: SpeechTranslator, recordings: Sequence[Path], repeats: int, judge: Judge | None, log: Log
) -> WholeCalls:
    """Time whole calls, from a file of speech to samples, against autoregressive decoding and the judge.

    The judge returns text.

    Args:
        recordings: Joined end to end and cut.
        repeats: Timed pairs of calls.
        judge: The recogniser to compare with; None: no comparison.
    """
    sides: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "autoregressive": ("file to samples", partial(translate_speech, model=translator, strategy="autoregressive"))
    }
    if judge is not None:
        sides[judge.name] = ("file to samples, its to text", judge.translate)
    subject, whole_calls = translator.decoding.strategy, WholeCalls()
    sounds, rows = [audio.load_audio(path) for path in recordings], {name: list[Comparison]() for name in sides}
    with TemporaryDirectory(prefix="mmdec-bench-") as folder:
        for seconds in WHOLE_CALL_SECONDS:
            log(f"whole calls on {seconds:g} s of speech against {' and '.join(sides)}")
            path = audio.save_audio(Path(folder) / f"{seconds:g}.wav", _join_recordings(sounds, seconds).numpy())
            calls: list[float] = []  # seconds of each call of `ours`

            def ours(path: Path = path, calls: list[float] = calls) -> Translation:
                stopwatch = Stopwatch(translator.device)
                translation = translate_speech(path, model=translator)
                calls.append(stopwatch.lap())
                return translation

            whole_calls.texts[f"{subject}, {seconds:g} s"] = ours().text
            for name, (timed, run) in sides.items():
                whole_calls.texts[f"{name}, {seconds:g} s"] = run(path).text
                row = time_pairs(ours, partial(run, path), repeats, translator.device).row(
                    subject, name, f"{seconds:g} s, whole calls", "length", timed, size=seconds, unit="s of source"
                )
                rows[name].append(row)
            rates = [1e3 * call / seconds for call in calls[1:]]
            low, middle, high = quartiles(rates)
            whole_calls.rates.append(
                Quantity(f"the same, {seconds:g} s of speech", middle, "ms", len(rates), low, high)
            )
    whole_calls.rows = [row for group in rows.values() for row in group]
    return whole_calls


def _join_recordings(sounds: Sequence[Tensor], seconds: float) -> Tensor:
    """Join recordings (T,) end to end, repeat them if they are too short, and cut to `seconds`."""
    count = round(seconds * audio.SAMPLE_RATE)
    joined = torch.cat(list(sounds))
    return joined.repeat(-(-count // len(joined)))[:count]


def _against_baseline(
    recordings: Sequence[Path], translator: SpeechTranslator, strategy: str, repeats: int
) -> tuple[Comparison, float]:
    """Time a strategy against autoregressive decoding on whole recordings. Both decode up to </s>.

    Returns:
        A row with the median, the minimum and the maximum ratio of the recordings; and the number of units that
        autoregressive decoding gives for each pass of the strategy.

    Raises:
        MmdecError: If verified units differ from the baseline's.
    """
    pairs, units, passes = list[PairedTiming](), 0, 0
    for path in recordings:
        drafted = partial(translate_speech, path, model=translator, strategy=strategy)
        baseline = partial(translate_speech, path, model=translator, strategy="autoregressive")
        first, plain = drafted(), baseline()
        if strategy == "verified" and first.units != plain.units:
            raise MmdecError("Verified units are not the baseline's: no timing is reported. Report this as a bug.")
        pairs.append(
            time_pairs(
                drafted, baseline, repeats, translator.device, lambda translation: translation.timings["linguistic"]
            )
        )
        units += plain.passes  # number of units: the baseline takes one pass for each, </s> included
        passes += first.passes
    ratios = [pair.ratio for pair in pairs]
    together = PairedTiming(
        a_ms=statistics.median(pair.a_ms for pair in pairs),
        b_ms=statistics.median(pair.b_ms for pair in pairs),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        n=sum(pair.n for pair in pairs),
    )
    row = together.row(strategy, "autoregressive", "recordings", "all", "linguistic", spread="range")
    return replace(row, inputs=len(pairs)), units / passes


def check_baseline(decoder: ArDecoder, states: Tensor, sizes: Tensor) -> None:
    """Check that the baseline is right before it is timed: its cached decoding must agree with its full pass.

    Args:
        states: (1, S, d), S encoder states of width d.
        sizes: (1,), number of states.

    Raises:
        MmdecError: If it is wrong.
    """
    units = decoder.generate(states, sizes, GATE_UNITS)[0]
    tokens = torch.tensor([[BOS, *units]], device=states.device)
    logits = decoder(tokens, states, sizes)[0]  # (M + 1, V) logits of M units and the end
    ended = [EOS] if len(units) < GATE_UNITS else []
    decoded = torch.tensor([*units, *ended], device=states.device)
    best = logits[: len(decoded)].max(-1).values
    if not bool((logits[: len(decoded)].gather(1, decoded[:, None])[:, 0] >= best - GATE_SLACK).all()):
        raise MmdecError(
            "The cached decoder disagrees with its full pass: no timing is reported. Report this as a bug."
        )
