"""How much of what is said a CTC head writes wrongly, from the sound on.

python -m mmdec.training.ctc.evaluate --checkpoint runs/ctc/checkpoints/last.ckpt --pieces runs/ctc/pieces.json \\
    --encoder MODEL --corpus data/natural/manifest.tsv --split test

Pieces and words, without the question mark; each with its 95 % interval over recordings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmdec.audio import load_audio
from mmdec.checks.errors import MmdecError
from mmdec.corpora.librispeech import Utterance, read_utterances
from mmdec.hub.whisper_encoder import load_encoder
from mmdec.metrics.word_errors import Edits, rate, word_edits
from mmdec.nn.ctc_head import CtcHead, collapse
from mmdec.nn.whisper_encoder import WhisperEncoder, read_states
from mmdec.phonetics.pieces import Pieces, heard
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.ctc.module import CtcModule


def load_head(checkpoint: Path) -> CtcHead:
    """The head of a training's checkpoint, in evaluation mode. Raises InputError for a damaged one."""
    saved = read_checkpoint(checkpoint)
    # Names with an underscore are the command line's own notes.
    module = CtcModule(**{name: value for name, value in saved["hyper_parameters"].items() if name[0] != "_"})
    module.load_state_dict(saved["state_dict"])
    return module.head.eval()


def written(
    head: CtcHead, encoder: WhisperEncoder, pieces: Pieces, rows: Sequence[Utterance]
) -> Iterator[tuple[str, list[int]]]:
    """Text and pieces of each recording, greedy, read one at a time at its own length."""
    for row in rows:
        with torch.inference_mode():
            states, lengths = read_states(encoder, [load_audio(row.path)])
            logits, frames = head(states, lengths)
            found = collapse(logits.argmax(-1), frames)[0]
        yield pieces.decode(found), found


def words(text: str) -> str:
    """What is counted: the words, an elided one ("l'") for itself."""
    return heard(text).replace("?", " ").replace("'", "' ")


def errors(pieces: Pieces, text: str, wrote: str, found: Sequence[int]) -> tuple[Edits, Edits]:
    """Edits of words, and of pieces, of one recording."""
    wanted = pieces.encode(heard(text))
    return word_edits(words(text), words(wrote)), word_edits(" ".join(map(str, wanted)), " ".join(map(str, found)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for what cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--encoder", required=True, help="a Whisper's name or folder")
    parser.add_argument("--corpus", required=True, help="LibriSpeech's layout, or a manifest")
    parser.add_argument("--split", help="of the corpus")
    parser.add_argument("--limit", type=int, help="recordings at most")
    parser.add_argument("--show", type=int, default=10, help="texts to print (default 10)")
    given = parser.parse_args(arguments)
    try:
        head, pieces, encoder = load_head(given.checkpoint), Pieces.read(given.pieces), load_encoder(given.encoder)
        rows = read_utterances(given.corpus, given.split)[: given.limit]
        counts = []
        for number, (row, (text, found)) in enumerate(zip(rows, written(head, encoder, pieces, rows), strict=True)):
            counts.append(errors(pieces, row.text, text, found))
            if number < given.show:
                print(f"{heard(row.text)}\t{text}")
    except MmdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, column in zip(("words", "pieces"), zip(*counts, strict=True), strict=True):
        found_rate = rate(column)
        print(
            f"{name} wrong: {found_rate['value']:.1%} [{found_rate['low']:.1%}, {found_rate['high']:.1%}] of "
            f"{found_rate['length']}, {len(column)} recordings"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
