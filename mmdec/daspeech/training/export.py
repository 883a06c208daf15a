"""Builds a model's folder from checkpoints (their weights are averaged) and a vocoder.

python -m mmdec.daspeech.training.export --joint runs/joint/checkpoints --vocoder runs/vocoder \
    --out runs/daspeech-phrasebook
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmdec.daspeech.checkpoint import save_model
from mmdec.daspeech.model import DASpeech
from mmdec.daspeech.training.acoustic import save_weights
from mmdec.daspeech.training.module import DASpeechModule
from mmdec.daspeech.training.vocoder import load_vocoder
from mmdec.errors import InputError, exit_on_error
from mmdec.training.checkpoints import load_averaged, newest_checkpoints


def load_module(checkpoints: Sequence[Path]) -> tuple[DASpeechModule, int]:
    """Load a DASpeech training module with the mean of its checkpoints' weights.

    Returns:
        The module, and the training step of the last checkpoint.
    """
    return load_averaged(DASpeechModule, checkpoints)


def assemble(checkpoints: Sequence[Path], vocoder_folder: Path, out: Path) -> Path:
    """Write a speech translator's folder, and return it.

    Args:
        checkpoints: Files from the joint training; their weights are averaged.
        vocoder_folder: Output of the vocoder's training.
    """
    module, step = load_module(checkpoints)
    if not isinstance(module.network, DASpeech):
        raise InputError("`checkpoints` must come from the joint stage, but have no acoustic model. Run that stage.")
    vocoder = load_vocoder(vocoder_folder)
    units: list[str] = module.hparams["units"]
    training = {"checkpoints": len(checkpoints), "step": step, "hyperparameters": dict(module.hparams)}
    return save_model(out, module.network, vocoder, units, provenance={"training": training})


def main() -> None:
    """Run the command: write a speech translator's folder, or only the weights of its network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joint", type=Path, default=Path("runs/joint/checkpoints"))
    parser.add_argument("--average", type=int, default=1, help="checkpoints to average, the last ones")
    parser.add_argument("--vocoder", type=Path, default=Path("runs/vocoder"))
    parser.add_argument("--out", type=Path, default=Path("runs/daspeech-phrasebook"))
    parser.add_argument("--network-only", type=Path, help="write the network's weights here and stop")
    options = parser.parse_args()
    checkpoints = newest_checkpoints(options.joint, options.average)
    if options.network_only:
        save_weights(load_module(checkpoints)[0].network, options.network_only)
        return
    assemble(checkpoints, options.vocoder, options.out)


if __name__ == "__main__":
    with exit_on_error():
        main()
