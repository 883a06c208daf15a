"""An independent judge of speech translation: a Whisper that took no part in our training.

It transcribes the English speech of translators, for ASR-BLEU. If it knows French, it is also a system to compare
with: it translates French speech, and it is the recogniser in a cascade with our text translator and our voice. It
decodes greedily, in windows of 30 s, with `mmdec.transcribe`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from mmdec.core.timing import Stopwatch
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts
from mmdec.daspeech.piece_reader import unit_limits
from mmdec.daspeech.translator import SpeechTranslator
from mmdec.daspeech.units import NUM_SPECIAL_UNITS
from mmdec.errors import InputError
from mmdec.io.audio import HOP, SAMPLE_RATE
from mmdec.whisper.checkpoint import load_whisper
from mmdec.whisper.transcribe import transcribe

FRENCH, ENGLISH = "fr", "en"


@final
@dataclass(frozen=True)
class SystemOutput:
    """One system's translation of a recording: its text, and its sound if it speaks. `evaluate_speech` scores it."""

    text: str
    audio: np.ndarray | None = None  # (T,) speech; None: the system only writes text
    sample_rate: int = SAMPLE_RATE  # in Hz
    # names of the phones or pieces of the translation; empty for a Whisper that only translates to text
    units: list[str] = field(default_factory=lambda: [])
    timings: dict[str, float] = field(default_factory=lambda: {})  # stage -> seconds


@final
class Judge:
    """A Whisper that transcribes English and, if it knows French, transcribes French and translates it to English text.

    Args:
        model: A shipped name, folder or Hugging Face id.
    """

    def __init__(self, model: str | os.PathLike[str], device: str | None = None, threads: int | None = None) -> None:
        self._whisper, self._threads = load_whisper(model, device), threads
        self.name = Path(model).resolve().name
        languages: Any = getattr(self._whisper.model.generation_config, "lang_to_id", None) or {}
        self.knows_french = f"<|{FRENCH}|>" in languages

    def check_french(self) -> None:
        """Raise InputError if the Whisper does not know French."""
        if not self.knows_french:
            raise InputError(
                f"`judge` must be a Whisper of French and English, but '{self.name}' knows one language. Use a "
                "multilingual one: openai/whisper-base."
            )

    def transcribe(self, samples: np.ndarray | Sequence[float]) -> str:
        """Transcribe English speech (T,) at 16 kHz; "" for a silent or too short sound."""
        sound = np.asarray(samples, np.float32)
        try:
            return self._write(sound, ENGLISH, sample_rate=SAMPLE_RATE)
        except InputError:  # the sound is too short or silent
            return ""

    def french(self, recording: Path) -> str:
        """Transcribe a French recording."""
        return self._write(recording, FRENCH)

    def translate(self, recording: Path) -> SystemOutput:
        """Translate a French recording by the judge itself, as text only."""
        return SystemOutput(self._write(recording, FRENCH, task="translate"))

    def _write(self, audio: Path | np.ndarray, language: str, **options: Any) -> str:
        call = {"model": self._whisper, "language": language, "drafter": None, "threads": self._threads, **options}
        return transcribe(audio, **call).text.strip()


@final
@dataclass(frozen=True)
class Cascade:
    """A recogniser, a text translator and a voice, one after the other. Call it with a French recording."""

    hear: Callable[[Path], str]  # French speech to French text
    translate_text: Callable[[str], str]  # French text to English text
    speak: Callable[[str], np.ndarray]  # English text to samples (T,) of 16 kHz

    def __call__(self, recording: Path) -> SystemOutput:
        clock = Stopwatch()
        with clock.stage("recogniser"):
            french = self.hear(recording)
        with clock.stage("text"):
            english = self.translate_text(french) if french else ""
        with clock.stage("voice"):
            sound = self.speak(english)
        return SystemOutput(english, sound, timings=dict(clock.seconds))


def comparison_systems(judge: Judge, translator: SpeechTranslator) -> dict[str, Callable[[Path], SystemOutput]]:
    """Make the systems to compare with our translator.

    One is the judge's own translation. If our translator has French text in between, there is also a cascade: the
    judge's French transcript, our text encoder with its autoregressive decoder, and our voice.

    Returns:
        Name -> function that translates a recording; empty if the judge does not know French.
    """
    if not judge.knows_french:
        return {}
    systems: dict[str, Callable[[Path], SystemOutput]] = {judge.name: judge.translate}
    if isinstance(translator.parts, PieceTranslatorParts):
        systems["cascade"] = Cascade(
            judge.french, partial(translate_text, translator.parts), partial(speak, translator)
        )
    return systems


@torch.inference_mode()
def translate_text(parts: PieceTranslatorParts, text: str) -> str:
    """Translate French text to English text with a translator's text encoder and autoregressive decoder.

    Args:
        parts: The translator's networks.
        text: French text. Its case and punctuation are removed, because the recogniser that the networks were trained
            with (a CTC head) writes none.
    """
    ids = parts.source_pieces(text)
    if not ids:
        return ""
    network = parts.model
    device = next(network.parameters()).device
    pieces, lengths = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
    (units,) = network.autoregressive.generate(network.encode(pieces, lengths), lengths, unit_limits(lengths)[0])
    return parts.english.decode([unit for unit in units if unit >= NUM_SPECIAL_UNITS])


@torch.inference_mode()
def speak(translator: SpeechTranslator, text: str) -> np.ndarray:
    """Speak English text in a translator's voice: samples (T,) of 16 kHz."""
    (mel,) = translator.layout.mels([[]], [text], None)
    if not len(mel):
        return np.zeros(0, np.float32)
    samples = translator.vocoder(mel[None].float(), torch.tensor([len(mel)], device=mel.device))
    return samples[0, : len(mel) * HOP].float().clamp(-1, 1).cpu().numpy()
