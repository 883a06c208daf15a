"""Scores speech translators on a split: text, phones, numbers, ASR-BLEU, latency.

`ComparedSystems` holds what is scored: our strategies through `mmdec.translate_speech`, and other systems such as a
judge's translation (`judge.py`). All systems run in turn on each recording of a `SpeechCorpus`. The corpus is read
from CVSS with Common Voice, or from a manifest of recordings and folders of sentence pairs, which have the
translations. `mmdec eval speech` prints the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from mmdec.checks.arguments import check_threads
from mmdec.checks.sampling import evenly_spaced
from mmdec.core.timing import Stopwatch
from mmdec.daspeech.options import DEFAULT_TRANSLATOR
from mmdec.daspeech.translate import load_translator, translate_speech
from mmdec.errors import InputError
from mmdec.evaluation.harness import Log, describe_measurement, no_log
from mmdec.io.audio import SAMPLE_RATE, load_audio, resample
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.cvss import corpus_lexicon, read_pairs
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.corpora.text_files import check_limit, references_of
from mmdec.training.metrics import text as metrics

# the strategies that are scored by default
DEFAULT_STRATEGIES = ("beam", "lookahead", "reranked", "autoregressive", "verified")
NOISE_COUNT = 32  # number of white noises that are scored as a lower bound
NOISE_LEVEL = 0.1  # standard deviation of the noises' samples; full scale is 1
# how texts are normalised before ASR-BLEU is computed
NORMALISATION = "lower case, no punctuation, numbers in words, on both sides"


class TranslationLike(Protocol):
    """A translation of one recording: an mmdec.Translation, or an object with the same properties."""

    @property
    def text(self) -> str: ...
    @property
    def audio(self) -> np.ndarray | None: ...  # (T,); None: the system only writes text
    @property
    def sample_rate(self) -> int: ...
    @property
    def units(self) -> list[str]: ...
    @property
    def timings(self) -> dict[str, float]: ...  # stage -> seconds


class EnglishRecogniser(Protocol):
    """Transcribes English speech, such as a `Judge`."""

    @property
    def name(self) -> str: ...
    def transcribe(self, samples: np.ndarray) -> str: ...  # (T,) of 16 kHz


# a speech translator: a function from a French recording to its translation
TranslationSystem = Callable[[Path], TranslationLike]


@dataclass(frozen=True)
class ComparedSystems:
    """The systems to compare, by name. Statistical tests compare each system with the first."""

    name: str  # the model's name
    runs: Mapping[str, TranslationSystem]
    machine: Mapping[str, Any]  # description of the hardware and of software versions, for the report

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError("`strategies` must name at least one strategy, but is empty. Use lookahead.")

    def with_others(self, others: Mapping[str, TranslationSystem]) -> ComparedSystems:
        """Return a copy with further systems at the end."""
        return ComparedSystems(self.name, {**self.runs, **others}, self.machine)


@dataclass(frozen=True)
class SourceClip:
    """One recording to translate."""

    clip: Path
    references: tuple[str, ...]  # every accepted translation
    units: tuple[str, ...] = ()  # phones of the recorded translation
    recording: Path | None = None  # the recorded translation
    translation: str = ""  # the text of the recorded translation


@dataclass(frozen=True)
class SpeechCorpus:
    """The recordings to translate."""

    split: str
    rows: tuple[SourceClip, ...]
    skipped: Mapping[str, Sequence[str]] = field(default_factory=lambda: {})  # reason -> rows that were left out
    lexicon: metrics.Lexicon | None = None  # the English words' pronunciations; None: unknown


def cvss_corpus(
    split: str = "test",
    corpus: str | os.PathLike[str] = "data/corpus",
    *,
    common_voice: str | os.PathLike[str] | None = None,
    cvss: str | os.PathLike[str] | None = None,
    allow_absolute_paths: bool = False,
    limit: int | None = None,
) -> SpeechCorpus:
    """Read a split of a corpus that has the files of CVSS and Common Voice.

    Args:
        corpus: Folder with cv/fr and cvss_c, unless `common_voice` and `cvss` name other folders. Its tables of several
            references, its alignments and its lexicon are used if they are there.
        allow_absolute_paths: Accept absolute paths in the corpus's lists.
        limit: Take this many utterances, evenly spaced.

    Raises:
        InputError: If files of the split are missing or malformed.
    """
    check_limit(limit)
    root = Path(corpus)
    target = Path(cvss) if cvss is not None else root / "cvss_c"
    source = Path(common_voice) if common_voice is not None else root / "cv" / "fr"
    usable, skipped = read_pairs(source, target, split, scoring=True, admission=Admission(allow_absolute_paths))
    rows = tuple(
        SourceClip(row.clip, row.references, tuple(row.units), row.recording, row.translation)
        for row in evenly_spaced(usable, limit)
    )
    return SpeechCorpus(split, rows, skipped.names, corpus_lexicon(root))


def manifest_corpus(
    split: str,
    manifest: str | os.PathLike[str],
    text: Sequence[str | os.PathLike[str]],
    *,
    allow_absolute_paths: bool = False,
    limit: int | None = None,
) -> SpeechCorpus:
    """Read a split of a manifest of recordings, a .tsv or .jsonl with `path`, `split` and `text`.

    Args:
        text: Folders of sentence pairs, {train,dev,test}.tsv (name, group, sentence, translations). The file name of a
            recording is FOLDER-SENTENCE, by the names of both; recordings of other folders are left out.
        allow_absolute_paths: Accept absolute paths in the manifest.
        limit: Take this many utterances, evenly spaced.

    Raises:
        InputError: If the manifest is malformed, or a folder lacks the translations of one of its recordings.
    """
    check_limit(limit)
    folders = [Path(folder) for folder in text]
    names = tuple(f"{folder.resolve().name}-" for folder in folders)
    utterances = read_utterances(os.fspath(manifest), split, Admission(allow_absolute_paths))
    chosen = evenly_spaced([row for row in utterances if row.path.stem.startswith(names)], limit)
    if not chosen:
        raise InputError(
            f"`text` must name the folders of pairs that were read aloud, but no recording of '{manifest}' begins with "
            f"{' or '.join(names) or 'such a name, because `text` is empty'}. Its first is '{utterances[0].path.stem}'."
        )
    references = references_of([row.path.stem for row in chosen], folders, split)
    rows = tuple(SourceClip(row.path, accepted) for row, accepted in zip(chosen, references, strict=True))
    return SpeechCorpus(split, rows)


def evaluate_speech(
    corpus: SpeechCorpus, systems: ComparedSystems, judge: EnglishRecogniser | None = None, log: Log = no_log
) -> dict[str, Any]:
    """Score speech translators.

    The systems run in turn on each recording, after one warm-up each. A recording that a system refuses counts as an
    empty translation and is listed. Intervals, and tests against the first system, use a bootstrap over sentences.

    Args:
        judge: Transcribes the systems' speech for ASR-BLEU.
        log: Receives lines of progress.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: If an option is invalid.
    """
    rows = corpus.rows
    outputs = _translate_all(systems.runs, rows, log)
    seconds = [_seconds(row.clip) for row in rows]
    compared = metrics.paired_scores(
        {name: [output.text for output in translations] for name, translations in outputs.items()},
        [row.references for row in rows],
    )
    report: dict[str, Any] = {
        "model": systems.name,
        "split": corpus.split,
        "n": len(rows),
        "skipped_rows": dict(corpus.skipped),
        "source_seconds": sum(seconds),
        "hardware": dict(systems.machine),
        "systems": {
            name: {
                **compared[name],
                **_text_scores(rows, translations, corpus.lexicon),
                **_speed(translations, seconds),
            }
            for name, translations in outputs.items()
        },
        "texts": [
            {
                "recording": row.clip.name,
                "references": list(row.references),
                **{name: translations[index].text for name, translations in outputs.items()},
            }
            for index, row in enumerate(rows)
        ],
    }
    if judge is not None:
        add_asr_bleu(report, judge, rows, outputs, log)
    return report


@dataclass(frozen=True)
class Output:
    """One system's translation of one utterance. The translation is empty if the system refused the recording."""

    text: str
    units: tuple[str, ...]  # phones or pieces
    audio: np.ndarray | None  # (T,) 16 kHz speech; None: the system only writes text
    timings: dict[str, float]  # stage -> seconds
    seconds: float  # wall clock, from the file to samples
    error: str = ""


