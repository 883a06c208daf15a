"""Exports a training run to a folder that `WhisperForConditionalGeneration.from_pretrained` reads.

python -m mmdec.training.whisper.export --run runs/whisper --out runs/whisper-phrasebook
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

from mmdec.hub.medusa import save_heads
from mmdec.hub.publish import keep_card, whole_folder, write_provenance
from mmdec.training.checkpoints import load_averaged, newest
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.training.whisper.window_data import generation_config
from mmdec.types import told


def load_module(checkpoints: Sequence[Path]) -> tuple[WhisperModule, int]:
    """Load a Whisper training module with the mean of its checkpoints' weights. Returns the module, and the training
    step of the last checkpoint."""
    return load_averaged(
        lambda options: WhisperModule(**{**options, "shape": Shape(**options["shape"]), "start": None}), checkpoints
    )


def export(
    checkpoints: Sequence[Path], tokenizer_folder: Path, out: Path, alignment: Sequence[Sequence[int]] | None = None
) -> Path:
    """Write the model in half precision to `out`, and the heads that were trained with it to `out`/medusa. Returns
    `out`. If writing fails, an existing folder stays as it was.

    checkpoints: their weights are averaged. tokenizer_folder: folder of the model's tokenizer.
    alignment: (layer, head) pairs whose cross-attention follows the sound; word timestamps use them.
    Raises: InputError if `out` has a model card and other weights, because the card would then be wrong.
    """
    module, step = load_module(checkpoints)
    tokenizer = WhisperTokenizer.from_pretrained(tokenizer_folder)
    model, settings = module.model, generation_config(tokenizer, module.shape.target_positions)
    model.generation_config = settings
    if alignment:
        settings.alignment_heads = [list(pair) for pair in alignment]  # type: ignore[attr-defined] # undeclared
    with whole_folder(out) as fresh:
        model.half().save_pretrained(fresh)
        WhisperProcessor(WhisperFeatureExtractor(feature_size=module.shape.mels), tokenizer).save_pretrained(fresh)
        shutil.copy(tokenizer_folder / "normalizer.json", fresh)
        save_heads(fresh / "medusa", module.heads.half())
        parameters = {name: value for name, value in module.hparams.items() if name != "units"}
        training = {"checkpoints": len(checkpoints), "step": step, "hyperparameters": parameters}
        write_provenance(fresh, training, model.device)
        keep_card(out, fresh)
    return out


def main() -> None:
    """Run the command: write the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/whisper"))
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--out", type=Path, default=Path("runs/whisper-phrasebook"))
    parser.add_argument("--alignment", type=json.loads, help="JSON list of (layer, head) for word timestamps")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    checkpoints = newest(options.run / "checkpoints", options.average)
    print(export(checkpoints, options.run / "tokenizer", options.out, options.alignment))


if __name__ == "__main__":
    with told():
        main()
