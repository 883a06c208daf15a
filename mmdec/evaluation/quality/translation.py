"""Scores a speech translator on a split: text, phones, numbers, ASR-BLEU, latency.

`mmdec.translate_speech` is scored and timed. `tables.table(report)` prints the report. The corpus has the layout of
CVSS and Common Voice: pass `common_voice` and `cvss` if they are not `corpus`/cv/fr and `corpus`/cvss_c. Tables of
several references and of alignments are used if the corpus has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from mmdec.checks.arguments import check_threads
from mmdec.runtime import Log, no_log
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.cvss import SpeechPair, corpus_lexicon, read_pairs
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.training.metrics import text as metrics
from mmdec.training.metrics.recogniser import SAMPLE_RATE
from mmdec.types import InputError

if TYPE_CHECKING:
    from mmdec.pipelines.translation.translator import SpeechTranslator
from collections.abc import Mapping

from mmdec.training.corpora.text_files import read_table
from mmdec.training.metrics.recogniser import Recogniser
from mmdec.training.metrics.text import Lexicon

COMPARED = ("lookahead", "autoregressive", "verified")  # the translator's STRATEGIES that are scored by default
NOISES = 32  # utterances replaced by white noise
NOISE_LEVEL = 0.1  # of full scale


class Spoken(Protocol):
    """A translation of one recording: mmdec.Translation, or an object with these properties."""

    @property
    def text(self) -> str: ...
    @property
    def audio(self) -> np.ndarray: ...  # (T,)
    @property
    def sample_rate(self) -> int: ...
    @property
    def units(self) -> list[str]: ...
    @property
    def timings(self) -> dict[str, float]: ...  # seconds of each stage


Translator = Callable[[Path, str], Spoken]  # (recording, strategy)


@dataclass(frozen=True)
class Output:
    """One strategy's translation of one utterance, which is empty if the recording was refused."""

    text: str
    units: tuple[str, ...]
    audio: np.ndarray  # (T,) 16 kHz
    timings: dict[str, float]
    seconds: float  # wall clock, from the file to samples
    error: str = ""


@final
@dataclass(frozen=True)
class SpeechScoring:
    """How `evaluate_speech`, which says what each option means, scores a model."""

    common_voice: str | os.PathLike[str] | None = None
    cvss: str | os.PathLike[str] | None = None
    allow_absolute_paths: bool = False
    limit: int | None = None
    asr: bool = True
    device: str | None = None
    threads: int = 2
    translator: Translator | None = None
    log: Log = no_log


def evaluate_speech(
    split: str = "test",
    corpus: str | os.PathLike[str] = "data/corpus",
    model: str | os.PathLike[str] | None = None,
    strategies: Sequence[str] = COMPARED,
    **options: Any,
) -> dict[str, Any]:
    """Score a speech translator; a JSON-ready report.

    allow_absolute_paths: see `Admission`. limit: use this many utterances, evenly spaced. asr: compute ASR-BLEU, too.
    translator: replaces the model. log: gets lines of progress. The strategies run in turn on each recording, after one
    warm-up each. A recording that is refused counts as an empty translation and is named. Raises InputError.
    """
    how = SpeechScoring(**options)
    if how.limit is not None and how.limit < 1:
        raise InputError(f"`limit` must be at least 1, but is {how.limit}. Leave it out for the whole split.")
    check_threads(how.threads)
    if not strategies:
        raise InputError("`strategies` must name at least one strategy, but is empty. Use lookahead.")
    root = Path(corpus)
    target = Path(how.cvss) if how.cvss is not None else root / "cvss_c"
    source = Path(how.common_voice) if how.common_voice is not None else root / "cv" / "fr"
    usable, skipped = read_pairs(source, target, split, scoring=True, admission=Admission(how.allow_absolute_paths))
    rows = evenly_spaced(usable, how.limit)
    lexicon = corpus_lexicon(root)
    recogniser = build_recogniser(target, lexicon, how.log) if how.asr else None
    if how.translator is not None:
        name, run, machine = "injected", how.translator, _machine(None, how.threads)
    else:
        name, run, machine = _translator(model, strategies, how.device, how.threads)
    outputs = _translate_all(run, rows, strategies, how.log)
    seconds = [_seconds(row.clip) for row in rows]
    report: dict[str, Any] = {
        "model": name,
        "split": split,
        "n": len(rows),
        "skipped_rows": skipped.names,
        "source_seconds": sum(seconds),
        "hardware": machine,
        "strategies": {
            strategy: {**_text_scores(rows, outputs[strategy], lexicon), **_speed(outputs[strategy], seconds)}
            for strategy in strategies
        },
    }
    if recogniser is not None:
        add_asr_bleu(report, recogniser, rows, outputs, how.log)
    return report


