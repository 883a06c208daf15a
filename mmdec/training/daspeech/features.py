"""Filterbanks of a list of recordings, computed once into one memory-mapped file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdec import audio
from mmdec.checks.files import whole_file, write_whole
from mmdec.training.processes import end_with_parent
from mmdec.types import MmdecError

_FORMAT = 1  # of the features on disk; a change makes the old ones void


def extract(clip: str) -> np.ndarray | str:
    """Features of one recording (N, 80) fp16, or the reason why there are none."""
    try:
        features = audio.fbank(audio.trim_silence(audio.load_audio(clip)))  # as `translate_speech` hears it
    except MmdecError as error:
        return str(error)
    if features.shape[0] < 8 or not bool(torch.isfinite(features).all()):
        return "too short or not finite"
    return features.to(torch.float16).numpy()


def begin_worker(parent: int) -> None:
    """One thread for each worker, which ends with the process that it works for."""
    end_with_parent(parent)
    torch.set_num_threads(1)


class FeatureStore:
    """Filterbanks of a list of recordings in one file, which a few processes make. Its index is written last."""

    def __init__(self, folder: Path, clips: Sequence[Path], jobs: int) -> None:
        self.folder = self.cache_folder(folder, clips)
        kept = self.folder / "index.json"
        if not kept.is_file():
            self._build(clips, jobs)
        index = json.loads(kept.read_text(encoding="utf-8"))
        written = kept.stat().st_mtime_ns
        if any(clip.name in index["bad"] and clip.stat().st_mtime_ns > written for clip in clips):
            self._build(clips, jobs)  # a bad one was mended
            index = json.loads(kept.read_text(encoding="utf-8"))
        self.lengths = np.asarray(index["lengths"], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.reasons: dict[str, str] = index["bad"]
        stored = self.folder / "fbank.f16"  # an empty file cannot be mapped
        empty = stored.stat().st_size == 0
        data = np.zeros(0, np.float16) if empty else np.memmap(stored, np.float16, "r")
        self.data = data.reshape(-1, audio.MELS)

    @staticmethod
    def cache_folder(folder: Path, clips: Sequence[Path]) -> Path:
        """Where the features of these recordings are kept."""
        digest = hashlib.blake2b("\n".join(f"{c.name} {c.stat().st_size}" for c in clips).encode(), digest_size=8)
        name = digest.hexdigest()
        return folder / (name if _FORMAT == 1 else f"{_FORMAT}-{name}")  # the first had no number

    @classmethod
    def ready(cls, folder: Path, clips: Sequence[Path]) -> bool:
        """Whether they have been computed."""
        return (cls.cache_folder(folder, clips) / "index.json").is_file()

    def _build(self, clips: Sequence[Path], jobs: int) -> None:
        lengths, bad = [], {}
        with ExitStack() as stack:
            file = stack.enter_context(whole_file(self.folder / "fbank.f16"))
            names = map(str, clips)
            if jobs > 1:
                pool = stack.enter_context(ProcessPoolExecutor(jobs, initializer=begin_worker, initargs=(os.getpid(),)))
                extracted = pool.map(extract, names, chunksize=32)
            else:
                extracted = map(extract, names)
            for clip, features in zip(clips, extracted, strict=True):
                if isinstance(features, str):
                    bad[clip.name] = features
                    lengths.append(0)
                else:
                    file.write(features.tobytes())
                    lengths.append(len(features))
        write_whole(self.folder / "index.json", json.dumps({"lengths": lengths, "bad": bad}).encode())

    def __getitem__(self, index: int) -> Tensor:
        part = self.data[self.starts[index] : self.starts[index + 1]]
        return torch.from_numpy(part.astype(np.float32))
