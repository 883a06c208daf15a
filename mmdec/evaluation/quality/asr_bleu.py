"""ASR-BLEU of a translator's speech, with the controls that show what the figure is worth.

A recogniser that this project did not train transcribes the translations, the reference recordings (the best possible
score), transcripts in the wrong order and white noise (the worst).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmdec.runtime import Log
from mmdec.training.corpora.cvss import SpeechPair
from mmdec.training.corpora.tables import read_table
from mmdec.training.metrics import text as metrics
from mmdec.training.metrics.recogniser import Recogniser
from mmdec.training.metrics.text import Lexicon
from mmdec.types import InputError

NOISES = 32  # utterances replaced by white noise
NOISE_LEVEL = 0.1  # of full scale


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
