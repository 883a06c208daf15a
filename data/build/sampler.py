"""Writes the eight sample recordings of data/samples/: test sentences in voices heard and not heard in training."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import voices
from splits import Sentence, normalise

RATE = 16000


@dataclass(frozen=True)
class Sample:
    """One sample recording; `snr` in dB or None for no noise."""

    name: str
    french: str
    accent: str
    variant: str
    words_per_minute: int
    pitch: int
    snr: float | None = None


SAMPLES = (
    Sample("ou_est_la_plage", "Où est la plage ?", "fr-fr", "f4", 150, 55),
    Sample("un_billet_pour_marseille", "Combien coûte un billet pour Marseille ?", "fr-fr", "m3", 155, 45),
    Sample("le_train_pour_nice", "Le train pour Nice part du quai numéro huit.", "fr-be", "Andrea", 165, 50),
    Sample("un_verre_d_eau", "Un verre d'eau et une pizza, s'il vous plaît.", "fr-ch", "Annie", 165, 50),
    Sample("rendez_vous_jeudi", "J'ai rendez-vous jeudi à neuf heures.", "fr-fr", "m4", 150, 40),
    Sample("pouvez_vous_repeter", "Pouvez-vous répéter, s'il vous plaît ?", "fr-be", "m1", 160, 60, snr=20),
    Sample("voir_un_medecin", "Est-ce que je peux voir un médecin ?", "fr-ch", "f2", 145, 60),
    Sample("vingt_quatre_degres", "Il fait vingt-quatre degrés à Paris.", "fr-fr", "victor", 150, 45, snr=25),
)


def write_samples(folder: Path, sentences: Sequence[Sentence]) -> None:
    """Write the recordings (16 kHz mono PCM16) and samples.tsv. Raises ValueError for a sentence that is not test."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {sentence.key: sentence for sentence in sentences}
    lines = []
    for number, sample in enumerate(SAMPLES):
        sentence = known.get(normalise(sample.french))
        if sentence is None or sentence.split != "test":
            raise ValueError(
                f"`SAMPLES` must hold test sentences, but has {sample.french!r}. Take one from --text-only."
            )
        voice = voices.Speaker(sample.accent, sample.variant, "")
        spoken = voices.speak(sample.french, voice, sample.words_per_minute, sample.pitch)
        samples = voices.resample(spoken, voices.RATE, RATE)
        samples = np.pad(samples, RATE // 8)
        if sample.snr is not None:
            noise = np.random.default_rng(number).standard_normal(len(samples))
            samples = samples + noise * np.sqrt(np.mean(samples**2)) / 10 ** (sample.snr / 20)
        path = folder / f"{sample.name}.wav"
        partial = path.with_name(f"{path.name}.partial")
        soundfile.write(partial, samples / np.abs(samples).max() * 0.6, RATE, format="WAV", subtype="PCM_16")
        os.replace(partial, path)
        lines.append("\t".join((path.name, sentence.french, *sentence.renderings)) + "\n")
    (folder / "samples.tsv").write_text("".join(lines), encoding="utf-8")
