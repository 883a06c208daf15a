"""A split of CVSS as shards: features of the source speech in files of some megabytes, read in any order.

The files are litdata's (Lightning's streaming): `chunk-*.bin` with the features, `index.json` with their places. Beside
them `rows.jsonl` has, for each item, its row's texts and number of frames: enough to plan batches without reading one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mmdec.hub.publish import whole_folder
from mmdec.training.corpora.cvss import SpeechPair, parse_alignment
from mmdec.types import InputError

MEGABYTES = 64  # of a shard
ROWS = "rows.jsonl"


def write_shards(folder: Path, items: Iterable[tuple[SpeechPair, Tensor]], megabytes: float = MEGABYTES) -> int:
    """Write pairs and the features (N, 80) of their source speech. The folder is there whole, or not at all.

    Returns: the number of items. Raises: InputError if litdata is missing.
    """
    writer_type: Any = _litdata("litdata.streaming.writer").BinaryWriter
    with whole_folder(folder) as fresh, (fresh / ROWS).open("w", encoding="utf-8") as rows:
        writer = writer_type(str(fresh), chunk_bytes=int(megabytes * 1e6))
        count = 0
        for pair, features in items:
            writer[count] = {"features": features.to(torch.float16).numpy()}
            rows.write(json.dumps(_row(pair, len(features)), ensure_ascii=False) + "\n")
            count += 1
        writer.done()
        writer.merge(1)
    return count


@final
class Shards:
    """Shards that `write_shards` wrote: the pairs, their numbers of frames, and the features by number."""

    def __init__(self, folder: Path) -> None:
        if not (folder / ROWS).is_file():
            raise InputError(
                f"`shards` must hold {ROWS}, but '{folder}' does not. Write them: "
                "python -m mmdec.training.daspeech.shards"
            )
        self._data: Any = _litdata("litdata").StreamingDataset(str(folder))
        lines = (folder / ROWS).read_text(encoding="utf-8").splitlines()
        found = [_pair(json.loads(line), folder, number) for number, line in enumerate(lines, 1)]
        self.pairs = [pair for pair, _ in found]
        self.lengths = np.array([frames for _, frames in found], np.int64)
        self.reasons: dict[str, str] = {}  # bad recordings were left out
        if len(found) != len(self._data):
            raise InputError(
                f"`shards` must have a row for each item, but '{folder}' has {len(found)} rows and {len(self._data)} "
                "items. Write it again."
            )

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._data[index]["features"], np.float32))


def _row(pair: SpeechPair, frames: int) -> dict[str, Any]:
    return {
        "name": pair.name,
        "frames": frames,
        "source": pair.source_text,
        "speaker": pair.speaker,
        "translation": pair.translation,
        "references": pair.references,
        "alignment": " ".join(f"{phone}:{end:g}" for phone, end in pair.alignment),
    }


def _pair(row: Mapping[str, Any], folder: Path, number: int) -> tuple[SpeechPair, int]:
    with suppress(KeyError, TypeError, ValueError):
        name, alignment = str(row["name"]), tuple(parse_alignment(row["alignment"]))
        texts = str(row["translation"]), tuple(map(str, row["references"])), alignment
        place = folder / name  # the recordings themselves are not there
        return SpeechPair(name, place, place, *texts, str(row["source"]), str(row["speaker"])), int(row["frames"])
    raise InputError(f"`shards` must hold whole rows, but line {number} of '{folder / ROWS}' is none. Write it again.")


def _litdata(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError("`shards` need litdata, which is missing. pip install 'mmdec[shards]'.") from error
