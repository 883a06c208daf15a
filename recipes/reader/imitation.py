"""Writes what a CTC head hears wrongly, for readers that learn from imitated text.

python recipes/reader/imitation.py --head runs/ctc/checkpoints/last.ckpt --encoder MODEL --pieces \\
    runs/ctc/pieces.json --corpus data/natural/manifest.tsv --skip 4000 --out runs/reader/confusions.safetensors

`--skip` is the number of recordings that the head was trained on (`limit` in its recipe): on these recordings the head
makes too few errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from mmdec.daspeech.checkpoint import load_piece_translator
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts
from mmdec.daspeech.training.reader.confusions import START, collect_confusions
from mmdec.drafters.ctc.network import CtcTranscripts, best_pieces
from mmdec.drafters.ctc.training.module import load_ctc_recogniser
from mmdec.errors import InputError, exit_on_error
from mmdec.io.audio import load_audio
from mmdec.phonetics.pieces import PieceTokenizer, normalise_for_speech
from mmdec.training.corpora.librispeech import read_utterances


def _listener(head: Path, encoder: str | None) -> Callable[[Path], CtcTranscripts]:
    """Return a function that maps a sound file to a CTC head's output.

    head: a speech translator's folder: its encoder, head and n-gram are used. Or a checkpoint of a head: it reads
        `encoder`, and is decoded greedily.
    """
    if not head.is_dir():
        recognise = load_ctc_recogniser(head, encoder or "")
        return lambda path: best_pieces(*recognise(path))
    model = cast(PieceTranslatorParts, load_piece_translator(head)).model.eval()

    @torch.inference_mode()
    def listen(path: Path) -> CtcTranscripts:
        return model.recognise(*model.features([load_audio(path)]))[0]

    return listen


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: write the file of the head's typical errors. Raises InputError for a file that cannot be
    read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="checkpoint, or a translator's folder")
    for name in ("pieces", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--encoder", help="the name or folder of the model whose encoder a checkpoint reads")
    parser.add_argument("--corpus", required=True, help="LibriSpeech's layout, or a manifest")
    parser.add_argument("--split", default="train", help="of the corpus (default train)")
    parser.add_argument(
        "--skip", type=int, required=True, help="recordings that the head was trained on, the first ones"
    )
    given = parser.parse_args(arguments)
    if given.encoder is None and not given.head.is_dir():
        raise InputError("`encoder` must be given with a checkpoint as `head`, but is not. Name the head's.")
    listen, pieces = _listener(given.head, given.encoder), PieceTokenizer.read(given.pieces)
    rows = read_utterances(given.corpus, given.split)[given.skip :]
    texts = (pieces.encode(normalise_for_speech(row.text)) for row in rows)
    found = collect_confusions((text, listen(row.path)) for text, row in zip(texts, rows, strict=True))
    found.save(given.out)
    wrong = 1 - len(found.recognised) / max(int((found.true_pieces != START).sum()), 1)
    print(f"{len(found.true_pieces)} pieces of {len(rows)} recordings, {wrong:.1%} not heard first, in {given.out}")


if __name__ == "__main__":
    with exit_on_error():
        main()
