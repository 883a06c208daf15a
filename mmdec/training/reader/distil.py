"""A folder of pairs whose English is the autoregressive decoder's own: what the graph learns from beside references.

python -m mmdec.training.reader.distil --checkpoint runs/reader/checkpoints/last.ckpt --pieces runs/ctc/pieces.json \\
    --english runs/reader/english.json --text data/everyday --out data/own

Of several right translations a teacher tends to choose the same kind, which one graph can hold (Kim and Rush 2016; Gu
et al. 2018, section 4.3).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mmdec.phonetics.pieces import Pieces
from mmdec.training.corpora.text_files import evenly_spaced
from mmdec.training.corpora.text_pairs import read_text_pairs
from mmdec.training.reader.evaluate import from_text, load_reader
from mmdec.types import MmdecError

SHOW = 3200  # sentences between two lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for what cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "pieces", "english", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="sentences at most, at equal distances")
    given = parser.parse_args(arguments)
    try:
        network, pieces, english = load_reader(given.checkpoint), Pieces.read(given.pieces), Pieces.read(given.english)
        pairs = evenly_spaced(read_text_pairs(given.text, "train"), given.limit)
        pairs.sort(key=lambda pair: len(pair.source))  # rows of a batch end together
        rows = []
        for pair, units in zip(pairs, from_text(network, pieces, pairs), strict=True):
            text = english.decode(units)
            if text:
                rows.append((pair.name, pair.group, pair.source, text))
            if len(rows) % SHOW == 0:
                print(f"{len(rows)} of {len(pairs)}", flush=True)
    except MmdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    partial = given.out / "train.tsv.partial"
    partial.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, given.out / "train.tsv")
    print(f"{len(rows)} sentences in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