def own_systems(
    model: str | os.PathLike[str] | None = None,
    strategies: Sequence[str] | None = None,
    device: str | None = None,
    threads: int = 2,
) -> ComparedSystems:
    """Make one system for each strategy of our translator, which runs through `mmdec.translate_speech`.

    Args:
        model: None: the shipped model.
        strategies: None: those in `DEFAULT_STRATEGIES`; a model without a graph decoder has only "autoregressive".

    Raises:
        InputError: If there is no such model, or a strategy is unknown.
    """
    check_threads(threads)
    loaded = load_translator(DEFAULT_TRANSLATOR if model is None else model, device)
    if strategies is None:
        strategies = ("autoregressive",) if loaded.model.decoder is None else DEFAULT_STRATEGIES
    for strategy in strategies:
        loaded.supported_strategy(strategy)
    runs = {
        strategy: partial(translate_speech, model=loaded, strategy=strategy, threads=threads) for strategy in strategies
    }
    return ComparedSystems(loaded.name, runs, describe_measurement(loaded.model, threads=threads))


def _text_scores(
    rows: Sequence[SourceClip], outputs: Sequence[Output], lexicon: metrics.Lexicon | None
) -> dict[str, Any]:
    texts, references = [output.text for output in outputs], [row.references for row in rows]
    correct = metrics.exact_matches(texts, references)
    several = [len({metrics.normalise(text) for text in accepted}) > 1 for accepted in references]
    scores: dict[str, Any] = {
        "exact": metrics.Rate(sum(correct), len(correct)).summary(),
        "exact_one_rendering": _share(correct, [not flag for flag in several]),
        "exact_several_renderings": _share(correct, several),
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


def _nearest(pairs: Sequence[tuple[Sequence[str], SourceClip]], lexicon: metrics.Lexicon) -> dict[str, Any]:
    """Compute the phone error rate of translations against the nearest reference.

    Each translation is compared with the reference recording and with the pronunciations of the reference texts; the
    reference with the fewest errors counts.

    Args:
        pairs: The phones of a translation, and its source.
    """
    errors = sum(metrics.nearest_phone_errors(units, row.units, row.references, lexicon) for units, row in pairs)
    return {
        "value": errors / sum(metrics.count_phones(row.units) for _, row in pairs),
        "against": "the nearest reference, pronounced as in the lexicon, pauses left out",
        "n": len(pairs),
    }


def _share(correct: Sequence[bool], selected: Sequence[bool]) -> dict[str, Any]:
    chosen = [is_correct for is_correct, is_selected in zip(correct, selected, strict=True) if is_selected]
    return metrics.Rate(sum(chosen), len(chosen)).summary()


def _speed(outputs: Sequence[Output], seconds: Sequence[float]) -> dict[str, Any]:
    done = [(output, length) for output, length in zip(outputs, seconds, strict=True) if not output.error]
    if not done:
        return {"latency": {}, "real_time_factor": None}
    lengths = [length for _, length in done]
    stages = [*done[0][0].timings, "wav to wav"]
    timings = [{**output.timings, "wav to wav": output.seconds} for output, _ in done]
    return {
        "latency": {
            stage: {"median": median(values), "p90": metrics.percentile(values, 0.9)}
            for stage in stages
            for values in ([row.get(stage, 0.0) for row in timings],)
        },
        "real_time_factor": metrics.real_time_factor([output.seconds for output, _ in done], lengths),
    }


def _translate_all(
    systems: Mapping[str, TranslationSystem], rows: Sequence[SourceClip], log: Log
) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {name: [] for name in systems}
    for system in systems.values():
        _translate(system, rows[0].clip)  # not timed, because first calls take longer than later ones
    for count, row in enumerate(rows, 1):
        for name, system in systems.items():
            outputs[name].append(_translate(system, row.clip))
        if count % 50 == 0 or count == len(rows):
            log(f"translated {count} of {len(rows)}")
    return outputs


def _translate(system: TranslationSystem, clip: Path) -> Output:
    # measures CPU time and wall clock; it waits for no GPU, because `system` returns results on the CPU
    stopwatch = Stopwatch()
    try:
        output = system(clip)
    except InputError as error:
        return Output("", (), np.zeros(0, np.float32), {}, stopwatch.lap(), str(error))
    seconds = stopwatch.lap()
    samples = output.audio
    if samples is not None and output.sample_rate != SAMPLE_RATE:
        samples = resample(torch.from_numpy(np.asarray(samples, np.float32)), output.sample_rate).numpy()
    return Output(output.text, tuple(output.units), samples, dict(output.timings), seconds)


def _seconds(path: Path) -> float:
    """Read a recording's length in seconds; 0 if it cannot be read, because translating it then reports the error."""
    try:
        return len(read_waveform(path)) / SAMPLE_RATE
    except InputError:
        return 0.0


def add_asr_bleu(
    report: dict[str, Any],
    judge: EnglishRecogniser,
    rows: Sequence[SourceClip],
    outputs: Mapping[str, Sequence[Output]],
    log: Log,
) -> None:
    """Add to the report the ASR-BLEU and ASR-chrF of each system that outputs speech, with bounds.

    The judge transcribes the speech, and its transcripts are scored. Lower bounds are the ASR-BLEU of shuffled
    transcripts and of noise; the upper bound is that of the reference recordings, if the corpus has them.

    Args:
        outputs: system's name -> its translation of each row.
    """
    references = [row.references for row in rows]
    report["recogniser"] = {"name": judge.name, "normalisation": NORMALISATION}
    best = _add_recordings(report, judge, rows, log)
    transcribed: dict[str, list[str]] = {}
    transcript_of: dict[bytes, str] = {b"": ""}  # sound -> transcript, because two systems may output equal sounds
    for name, translations in outputs.items():
        sounds = [output.audio for output in translations]
        if any(sound is not None and len(sound) for sound in sounds):
            log(f"recognising the translations by {name}")
            transcribed[name] = []
            for sound in sounds:
                key = b"" if sound is None else sound.tobytes()
                if key not in transcript_of and sound is not None:
                    transcript_of[key] = judge.transcribe(sound)
                transcribed[name].append(transcript_of[key])
    if not transcribed:
        return
    alike = {name: metrics.normalise_all_for_asr(transcripts, references) for name, transcripts in transcribed.items()}
    compared = metrics.paired_scores(
        {name: texts for name, (texts, _) in alike.items()}, next(accepted for _, accepted in alike.values())
    )
    for name, transcripts in transcribed.items():
        scores = report["systems"][name]
        scores["asr_bleu"], scores["asr_chrf"] = compared[name]["bleu"], compared[name]["chrf"]
        scores["asr_bleu_ratio"] = scores["asr_bleu"]["value"] / best if best else None
        scores["asr_bleu_shuffled"] = _shuffled_score(transcripts, references)
        for row, transcript in zip(report["texts"], transcripts, strict=True):
            row[f"{name}, heard"] = transcript


def _add_recordings(
    report: dict[str, Any], judge: EnglishRecogniser, rows: Sequence[SourceClip], log: Log
) -> float | None:
    """Add to the report the judge's errors on the reference recordings.

    Returns:
        The recordings' ASR-BLEU; None if some row has no recording.
    """
    recordings = [row.recording for row in rows if row.recording is not None]
    if len(recordings) < len(rows):
        return None
    log("recognising the reference recordings")
    references = [row.references for row in rows]
    transcripts = [judge.transcribe(read_waveform(path)) for path in recordings]
    best = metrics.asr_bleu(transcripts, references)
    report["recordings"] = {
        "asr_bleu": best.value,
        "signature": best.signature,
        "judge_word_error_rate": metrics.word_error_rate(transcripts, [row.translation for row in rows]),
        "asr_bleu_shuffled": _shuffled_score(transcripts, references),
    }
    report["asr_bleu_noise"] = _noise_score(judge, recordings[:NOISE_COUNT], references[:NOISE_COUNT])
    return best.value


def _shuffled_score(transcripts: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
    """Compute ASR-BLEU of each transcript against another sentence's references: a lower bound."""
    return metrics.asr_bleu(shift_by_half(transcripts), references).value if len(transcripts) > 1 else None


def shift_by_half(items: Sequence[str]) -> list[str]:
    """Reorder items so that none keeps its place. Items move by half the list, because neighbours may be equal."""
    half = max(1, len(items) // 2)
    return [*items[half:], *items[:half]]


def _noise_score(judge: EnglishRecogniser, recordings: Sequence[Path], references: Sequence[Sequence[str]]) -> float:
    """Compute ASR-BLEU of white noise as long as the reference recordings: a lower bound."""
    generator = np.random.default_rng(0)
    noises = [NOISE_LEVEL * generator.standard_normal(len(read_waveform(path))) for path in recordings]
    return metrics.asr_bleu([judge.transcribe(noise) for noise in noises], references).value


def read_waveform(path: Path) -> np.ndarray:
    """Read a recording to samples (T,) of 16 kHz."""
    return load_audio(path).numpy()