def _text_scores(
    rows: Sequence[SpeechPair], outputs: Sequence[Output], lexicon: metrics.Lexicon | None
) -> dict[str, Any]:
    texts, references = [output.text for output in outputs], [row.references for row in rows]
    right = metrics.exact(texts, references)
    several = [len({metrics.normalise(text) for text in accepted}) > 1 for accepted in references]
    bleu, chrf = metrics.bleu(texts, references), metrics.chrf(texts, references)
    scores: dict[str, Any] = {
        "exact": metrics.Rate(sum(right), len(right)).summary(),
        "exact_one_rendering": _share(right, [not flag for flag in several]),
        "exact_several_renderings": _share(right, several),
        "bleu": {"value": bleu.value, "signature": bleu.signature},
        "chrf": {"value": chrf.value, "signature": chrf.signature},
        "number_accuracy": {kind: rate.summary() for kind, rate in metrics.number_accuracy(texts, references).items()},
        "phone_error_rate": None,
        "phone_error_rate_nearest": None,
        "refused": {row.clip.name: output.error for row, output in zip(rows, outputs, strict=True) if output.error},
    }
    pairs = [(output.units, row) for output, row in zip(outputs, rows, strict=True) if row.units]
    if pairs:
        scores["phone_error_rate"] = {
            "value": metrics.phone_error_rate([units for units, _ in pairs], [row.units for _, row in pairs]),
            "against": "the phones of the reference recording, pauses included",
            "n": len(pairs),
        }
    if pairs and lexicon is not None:
        scores["phone_error_rate_nearest"] = _nearest(pairs, lexicon)
    return scores


def _nearest(pairs: Sequence[tuple[Sequence[str], SpeechPair]], lexicon: metrics.Lexicon) -> dict[str, Any]:
    """Phone errors against the recording or, if fewer, against the nearest reference as the lexicon pronounces it."""
    errors = sum(metrics.nearest_phone_errors(units, row.units, row.references, lexicon) for units, row in pairs)
    return {
        "value": errors / sum(metrics.count_phones(row.units) for _, row in pairs),
        "against": "the nearest reference, pronounced as in the lexicon, pauses left out",
        "n": len(pairs),
    }


def _share(right: Sequence[bool], chosen: Sequence[bool]) -> dict[str, Any]:
    kept = [hit for hit, flag in zip(right, chosen, strict=True) if flag]
    return metrics.Rate(sum(kept), len(kept)).summary()


def _speed(outputs: Sequence[Output], seconds: Sequence[float]) -> dict[str, Any]:
    done = [(output, length) for output, length in zip(outputs, seconds, strict=True) if not output.error]
    if not done:
        return {"latency": {}, "real_time_factor": None}
    lengths = [length for _, length in done]
    stages = [*done[0][0].timings, "wav to wav"]
    taken = [{**output.timings, "wav to wav": output.seconds} for output, _ in done]
    return {
        "latency": {
            stage: {"median": median(values), "p90": metrics.percentile(values, 0.9)}
            for stage in stages
            for values in ([row.get(stage, 0.0) for row in taken],)
        },
        "real_time_factor": metrics.real_time_factor([output.seconds for output, _ in done], lengths),
    }


def _translate_all(
    run: Translator, rows: Sequence[SpeechPair], strategies: Sequence[str], log: Log
) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {strategy: [] for strategy in strategies}
    for strategy in strategies:
        _translate(run, rows[0].clip, strategy)  # the first call includes lazy set-up
    for count, row in enumerate(rows, 1):
        for strategy in strategies:
            outputs[strategy].append(_translate(run, row.clip, strategy))
        if count % 50 == 0 or count == len(rows):
            log(f"translated {count} of {len(rows)}")
    return outputs


def _translate(run: Translator, clip: Path, strategy: str) -> Output:
    from mmdec.decode.watch import Stopwatch  # imports torch

    stopwatch = Stopwatch()  # results come back on the CPU: no device to wait for
    try:
        spoken = run(clip, strategy)
    except InputError as error:
        return Output("", (), np.zeros(0, np.float32), {}, stopwatch.lap(), str(error))
    seconds = stopwatch.lap()
    samples = spoken.audio
    if spoken.sample_rate != SAMPLE_RATE:
        samples = _resampled(samples, spoken.sample_rate)
    return Output(spoken.text, tuple(spoken.units), samples, dict(spoken.timings), seconds)


