r"""Calibrates a model's confidence: fits it to how often outputs are right, and measures it on held-out data.

python -m mmdec.evaluation.calibration speech --corpus data/natural/manifest.tsv --text data/everyday data/phrasebook \
    --other data/other_speech/manifest.tsv --unseen data/people/manifest.tsv --write
python -m mmdec.evaluation.calibration asr --corpus data/english --other data/corpus --write
python -m mmdec.evaluation.calibration asr --corpus data/voices.tsv --model MODEL --folder FOLDER --write
python -m mmdec.evaluation.calibration vlm --corpus data/scenes --other data/other_pictures --count 900 --write

It decodes development inputs: recordings, clean and with noise, or pictures; and nonsense (noise, tones, speech of
another language; pictures of one colour, a gradient or noise, and of other styles). It fits a logistic curve to the
share of words or claims that are right. On the test split it measures the expected calibration error in ten bins (Guo
et al., "On calibration of modern neural networks", 2017), and the area under the ROC curve that separates clean inputs
from nonsense. --write puts the result into confidence.json in the model's folder; for vlm, statistics of the training
pictures are written beside it.

A translation counts as right from a chrF of 70 and as wrong up to 45. Its curve is fitted on the dev split, and tested
on voices, languages and nonsense that dev does not have: `--other` is the output of data/build/other_speech.py,
`--unseen` are recordings for the test only. In the result, "above" has two shares: of all inputs, those whose output is
wrong with a confidence above 0.7; and of the right outputs, those with such a confidence.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from mmdec.audio import SAMPLE_RATE, trim_silence
from mmdec.evaluation.calibration.examples import (
    EMPTY,
    SEEDS,
    Example,
    Sound,
    empty_picture,
    rightness,
    sounds,
    spoken_sounds,
    translator_sounds,
    words_right,
)
from mmdec.evaluation.quality.translation import SpeechCorpus, cvss_corpus, manifest_corpus
from mmdec.hub.daspeech import DEFAULT_MODEL, resolve
from mmdec.hub.vlm import FamiliarPictures, LoadedVlm, load_vlm
from mmdec.pipelines.confidence import Calibration, write_calibrations
from mmdec.pipelines.description.answer import ANSWER, summaries
from mmdec.pipelines.description.describe import describe
from mmdec.pipelines.inputs import SILENCE, peak
from mmdec.pipelines.transcription.batches import TRANSCRIPT
from mmdec.pipelines.transcription.transcribe import DEFAULT_MODEL as TRANSCRIBER
from mmdec.pipelines.transcription.transcribe import load_transcriber, transcribe
from mmdec.pipelines.translation.translate import load
from mmdec.pipelines.translation.translator import AUTOREGRESSIVE, GRAPH, SpeechTranslator, SpokenTranslation
from mmdec.training.corpora.chats import read_conversations
from mmdec.training.corpora.cvss import read_pairs
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.training.metrics.text import Rate, claims_held, right_answer
from mmdec.types import InputError


def transcribed(options: argparse.Namespace, split: str) -> dict[str, list[Example]]:
    """Transcribe a split, and return the transcripts as examples, by kind of decoding. The sounds are recordings, clean
    and with noise, and nonsense.

    options: the command line. Without `--other` the model is assumed to know all languages: then speech of other
        languages is not used as nonsense.
    """
    own = [(row.path, (row.text,)) for row in evenly_spaced(read_utterances(options.corpus, split), options.count)]
    if options.other is None:
        recordings = spoken_sounds(own, split)
    else:
        pairs = read_pairs(options.other / "cv" / "fr", options.other / "cvss_c", split, scoring=True)[0]
        recordings = sounds(own, [pair.clip for pair in pairs], SEEDS[split])
    transcriber = load_transcriber(options.model or TRANSCRIBER)
    examples = []
    for sound in recordings:
        out = transcribe(sound.samples, sample_rate=SAMPLE_RATE, model=transcriber)
        examples.append(Example(out.evidence, words_right(out.text, sound.references), sound.kind))
    return {TRANSCRIPT: examples}


FAMILIAR = 4000  # training pictures whose statistics tell familiar pictures from others


@cache
def seeing_model(name: str | None, corpus: Path) -> LoadedVlm:
    """Load the model, with statistics of the pictures in this corpus's training split, which tell familiar pictures
    from others. name: None: the shipped model."""
    vlm = load_vlm(name or "vlm-scenes")
    rows = [row for row in evenly_spaced(read_conversations(corpus / "train.json"), FAMILIAR) if row.images]
    seen = summaries(vlm, [row.images[0] for row in rows])
    kinds = [row.notes.get("graph", {}).get("kind", "") for row in rows]  # kinds of scene, if the corpus has them
    return replace(vlm, familiar=None if seen is None else FamiliarPictures.of(seen, kinds))


def described(options: argparse.Namespace, split: str) -> dict[str, list[Example]]:
    """Answer questions of a split, and return the answers as examples, by kind of decoding.

    One random question of each conversation is asked. Every third question is about an empty picture, or a picture in
    another style from `--other`; the styles for the test are not in the fit.

    options: the command line.
    """
    vlm = seeing_model(options.model, options.corpus)
    draw = np.random.default_rng(SEEDS[split])
    others = _others(options.other / split, draw)
    examples = []
    rows = evenly_spaced(read_conversations(options.corpus / f"{split}.json"), options.count)
    for index, conversation in enumerate(rows):
        turn = int(draw.integers(len(conversation.turns)))
        (question, reference), note = conversation.turns[turn], conversation.notes["turns"][turn]
        kind, picture = next(others) if index % 3 == 2 else ("picture", conversation.images[0])
        out = describe(picture, question, model=vlm)
        if note["task"] == "describe":
            right = claims_held(out.text, note["claims"]) / max(len(note["claims"]), 1)
        else:
            right = float(right_answer(out.text, reference, note["expected"], note["task"]))
        examples.append(Example(out.evidence, right if kind == "picture" else 0.0, kind))
    return {ANSWER: examples}


def _others(folder: Path, draw: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Endlessly yield (kind, picture): empty pictures, generated at random, and pictures of each style in turn.

    folder: it has a folder of PNG for each style. draw: the random generator.
    """
    styles = {path.name: sorted(path.glob("*.png")) for path in sorted(folder.glob("*")) if path.is_dir()}
    if not all(styles.values()) or not styles:
        raise InputError(
            f"`other` must have a folder of PNG for each style in '{folder}', but has {sorted(styles) or 'none'}. Draw "
            "them with `python data/build/other_pictures.py --out data/other_pictures`."
        )
    number = 0
    while True:
        for empty in EMPTY:
            yield f"empty picture: {empty}", empty_picture(empty, draw)
        for style, paths in styles.items():
            yield f"other style: {style}", paths[number % len(paths)]
        number += 1


