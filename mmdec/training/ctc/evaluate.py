"""Error rates of a CTC head on recordings.

python -m mmdec.training.ctc.evaluate --checkpoint runs/ctc/checkpoints/last.ckpt --pieces runs/ctc/pieces.json \\
    --encoder MODEL --corpus data/natural/manifest.tsv --split test

Prints the error rates of pieces and of words (question marks are not counted), each with its 95 % interval over
recordings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmdec.audio import load_audio
from mmdec.hub.daspeech import heard_parts
from mmdec.nn.ctc_head import CtcHead, collapse
from mmdec.nn.whisper_encoder import TAIL
from mmdec.phonetics.pieces import Pieces, heard
from mmdec.training.corpora.librispeech import read_utterances
from mmdec.training.ctc.data import SpeechEncoder, WhisperReader, load_speech_encoder
from mmdec.training.ctc.module import load_module
from mmdec.training.metrics.text import rate, word_edits
from mmdec.types import told


@dataclass(frozen=True)
class Ears:
    """A CTC speech recogniser: a head and the frozen encoder that it was trained on.

    Calling it with a sound file returns logits (1, F, V) for F output frames and V pieces, and the number of frames
    (1,).
    """

    head: CtcHead
    encoder: SpeechEncoder

    @torch.inference_mode()
    def __call__(self, path: Path) -> tuple[Tensor, Tensor]:
        return self.head(*self.encoder.read([load_audio(path)], TAIL))

    def written(self, path: Path) -> list[int]:
        """Return the greedy CTC transcript of a sound file, as piece ids."""
        logits, frames = self(path)
        return collapse(logits.argmax(-1), frames)[0]


def load_ears(checkpoint: Path, encoder: str) -> Ears:
    """Load a CTC head and its encoder.

    checkpoint: a training checkpoint, or the folder of a speech translator that has a CTC head.
    encoder: name or folder of the encoder.
    Raises: InputError for damaged files.
    """
    ears = load_speech_encoder(encoder)
    if checkpoint.is_dir():
        return Ears(heard_parts(checkpoint).model.head.eval(), ears)
    module, _ = load_module([checkpoint])
    if module.top is not None:
        # a checkpoint has trained encoder layers only if the encoder is a Whisper
        assert isinstance(ears, WhisperReader)
        ears = WhisperReader(module.top.give(ears.encoder))
    return Ears(module.head, ears)


def words(text: str) -> str:
    """Normalise a text for the word error rate: words are separated by spaces, question marks are removed, and an
    elided word ("l'") counts as a word."""
    return heard(text).replace("?", " ").replace("'", "' ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: print the error rates. Raises InputError for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--encoder", required=True, help="the name or folder of the model whose encoder the head reads")
    parser.add_argument("--corpus", required=True, help="LibriSpeech's layout, or a manifest")
    parser.add_argument("--split", help="of the corpus")
    parser.add_argument("--limit", type=int, help="recordings at most")
    parser.add_argument("--show", type=int, default=10, help="texts to print (default 10)")
    given = parser.parse_args(arguments)
    ears, pieces = load_ears(given.checkpoint, given.encoder), Pieces.read(given.pieces)
    rows = read_utterances(given.corpus, given.split)[: given.limit]
    counts = []
    for number, row in enumerate(rows):
        found = ears.written(row.path)
        text = pieces.decode(found)
        wanted = pieces.encode(heard(row.text))
        of_pieces = word_edits(" ".join(map(str, wanted)), " ".join(map(str, found)))
        counts.append((word_edits(words(row.text), words(text)), of_pieces))
        if number < given.show:
            print(f"{heard(row.text)}\t{text}")
    for name, column in zip(("words", "pieces"), zip(*counts, strict=True), strict=True):
        found_rate = rate(column)
        print(
            f"{name} wrong: {found_rate['value']:.1%} [{found_rate['low']:.1%}, {found_rate['high']:.1%}] of "
            f"{found_rate['length']}, {len(column)} recordings"
        )


if __name__ == "__main__":
    with told():
        main()
