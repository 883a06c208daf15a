"""Writes CVSS as shards for training from speech to phones. The data module `ShardedData` reads these shards.

python -m mmdec.training.daspeech.shards --common-voice data/common_voice/fr --cvss data/cvss_c --out data/cvss_shards

writes `train/` and `dev/`; `--data mmdec.training.daspeech.shards.ShardedData --data.init_args.shards data/cvss_shards`
trains on them. Batches follow from (seed, epoch) as with the corpus itself, so a killed run can be resumed exactly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from mmdec.training.corpora.admission import Admission, BadRows, check_apart
from mmdec.training.corpora.cvss import SpeechPair, canonical, no_rows, read_pairs, vocabulary
from mmdec.training.corpora.text_files import shown
from mmdec.training.daspeech.corpus import (
    MEGABYTES,
    Shards,
    SpeechDataset,
    SpeechTranslationData,
    extract_all,
    write_shards,
)
from mmdec.types import InputError, told


class ShardedData(SpeechTranslationData):
    """A data module like `SpeechTranslationData`, but it reads shards. It serves only for training from speech to
    phones, because shards have no English speech.

    shards: folder with one folder of shards for each split.
    options: arguments of `SpeechTranslationData`; the corpus folders among them are not read.
    """

    def __init__(self, shards: str, **options: Any) -> None:
        super().__init__(**options)
        self.shards = Path(shards)
        self.opened: dict[str, Shards] = {}
        if self.acoustic:
            raise InputError(
                "`acoustic` must be false with shards, which hold no English speech. Read the corpus itself."
            )

    def opened_shards(self, split: str) -> Shards:
        """Return the shards of a split. They are opened at the first call, and reused later."""
        if split not in self.opened:
            self.opened[split] = Shards(self.shards / split)
        return self.opened[split]

    @cached_property
    def units(self) -> list[str]:
        """Return the vocabulary: the special tokens, and the phones of the training split's alignments."""
        return vocabulary(self.opened_shards("train").pairs)

    def prepare_data(self) -> None:
        """Check that the splits share no recordings. Nothing has to be computed."""
        splits = ("train", self.validation_split)
        names = ([pair.name for pair in self.opened_shards(split).pairs] for split in splits)
        check_apart(names, "recordings", "Write the shards of splits that do not overlap.")

    def _dataset(self, split: str, bad: BadRows, limit: int | None = None) -> SpeechDataset:
        store = self.opened_shards(split)
        most = self.limit if split == "train" else None
        rows = store.pairs[:most]
        numbers = {row.name: number for number, row in enumerate(rows)}
        kept = []
        for row in canonical(rows) if self.rendering == "canonical" else rows:
            if reason := self.misfit(row, int(store.lengths[numbers[row.name]])):
                bad.add(reason, row.name)
            else:
                kept.append(row)
        if not kept:
            raise no_rows(split, bad)
        kept = kept[:limit]
        return SpeechDataset(kept, store, [numbers[row.name] for row in kept], self.units)


def features_of(pairs: Sequence[SpeechPair], jobs: int, bad: BadRows) -> Iterator[tuple[SpeechPair, Tensor]]:
    """Yield each sentence pair with the features (N, 80) of its source speech. Pairs without usable speech are added to
    `bad` instead. jobs: number of processes."""
    found = extract_all([pair.clip for pair in pairs], jobs)
    for pair, features in zip(pairs, found, strict=True):
        if isinstance(features, str):
            bad.add(f"source recording unusable: {features.partition(', but ')[0]}", pair.name)
        else:
            yield pair, torch.from_numpy(features)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: write the shards of each split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--common-voice", type=Path, required=True)
    parser.add_argument("--cvss", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="new folder, or one to which splits are added")
    parser.add_argument("--splits", nargs="+", default=["train", "dev"])
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="of a shard")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compute features")
    given = parser.parse_args(arguments)
    admission = Admission()
    for split in given.splits:
        pairs, bad = read_pairs(given.common_voice, given.cvss, split, admission=admission)
        total = len(pairs) + bad.count
        count = write_shards(given.out / split, features_of(pairs, given.jobs, bad), given.megabytes)
        admission.check(bad, total, f"rows of {shown(given.cvss / f'{split}.tsv')}")
        rank_zero_info(f"{given.out / split}: {count} of {total} rows {bad.report()}")


if __name__ == "__main__":
    with told():
        main()