def _translator(
    model: str | os.PathLike[str] | None, strategies: Sequence[str], device: str | None, threads: int
) -> tuple[str, Translator, dict[str, Any]]:
    """The model's name, the public call with it, and provenance."""
    from mmdec.hub import DEFAULT_MODEL
    from mmdec.pipelines.translation.load import load
    from mmdec.pipelines.translation.translate import translate_speech
    from mmdec.pipelines.translation.translator import check_strategy

    for strategy in strategies:
        check_strategy(strategy)
    loaded = load(DEFAULT_MODEL if model is None else model, device)

    def run(clip: Path, strategy: str) -> Spoken:
        return translate_speech(clip, model=loaded, strategy=strategy, threads=threads)

    return loaded.name, run, _machine(loaded, threads)


def _machine(translator: SpeechTranslator | None, threads: int) -> dict[str, Any]:
    """Provenance; without a model, device and dtype are None."""
    from mmdec.provenance import hardware
    from mmdec.runtime import dtype_of

    if translator is None:
        return hardware(device=None, dtype=None, batch=1, threads=threads)
    return hardware(device=translator.device, dtype=dtype_of(translator.model), batch=1, threads=threads)


def _resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    import torch

    from mmdec.audio import resample

    return resample(torch.from_numpy(np.asarray(samples, np.float32)), rate).numpy()


def _seconds(path: Path) -> float:
    """Length of a recording; 0 if it cannot be read, which the translation reports."""
    try:
        return len(read_samples(path)) / SAMPLE_RATE
    except InputError:
        return 0.0


class HasAudio(Protocol):
    """A translation with samples (T,) of 16 kHz."""

    @property
    def audio(self) -> np.ndarray: ...


def build_recogniser(cvss: Path, lexicon: Lexicon | None, log: Log) -> Recogniser:
    """A recogniser of the words in the training text. Raises InputError if there is no training text."""
    training = cvss / "train.tsv"
    if not training.is_file():
        raise InputError(
            f"`asr` must have the training text, but '{training}' does not exist. Pass asr=False to do without."
        )
    log("preparing the recogniser")
    return Recogniser((line[1] for _, line in read_table(training) if len(line) > 1), lexicon or {})


def add_asr_bleu(
    report: dict[str, Any],
    recogniser: Recogniser,
    rows: Sequence[SpeechPair],
    outputs: Mapping[str, Sequence[HasAudio]],
    log: Log,
) -> None:
    """ASR-BLEU of each strategy, of the reference recordings, of shuffled speech and of noise."""
    references = [row.references for row in rows]
    log("recognising the reference recordings")
    transcripts = [recogniser.transcribe(read_samples(row.recording)) for row in rows]
    best = metrics.asr_bleu(transcripts, references)
    report["recordings"] = {
        "asr_bleu": best.value,
        "signature": best.signature,
        "words_unknown_to_judge": list(recogniser.unknown),
        "judge_word_error_rate": metrics.word_error_rate(transcripts, [row.translation for row in rows]),
        "asr_bleu_shuffled": _shuffled_score(transcripts, references),
    }
    report["asr_bleu_noise"] = _noise_score(recogniser, rows)
    for strategy, scores in report["strategies"].items():
        log(f"recognising the translations by {strategy}")
        transcripts = [recogniser.transcribe(output.audio) for output in outputs[strategy]]
        scores["asr_bleu"] = metrics.asr_bleu(transcripts, references).value
        scores["asr_bleu_ratio"] = scores["asr_bleu"] / best.value if best.value else None
        scores["asr_bleu_shuffled"] = _shuffled_score(transcripts, references)


def _shuffled_score(transcripts: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
    """ASR-BLEU of each transcript against another sentence's references."""
    return metrics.asr_bleu(shuffled(transcripts), references).value if len(transcripts) > 1 else None


def shuffled(items: Sequence[str]) -> list[str]:
    """A fixed order in which no item keeps its index. Items move by half the list: neighbours may be equal."""
    half = max(1, len(items) // 2)
    return [*items[half:], *items[:half]]


def _noise_score(recogniser: Recogniser, rows: Sequence[SpeechPair]) -> float:
    """ASR-BLEU of white noise, as long as the reference recordings."""
    rows = rows[:NOISES]
    generator = np.random.default_rng(0)
    noises = [NOISE_LEVEL * generator.standard_normal(len(read_samples(row.recording))) for row in rows]
    return metrics.asr_bleu([recogniser.transcribe(noise) for noise in noises], [row.references for row in rows]).value


def read_samples(path: Path) -> np.ndarray:
    """A recording's samples (T,) of 16 kHz."""
    from mmdec.audio import load_audio

    return load_audio(path).numpy()
