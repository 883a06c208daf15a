"""Writes pairs whose English side is the autoregressive decoder's output: further training data of the graph decoder.

python recipes/reader/distil.py --checkpoint runs/reader/checkpoints/last.ckpt --pieces runs/ctc/pieces.json \\
    --english runs/reader/english.json --text data/everyday --out data/own

A sentence has several correct translations. A trained decoder chooses among them in a consistent way, so its output is
easier to model with one graph (Kim and Rush 2016; Gu et al. 2018, section 4.3).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmdec.checks.devices import check_device
from mmdec.checks.files import write_atomically
from mmdec.checks.sampling import evenly_spaced
from mmdec.daspeech.piece_reader import PiecesToUnits, unit_limits
from mmdec.daspeech.training.reader.module import load_module
from mmdec.errors import exit_on_error
from mmdec.phonetics.pieces import PieceTokenizer, normalise_for_speech
from mmdec.training.corpora.text_files import TextPair, read_text_pairs

SHOW = 3200  # number of sentences between two lines of progress
BATCH, LARGE_BATCH = 32, 1024  # number of sentences that are translated together: on a CPU, on other devices


def from_text(network: PiecesToUnits, pieces: PieceTokenizer, rows: Sequence[TextPair]) -> Iterator[list[int]]:
    """Translate each sentence from its exact text, on the network's device. pieces: the source tokenizer. Yields the
    target piece ids of each."""
    device = next(network.parameters()).device
    size = BATCH if device.type == "cpu" else LARGE_BATCH
    for start in range(0, len(rows), size):
        sources = [
            torch.tensor(pieces.encode(normalise_for_speech(pair.source)) or [0]) for pair in rows[start : start + size]
        ]
        lengths = torch.tensor([len(source) for source in sources], device=device)
        with torch.inference_mode():
            states = network.encode(torch.nn.utils.rnn.pad_sequence(sources, batch_first=True).to(device), lengths)
            yield from network.autoregressive.generate(states, lengths, max(unit_limits(lengths)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: translate the sentences of a folder, and write the pairs. Raises InputError for a file that
    cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "pieces", "english", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="sentences at most, at equal distances")
    parser.add_argument("--device", help="cpu, or cuda:0; default: a GPU if there is one")
    given = parser.parse_args(arguments)
    network, pieces, english = (
        load_module([given.checkpoint])[0].network.to(check_device(given.device)),
        *map(PieceTokenizer.read, (given.pieces, given.english)),
    )
    pairs = evenly_spaced(read_text_pairs(given.text, "train"), given.limit)
    # sentences of similar length form a batch, so that they end at about the same step
    pairs.sort(key=lambda pair: len(pair.source))
    rows = []
    for number, (pair, units) in enumerate(zip(pairs, from_text(network, pieces, pairs), strict=True), 1):
        text = english.decode(units)
        if text:
            rows.append((pair.name, pair.group, pair.source, text))
        if number % SHOW == 0:
            print(f"{number} of {len(pairs)}", flush=True)
    write_atomically(given.out / "train.tsv", "".join("\t".join(row) + "\n" for row in rows).encode())
    print(f"{len(rows)} sentences in {given.out}")


if __name__ == "__main__":
    with exit_on_error():
        main()
