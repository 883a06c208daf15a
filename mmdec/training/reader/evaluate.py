"""Scores a text translator (the reader and its autoregressive decoder) on exact text or on a CTC head's output.

python -m mmdec.training.reader.evaluate --checkpoint runs/reader/checkpoints/last.ckpt --pieces runs/ctc/pieces.json \\
    --english runs/reader/english.json --text data/everyday --split test
... --head runs/ctc/checkpoints/last.ckpt --encoder MODEL --corpus data/natural/manifest.tsv    # from speech

Prints BLEU (sacrebleu's 13a, case and punctuation kept) and chrF against all references of each sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmdec.nn.ctc_head import best_pieces
from mmdec.nn.piece_reader import PiecesToUnits, unit_limits
from mmdec.phonetics.pieces import Pieces, heard
from mmdec.training.corpora.librispeech import Utterance, read_utterances
from mmdec.training.corpora.text_files import TextPair, evenly_spaced, read_text_pairs, references_of
from mmdec.training.ctc.evaluate import Ears, load_ears
from mmdec.training.metrics.text import bleu, chrf
from mmdec.training.reader.module import load_module
from mmdec.types import InputError, told

BATCH, LARGE_BATCH = 32, 1024  # number of sentences that are translated together: on a CPU, on other devices


def from_text(network: PiecesToUnits, pieces: Pieces, rows: Sequence[TextPair]) -> Iterator[list[int]]:
    """Translate each sentence from its exact text, on the network's device. pieces: the source tokenizer. Yields the
    target piece ids of each."""
    device = next(network.parameters()).device
    size = BATCH if device.type == "cpu" else LARGE_BATCH
    for start in range(0, len(rows), size):
        sources = [torch.tensor(pieces.encode(heard(pair.source)) or [0]) for pair in rows[start : start + size]]
        lengths = torch.tensor([len(source) for source in sources], device=device)
        with torch.inference_mode():
            states = network.read(torch.nn.utils.rnn.pad_sequence(sources, batch_first=True).to(device), lengths)
            yield from network.ar.generate(states, lengths, max(unit_limits(lengths)))


def from_sound(network: PiecesToUnits, ears: Ears, rows: Sequence[Utterance]) -> Iterator[list[int]]:
    """Translate each recording. ears: the CTC recogniser, a head with its encoder. Yields the target piece ids of each;
    an empty list if the head recognises nothing."""
    for row in rows:
        with torch.inference_mode():
            found = best_pieces(*ears(row.path))
            if not int(found.lengths[0]):
                yield []
                continue
            states = network.reader(found.pieces, found.weights, found.lengths)
            yield from network.ar.generate(states, found.lengths, max(unit_limits(found.lengths)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: translate, and print the scores. Raises InputError for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "pieces", "english"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders of pairs")
    parser.add_argument("--split", default="dev", help="of the text, and of the corpus (default dev)")
    parser.add_argument("--head", type=Path, help="checkpoint of a CTC head: translate the recordings of --corpus")
    parser.add_argument("--encoder", help="the name or folder of the model whose encoder the head reads")
    parser.add_argument("--corpus", help="LibriSpeech's layout, or a manifest")
    parser.add_argument("--limit", type=int, help="sentences at most, at equal distances")
    parser.add_argument("--show", type=int, default=10, help="translations to print (default 10)")
    given = parser.parse_args(arguments)
    network, pieces, english = (
        load_module([given.checkpoint])[0].network,
        *map(Pieces.read, (given.pieces, given.english)),
    )
    if given.head is not None:
        if not (given.encoder and given.corpus):
            raise InputError("`encoder` and `corpus` must be given with `head`, but are not. See --help.")
        sounds = evenly_spaced(read_utterances(given.corpus, given.split), given.limit)
        sources = [row.text for row in sounds]
        references = references_of([row.path.stem for row in sounds], given.text, given.split)
        written = list(from_sound(network, load_ears(given.head, given.encoder), sounds))
    else:
        pairs = [pair for folder in given.text for pair in read_text_pairs(folder, given.split)]
        pairs = evenly_spaced(pairs, given.limit)
        sources, references = [pair.source for pair in pairs], [pair.references for pair in pairs]
        written = list(from_text(network, pieces, pairs))
    texts = [english.decode(units) for units in written]
    for row in list(zip(sources, texts, references, strict=True))[: given.show]:
        print(f"{row[0]}\t{row[1]}\t{' | '.join(row[2])}")
    print(f"BLEU {bleu(texts, references).value:.1f}, chrF {chrf(texts, references).value:.1f}, {len(texts)} sentences")


if __name__ == "__main__":
    with told():
        main()
