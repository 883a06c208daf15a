"""Fits the confidence of transcripts or translations, and measures it on sounds of other kinds.

python recipes/confidence/fit.py transcribe --model openai/whisper-tiny.en --language en \\
    --fit people.tsv voices.tsv --proof recordings.tsv --out models/whisper-tiny.en

A manifest is a table of tab-separated `path` (relative to it), `text` (the right words, or references separated by "|";
empty for speech that is nonsense to the model, such as another language) and optional `split` (rows of `train` are left
out). Each recording is decoded once: in `--fit` most of them with noise or as by telephone, every third backwards as
well; then noises. In `--proof` recordings are decoded as they are and once more in noise, and the noises are others.

The curve is scikit-learn's logistic regression on the evidence of each output (mmdec/tasks/confidence.py). An
output that is right by three quarters counts as three quarters of a right and one quarter of a wrong one.
Needs mmdec[train,eval]; one thread; some seconds a recording.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

import mmdec
from mmdec.daspeech.translate import load_translator
from mmdec.daspeech.translator import AUTOREGRESSIVE_KIND, GRAPH_KIND
from mmdec.io.audio import SAMPLE_RATE, load_audio, trim_silence
from mmdec.tasks.audio import read_audio
from mmdec.tasks.confidence import Calibration, write_calibrations
from mmdec.training.metrics.text import normalise_words, sentence_chrf, word_edits
from mmdec.whisper.recordings import TRANSCRIPT

# signal-to-noise ratio in dB (None: no noise), and whether by telephone
DISTORTIONS = ((None, False), (10, False), (None, True), (0, False), (20, False), (-5, False), (5, True))
NOISES = {
    "fit": ("white noise", "hum", "tones", "chords", "clicks"),
    "proof": ("rumble", "chirps", "bells", "pops", "room"),
}
SPEECH = ("speech", "speech in noise")  # the other kinds are nonsense
WRONG_CHRF, RIGHT_CHRF = 45.0, 70.0  # a translation up to the first counts as wrong, from the second on as right


def recordings(manifest: Path, count: int) -> Iterator[tuple[np.ndarray, tuple[str, ...]]]:
    """Yield samples and texts of at most `count` rows, evenly spaced."""
    with manifest.open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row.get("split") != "train"
        ]
    for row in rows[:: max(1, len(rows) // count)][:count]:
        texts = tuple(text for text in row["text"].split("|") if text.strip())
        yield load_audio(manifest.parent / row["path"]).numpy(), texts


def noisy(samples: np.ndarray, level: float, draw: np.random.Generator) -> np.ndarray:
    """Add white or low noise at a signal-to-noise ratio of `level` dB."""
    noise = draw.normal(size=len(samples))
    if draw.random() < 0.5:
        noise = np.cumsum(noise)
        noise -= np.convolve(noise, np.ones(801) / 801, mode="same")
    power = float(np.mean(samples**2)) / 10 ** (level / 10)
    mixed = samples + noise * np.sqrt(power / max(float(np.mean(noise**2)), 1e-12))
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32)


def limit_to_telephone_band(samples: np.ndarray) -> np.ndarray:
    """Keep 300 to 3,400 Hz."""
    spectrum, frequencies = np.fft.rfft(samples), np.fft.rfftfreq(len(samples), 1 / SAMPLE_RATE)
    spectrum[(frequencies < 300) | (frequencies > 3400)] = 0
    return np.fft.irfft(spectrum, len(samples)).astype(np.float32)


def noise(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Make a sound of 1 to 5 s that is not speech."""
    time = np.arange(int(draw.uniform(1, 5) * SAMPLE_RATE)) / SAMPLE_RATE
    white = draw.normal(size=len(time))
    notes = np.repeat(draw.uniform(200, 2000, 20), SAMPLE_RATE // 4)[: len(time)]
    sound = {
        "white noise": lambda: white,
        "hum": lambda: sum(np.sin(2 * np.pi * 50 * n * time) / n for n in range(1, 8)) + 0.1 * white,
        "tones": lambda: np.sin(2 * np.pi * notes * time),
        "chords": lambda: sum(np.sin(2 * np.pi * ratio * notes * time) for ratio in (1, 1.25, 1.5)),
        "clicks": lambda: (draw.random(len(time)) < 1e-3) * white,
        "rumble": lambda: np.convolve(white, np.ones(400) / 400, mode="same"),
        "chirps": lambda: np.sin(2 * np.pi * (200 + 500 * time) * time) * (np.sin(6 * np.pi * time) > -0.3),
        "bells": lambda: np.sin(2 * np.pi * notes * time) * np.exp(-6 * (time % 0.25)),
        "pops": lambda: np.convolve((draw.random(len(time)) < 3e-4) * white, np.exp(-np.arange(200) / 40), mode="same"),
        "room": lambda: white,
    }[kind]()
    loudness = 1e-3 if kind == "room" else draw.uniform(0.02, 0.5)
    return (sound / max(float(np.abs(sound).max()), 1e-9) * loudness).astype(np.float32)


def sounds(manifests: list[Path], part: str, count: int) -> Iterator[tuple[np.ndarray, tuple[str, ...], str]]:
    """Yield the sounds to fit to, or to prove the fit with: samples (T,) at 16 kHz, the right texts (empty: nonsense),
    and a name for the kind of sound."""
    draw = np.random.default_rng(["fit", "proof"].index(part))
    total = 0
    for manifest in manifests:
        for index, (samples, texts) in enumerate(recordings(manifest, count)):
            total += 1
            level, narrow = DISTORTIONS[index % len(DISTORTIONS)] if part == "fit" else (None, False)
            heard = limit_to_telephone_band(samples) if narrow else samples
            heard = heard if level is None else noisy(heard, level, draw)
            yield heard, texts, "speech" if texts else "nonsense speech"
            if part == "proof" and texts:
                yield noisy(samples, (10, 0, -5)[index % 3], draw), texts, "speech in noise"
            if texts and index % 3 == 0:
                yield samples[::-1].copy(), (), "backwards"
    for index in range(total // 2):
        kind = NOISES[part][index % len(NOISES[part])]
        yield noise(kind, draw), (), kind


def rightness(task: str, text: str, texts: tuple[str, ...]) -> float:
    """Return how right an output is, 0 to 1: the share of right words, or a translation's chrF between two bounds."""
    if not texts:
        return 0.0
    if task == "translate":
        return float(np.clip((sentence_chrf(text, texts) - WRONG_CHRF) / (RIGHT_CHRF - WRONG_CHRF), 0, 1))
    said = " ".join(normalise_words(text))
    references = [normalise_words(reference) for reference in texts]
    return max(0.0, *(1 - word_edits(" ".join(words), said).errors / max(len(words), 1) for words in references))


def decode(task: str, model: str, language: str | None, samples: np.ndarray) -> tuple[str, Mapping[str, float]]:
    """Return the output for samples (T,) and its evidence, which is empty for silence.

    A translator judges each segment of a recording by itself, so a recording to translate is one segment here.
    """
    if task == "transcribe":
        transcript = mmdec.transcribe(samples, sample_rate=SAMPLE_RATE, model=model, language=language)
        return transcript.text, transcript.evidence
    (spoken,) = load_translator(model).translate([trim_silence(read_audio(samples, SAMPLE_RATE))])
    return spoken.text, spoken.evidence if spoken.units else {}


def decode_all(
    given: argparse.Namespace, manifests: list[Path], part: str
) -> list[tuple[Mapping[str, float], float, str]]:
    """Return evidence, rightness and kind of each output; outputs without evidence are left out."""
    examples = []
    for samples, texts, kind in sounds(manifests, part, given.count):
        try:
            text, evidence = decode(given.task, given.model, given.language, samples)
        except mmdec.InputError as error:
            print(f"{kind}: {error}")
            continue
        if evidence:
            examples.append((evidence, rightness(given.task, text, texts), kind))
    return examples


def calibration_kind(task: str, model: str) -> str:
    """Return the name that the calibration has in confidence.json."""
    if task == "transcribe":
        return TRANSCRIPT
    return (
        AUTOREGRESSIVE_KIND
        if load_translator(model).decoding.strategy in ("autoregressive", "verified")
        else GRAPH_KIND
    )


def fit(examples: list[tuple[Mapping[str, float], float, str]]) -> Calibration:
    """Fit a logistic regression to outputs that are right in part."""
    names = sorted({name for evidence, _, _ in examples for name in evidence})
    speech = [evidence for evidence, _, kind in examples if kind == "speech"]
    typical = {name: float(np.mean([evidence[name] for evidence in speech if name in evidence])) for name in names}
    rows = np.array([[evidence.get(name, typical[name]) for name in names] for evidence, _, _ in examples])
    right = np.array([value for _, value, _ in examples])
    scaler, curve = StandardScaler(), LogisticRegression(C=10.0, max_iter=1000)
    scaled = scaler.fit_transform(rows)
    labels = np.repeat([1, 0], len(rows))
    curve.fit(np.concatenate([scaled, scaled]), labels, sample_weight=np.concatenate([right, 1 - right]))
    weights = curve.coef_[0] / scaler.scale_
    bias = float(np.asarray(curve.intercept_)[0] - weights @ scaler.mean_)
    return Calibration(dict(zip(names, weights.tolist(), strict=True)), bias, typical)


def rank_correlation(confidence: np.ndarray, right: np.ndarray) -> float | None:
    """Return Spearman's correlation; None if all values of one are equal, where it is undefined."""
    if not (np.ptp(confidence) and np.ptp(right)):
        return None
    result: Any = spearmanr(confidence, right)
    return float(result.statistic)


def measure(calibration: Calibration, examples: list[tuple[Mapping[str, float], float, str]]) -> dict:
    """Score a calibration on outputs that it was not fitted to."""
    confidence = np.array([calibration(evidence) for evidence, _, _ in examples])
    right = np.array([value for _, value, _ in examples])
    kinds = np.array([kind for _, _, kind in examples])
    speech = np.isin(kinds, SPEECH)
    report = {"outputs": len(examples), "spearman": rank_correlation(confidence[speech], right[speech])}
    for kind in SPEECH:
        of_kind = kinds == kind
        if of_kind.sum() > 2:
            report[f"spearman of {kind}"] = rank_correlation(confidence[of_kind], right[of_kind])
    whole = confidence[speech & (right == 1)]
    report["median of right outputs"] = float(np.median(whole)) if len(whole) else None
    nonsense = dict.fromkeys(kinds[~speech].tolist())
    report["highest by kind of nonsense"] = {kind: float(confidence[kinds == kind].max()) for kind in nonsense}
    report["roc_area"] = float(roc_auc_score(speech, confidence))
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: Those after the script's name; None: the process's.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["transcribe", "translate"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--language", help="of the recordings, for a Whisper of many languages")
    parser.add_argument("--fit", type=Path, nargs="+", required=True)
    parser.add_argument("--proof", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=120, help="recordings of each manifest")
    parser.add_argument("--out", type=Path, help="folder whose confidence.json is written; default: only print")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    calibration = fit(decode_all(given, given.fit, "fit"))
    kind = calibration_kind(given.task, given.model)
    measured = {kind: measure(calibration, decode_all(given, given.proof, "proof"))}
    print(json.dumps(measured, indent=1))
    if given.out:
        print(write_calibrations(given.out, {kind: calibration}, measured))


if __name__ == "__main__":
    main()
