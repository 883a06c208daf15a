"""Compares models by the phone errors of their graph decoder and their autoregressive decoder on the development split.

The function `phone_errors` counts errors as validation does, against the translation that training used. To compare
trainings that used different translations, this command counts errors against the nearest accepted English reference:

python -m mmdec.training.daspeech.compare runs/ablation/*/checkpoints
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmdec import audio
from mmdec.hub.daspeech import DASpeechParts, read_parts
from mmdec.nn.dag_decoder import BOS, EOS, PAD
from mmdec.training.checkpoints import newest
from mmdec.training.corpora.cvss import SpeechPair, corpus_lexicon, read_pairs
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.training.daspeech.corpus import SpeechTranslationData
from mmdec.training.daspeech.export import load_module
from mmdec.training.daspeech.module import DASpeechModule
from mmdec.training.metrics import text as metrics
from mmdec.training.timed_run import validate
from mmdec.types import InputError, told


def phone_errors(model: Path, data: dict[str, Any]) -> float:
    """Return the phone errors per reference phone on the development split, the mean of two decoders: the graph decoder
    and the autoregressive baseline.

    model: a model's folder or a checkpoint. data: arguments of `SpeechTranslationData`.
    Raises: InputError if the model in the folder does not predict phones.
    """
    if model.is_dir():
        parts = read_parts(model, torch.device("cpu"))
        if not isinstance(parts, DASpeechParts):
            raise InputError(f"`model` must be a DASpeech over phones, but '{model}' is none. Name another.")
        module = DASpeechModule(list(parts.units), size="small")
        module.network = parts.model
        module.config = parts.model.config
    else:
        module, _ = load_module([model])
    corpus = SpeechTranslationData(**{**data, "acoustic": False})
    scores = validate(module, corpus)
    return (scores["dev/dag_per"] + scores["dev/ar_per"]) / 2


@torch.inference_mode()
def nearest_errors(
    module: DASpeechModule, rows: Sequence[SpeechPair], lexicon: metrics.Lexicon
) -> dict[str, dict[str, float]]:
    """Score both decoders against the nearest accepted translation. Pauses are not counted.

    rows: sentences with recordings and accepted translations. lexicon: lower-case word -> pronunciations.
    Returns: for "dag" (graph decoder, with lookahead decoding) and "ar" (autoregressive) a dict with "phone_error_rate"
    and "exact", the share of sentences without an error; both from 0 to 1.
    """
    network, units = module.network.eval(), module.hparams["units"]
    errors: dict[str, list[int]] = {"dag": [], "ar": []}
    for row in rows:
        features = audio.fbank(audio.trim_silence(audio.load_audio(row.clip)))[None]
        frames = torch.tensor([features.shape[1]])
        states, sizes = network.encode(features, frames)
        lattice = network.lattice(states, sizes, frames)
        path = lattice.path("lookahead")
        counts = {
            "dag": path.tokens[0].tolist(),
            "ar": network.baseline.generate(states, sizes, int(lattice.lengths[0]))[0],
        }
        for name, tokens in counts.items():
            phones = [units[token] for token in tokens if token not in (-1, BOS, PAD, EOS)]
            errors[name].append(metrics.nearest_phone_errors(phones, row.units, row.references, lexicon))
    total = sum(metrics.count_phones(row.units) for row in rows)
    return {
        name: {"phone_error_rate": sum(counts) / total, "exact": sum(not count for count in counts) / len(counts)}
        for name, counts in errors.items()
    }


def main() -> None:
    """Run the command: for each training, print its scores as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of checkpoints; the last one of each is taken")
    parser.add_argument("--corpus", type=Path, default=Path("data/corpus"))
    parser.add_argument("--split", default="dev")
    parser.add_argument("--limit", type=int, default=200, help="rows, evenly spaced")
    options = parser.parse_args()
    usable, _ = read_pairs(options.corpus / "cv" / "fr", options.corpus / "cvss_c", options.split, scoring=True)
    rows = evenly_spaced(usable, options.limit)
    lexicon = corpus_lexicon(options.corpus)
    if lexicon is None:
        parser.error(f"--corpus must hold lexicon.tsv, but {options.corpus} does not")
    for folder in options.folders:
        module, step = load_module(newest(folder, 1))
        scores = nearest_errors(module, rows, lexicon)
        print(json.dumps({"run": folder.parent.name, "step": step, "rows": len(rows), **scores}), flush=True)


if __name__ == "__main__":
    with told():
        main()