# Suffixes by which a list of recordings (manifest) is recognised. A path with another suffix is the folder of a corpus.
MANIFESTS = (".tsv", ".jsonl")
BINS = 10  # bins of equal width for confidences from 0 to 1
SURE = 0.7  # outputs above this confidence count as confident: users rely on them
RIDGE = 1e-3  # ridge penalty of the fit: keeps weights finite if speech and nonsense can be separated perfectly


def fit(examples: Sequence[Example]) -> Calibration:
    """Fit the logistic curve of confidence: it minimises the cross-entropy with the examples' `right`. Also record the
    mean evidence of the examples that are not nonsense. Examples without evidence are left out."""
    examples = [example for example in examples if example.evidence]
    names = sorted(examples[0].evidence)
    inputs = torch.tensor([[example.evidence[name] for name in names] for example in examples], dtype=torch.float64)
    right = torch.tensor([example.right for example in examples], dtype=torch.float64)
    middle, spread = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    scaled = (inputs - middle) / spread
    parameters = torch.zeros(len(names) + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = scaled @ parameters[:-1] + parameters[-1]
        total = binary_cross_entropy_with_logits(scores, right) + RIDGE * parameters[:-1].square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    slopes = parameters.detach()[:-1] / spread
    bias = float(parameters.detach()[-1] - (slopes * middle).sum())
    sensible = torch.tensor([not example.nonsense for example in examples])
    typical = inputs[sensible].mean(0) if sensible.any() else middle
    weights, usual = (dict(zip(names, values.tolist(), strict=True)) for values in (slopes, typical))
    return Calibration(weights, bias, usual)


def calibration_error(confidences: Sequence[float], right: Sequence[float]) -> float:
    """Compute the expected calibration error: over ten bins of equal width, the mean distance between confidence and
    the share that is right, weighted by the bins' numbers of outputs. right: how right each output is, from 0 to 1."""
    gaps = [row["count"] * abs(row["said"] - row["right"]) for row in reliability(confidences, right)]
    return float(sum(gaps) / len(confidences))


def roc_area(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the probability that a value of `above` exceeds a value of `below`; equal values count half."""
    a, b = np.asarray(above)[:, None], np.asarray(below)[None]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def reliability(confidences: Sequence[float], right: Sequence[float]) -> list[dict[str, float]]:
    """Return for each non-empty bin of confidences the number of outputs (`count`), their mean confidence (`said`), and
    the share that is right (`right`)."""
    said, true = np.asarray(confidences), np.asarray(right)
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    sums = zip(*(np.bincount(bins, each).tolist() for each in (None, said, true)), strict=True)
    return [{"count": n, "said": says / n, "right": holds / n} for n, says, holds in sums if n]


def measure(calibration: Calibration, examples: Sequence[Example]) -> dict[str, Any]:
    """Score a calibration on examples that it was not fitted to. Returns a JSON-ready report: calibration errors, areas
    under the ROC curve, bins of confidence, and shares above `SURE`."""
    said = [calibration(example.evidence) if example.evidence else 0.0 for example in examples]
    right = [example.right for example in examples]
    pairs = list(zip(said, examples, strict=True))
    plain = [value for value, example in pairs if example.kind in ("speech", "picture")]
    kinds = dict.fromkeys(example.kind for example in examples)
    return {
        "outputs": len(examples),
        "calibration_error": calibration_error(said, right),
        "calibration_error_of_speech_or_pictures": calibration_error(
            *zip(*[(value, example.right) for value, example in pairs if not example.nonsense], strict=True)
        ),
        "roc_area": roc_area(plain, [value for value, example in pairs if example.nonsense]),
        "roc_area_by_kind": {
            kind: roc_area(plain, [value for value, example in pairs if example.kind == kind])
            for kind in kinds
            if any(example.nonsense for example in examples if example.kind == kind)
        },
        "reliability": reliability(said, right),
        "above": above(said, examples),
    }


def above(said: Sequence[float], examples: Sequence[Example]) -> dict[str, Any]:
    """Return two shares: of all outputs, those that are confident and wrong; of the right outputs, those that are
    confident.

    said: the confidence of each example's output; an output is confident if it is above `SURE`.
    """
    pairs = list(zip(said, examples, strict=True))
    wrong = [example.kind for value, example in pairs if value > SURE and example.right == 0]
    right = [value > SURE for value, example in pairs if example.right == 1]
    return {
        "confidence": SURE,
        "wrong_of_all": Rate(len(wrong), len(pairs)).summary(),
        "of_right": Rate(sum(right), len(right)).summary(),
        "wrong_by_kind": dict(Counter(wrong)),
    }


def _speech(options: argparse.Namespace, split: str) -> list[Sound]:
    own = _corpus(options.corpus, options, split)
    unseen = [
        (row.clip, row.references, manifest.parent.name)
        for manifest in (options.unseen if split == "test" else ())
        for row in _corpus(manifest, options, split).rows
    ]
    named = options.other.suffix in MANIFESTS
    other = [
        (row.path, row.chapter if named else "any")
        for row in evenly_spaced(read_utterances(options.other, split), options.count // 4)
    ]
    return translator_sounds([(row.clip, row.references) for row in own.rows], unseen, other, split)


def _corpus(path: Path, options: argparse.Namespace, split: str) -> SpeechCorpus:
    if path.suffix in MANIFESTS:
        return manifest_corpus(split, path, options.text, limit=options.count)
    return cvss_corpus(split, path, limit=options.count)


def translated(options: argparse.Namespace, split: str) -> dict[str, list[Example]]:
    """Translate a split, and return the translations as examples, by kind of decoding. options: the command line."""
    translator = load(options.model or DEFAULT_MODEL)
    recordings = _speech(options, split)
    kinds = {AUTOREGRESSIVE: "autoregressive"}
    if translator.model.decoder is not None:
        guided = getattr(translator.model, "written", None) is not None  # an n-gram guides the beam
        own = translator.decoding.strategy
        kinds = {GRAPH: own if own == "reranked" else "beam" if guided else "lookahead", **kinds}
    return {
        kind: [
            Example(output.evidence, rightness(output.text, sound.references) if sound.references else 0.0, sound.kind)
            for sound in recordings
            for output in (_heard(translator, sound.samples, strategy),)
        ]
        for kind, strategy in kinds.items()
    }


def _heard(translator: SpeechTranslator, samples: np.ndarray, strategy: str) -> SpokenTranslation:
    """Translate samples (T,) of 16 kHz as `translate_speech` does: silence at both ends is removed; a silent recording
    gives an empty translation."""
    piece = trim_silence(torch.from_numpy(samples))
    if peak(piece) < SILENCE:
        return SpokenTranslation("", [], torch.zeros(0), {})
    return translator.translate([piece], strategy)[0]


# task -> a function that decodes a split, and one that returns the model's folder
TASKS: dict[
    str,
    tuple[Callable[[argparse.Namespace, str], dict[str, list[Example]]], Callable[[argparse.Namespace], Path | None]],
] = {
    "speech": (translated, lambda options: resolve(options.model or DEFAULT_MODEL)),
    "asr": (transcribed, lambda options: load_transcriber(options.model or TRANSCRIBER).directory),
    "vlm": (described, lambda options: seeing_model(options.model, options.corpus).directory),
}


def main() -> None:
    """Run the command: fit, measure, and write the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--model", help="a shipped name or a folder; default: the shipped one")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--other", type=Path, help="as nonsense: speech of another language (asr: none by default), other pictures"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="folders of pairs, for a manifest of speech")
    parser.add_argument("--unseen", type=Path, nargs="+", default=[], help="manifests that only the proof hears")
    parser.add_argument("--count", type=int, default=250, help="recordings or pictures of each split")
    parser.add_argument("--examples", type=Path, help="write what was decoded to this JSON file, to look at it")
    parser.add_argument("--write", action="store_true", help="write confidence.json into the model's folder")
    parser.add_argument("--folder", type=Path, help="into this folder instead, such as that of its shipped drafters")
    options = parser.parse_args()
    if options.other is None and options.task != "asr":
        parser.error(f"--other is needed for {options.task}")
    torch.set_grad_enabled(False)
    decoded, folder = TASKS[options.task]
    held, tests = decoded(options, "dev"), decoded(options, "test")
    calibrations = {kind: fit(examples) for kind, examples in held.items()}
    measured = {kind: measure(calibrations[kind], examples) for kind, examples in tests.items()}
    print(json.dumps(measured, indent=1))
    if options.examples is not None:
        listed = {
            split: {kind: [asdict(example) for example in group] for kind, group in kinds.items()}
            for split, kinds in (("dev", held), ("test", tests))
        }
        options.examples.write_text(json.dumps(listed))
    if options.write:
        home = folder(options)
        assert home is not None  # every model here is loaded from a folder
        print(write_calibrations(options.folder or home, calibrations, measured))
        familiar = seeing_model(options.model, options.corpus).familiar if options.task == "vlm" else None
        if familiar is not None:
            familiar.write(home)


if __name__ == "__main__":
    main()
