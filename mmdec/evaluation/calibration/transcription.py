"""Examples for calibrating the confidence of transcripts: see `__main__.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmdec.audio import SAMPLE_RATE
from mmdec.evaluation.calibration.examples import SEEDS, Example, sounds, spoken_sounds, words_right
from mmdec.hub.whisper import DEFAULT_MODEL, load_whisper
from mmdec.pipelines.transcription.batches import TRANSCRIPT
from mmdec.pipelines.transcription.transcribe import transcribe
from mmdec.training.corpora.cvss import read_pairs
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.corpora.text_files import evenly_spaced


def transcribed(options: argparse.Namespace, split: str) -> dict[str, list[Example]]:
    """The transcripts of a split as examples: recordings, clean and with noise, and nonsense.

    Without `--other` the model is taken for one that knows all languages: none of them is nonsense.
    """
    own = [(row.path, (row.text,)) for row in evenly_spaced(read_utterances(options.corpus, split), options.count)]
    if options.other is None:
        recordings = spoken_sounds(own, split)
    else:
        pairs = read_pairs(options.other / "cv" / "fr", options.other / "cvss_c", split, scoring=True)[0]
        recordings = sounds(own, [pair.clip for pair in pairs], SEEDS[split])
    whisper = load_whisper(options.model or DEFAULT_MODEL)
    examples = []
    for sound in recordings:
        out = transcribe(sound.samples, sample_rate=SAMPLE_RATE, model=whisper)
        examples.append(Example(out.evidence, words_right(out.text, sound.references), sound.kind))
    return {TRANSCRIPT: examples}


def folder(options: argparse.Namespace) -> Path:
    """The model's directory."""
    directory = load_whisper(options.model or DEFAULT_MODEL).directory
    assert directory is not None
    return directory
