"""The English half of the corpus: distinct recordings and their acoustic targets, which are computed once and stored on
disk: phones, durations, pitch, energy and mel frames.

An alignment is a line like "pau:0.224 w:0.262 eh:0.325": each phone and its END in seconds. Silence (`pau`) at both
ends is removed from phones and sound; inside a sentence it is kept as a phone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.audio import HOP, LOG_FLOOR, MELS, SAMPLE_RATE, energy, load_audio, log_mel, pitch
from mmdec.hub.publish import whole_folder
from mmdec.nn.fastspeech2 import AcousticBatch
from mmdec.phonetics.lexicon import spoken
from mmdec.training.corpora.admission import STRICT, Admission, BadRows, check_apart
from mmdec.training.corpora.cvss import (
    SPECIALS,
    holds_samples,
    no_rows,
    parse_alignment,
    phone_names,
    read_alignments,
    read_translations,
)
from mmdec.training.corpora.text_files import shown
from mmdec.types import InputError

EOS = "</s>"


@dataclass(frozen=True)
class AcousticTargets:
    """One utterance of K phones, the last of them EOS with zeros, and F = sum of durations frames."""

    units: tuple[str, ...]  # (K,) phones, then "</s>"
    durations: Tensor  # (K,) int64, frames
    pitch: Tensor  # (K,) Hz, mean over the phone's frames of the interpolated contour
    energy: Tensor  # (K,) mean over the phone's frames
    mel: Tensor  # (F, 80), natural log
    first_frame: int  # index in the recording: frame f of `mel` is centred on its sample 256 (first_frame + f)


def acoustic_targets(samples: Tensor, phones_with_ends: Sequence[tuple[str, float]]) -> AcousticTargets:
    """Compute the targets of 16 kHz samples (T,) with phones [(phone, end in seconds), ...].

    A duration is round(end * sr / hop) - round(start * sr / hop) frames, so that rounding errors do not add up. A phone
    without frames gets pitch and energy of the nearest phone with frames. The pitch of unvoiced frames is interpolated.
    Raises InputError where the sound ends before its phones.
    """
    span = spoken([phone for phone, _ in phones_with_ends])
    first, last = span.start, span.stop
    if first == last:
        raise InputError("`alignment` must hold a phone other than silence, but holds none. Leave the row out.")
    start = phones_with_ends[first - 1][1] if first else 0.0
    ends = torch.tensor([start, *[end for _, end in phones_with_ends[first:last]]], dtype=torch.float64)
    edges = (
        (ends * (SAMPLE_RATE / HOP)).round().long()
    )  # (K,): the first phone's start, then each phone's end, in frames; EOS has no end
    total = 1 + samples.shape[0] // HOP
    if int(edges[-1]) > total:
        raise InputError(
            f"`samples` must last as long as their phones ({float(ends[-1]):.3f} s), but last "
            f"{samples.shape[0] / SAMPLE_RATE:.3f} s. Align this recording again."
        )
    low, high = int(edges[0]), int(edges[-1])
    durations = edges[1:] - edges[:-1]
    window = slice(low, high)
    zero = torch.zeros(1)
    return AcousticTargets(
        units=(*[phone for phone, _ in phones_with_ends[first:last]], EOS),
        durations=torch.cat([durations, zero.long()]),
        pitch=torch.cat([_phone_means(filled(pitch(samples)[window]), durations), zero]),
        energy=torch.cat([_phone_means(energy(samples)[window], durations), zero]),
        mel=log_mel(samples)[window],
        first_frame=low,
    )


def filled(contour: Tensor) -> Tensor:
    """A pitch contour (F,) in Hz with its zeros replaced: linear between voiced frames, constant at both ends."""
    voiced = torch.nonzero(contour > 0)[:, 0]
    if voiced.numel() == 0:
        return contour
    everywhere = torch.arange(contour.shape[0])
    right = torch.searchsorted(voiced, everywhere).clamp(max=voiced.numel() - 1)
    left = (right - 1).clamp(min=0)
    a, b = voiced[left], voiced[right]
    weight = ((everywhere - a).float() / (b - a).clamp(min=1)).clamp(0, 1)
    return contour[a] + weight * (contour[b] - contour[a])


def _phone_means(values: Tensor, durations: Tensor) -> Tensor:
    """Means of values (F,) over phones of durations (K,) -> (K,)."""
    ends = durations.cumsum(0)
    starts = (ends - durations).clamp(max=values.shape[0] - 1)
    total = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    stops = torch.maximum(ends, starts + 1)
    return ((total[stops] - total[starts]) / (stops - starts)).float()


_PAUSE_FRAMES = 12  # between two joined recordings
_FORMAT = 3  # version of the cache; a change makes old caches invalid


class EnglishSpeech:
    """Distinct sentences of `<root>/{split}.tsv` with `{split}.alignment.tsv` and `{split}/<path>.wav`.

    Of recordings with the same translation and the same phones, only the first is used. Unusable rows are listed in
    `bad`. Targets are cached in half precision under `<root>/../cache/english-...`.
    """

    def __init__(self, root: Path, split: str, limit: int | None = None, admission: Admission = STRICT) -> None:
        self.root, self.split = root, split
        self.rows, self.bad = _distinct(root, split, limit, admission)  # path, text, alignment
        folder = self.folder(root, split, self.rows)
        if not (folder / "index.json").is_file() or self._mended(folder / "index.json"):
            self._build(folder)
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        for reason, name in BadRows(index["bad"]):
            self.bad.add(reason, name)
        self.rows = [self.rows[number] for number in index["kept"]]
        self.units: list[list[str]] = [line.split() for line in index["units"]]
        if not self.rows:
            raise no_rows(split, self.bad)
        self._phones = np.load(folder / "phones.npy")  # (phones, 3): duration, pitch, energy
        self._mel = np.load(folder / "mel.npy", mmap_mode="r")  # (frames, 80) fp16
        self.frames = np.asarray(index["frames"], dtype=np.int64)
        self.first_frames: list[int] = index["first_frames"]
        self._phone_starts = np.concatenate([[0], np.cumsum([len(row) for row in self.units])])
        self._frame_starts = np.concatenate([[0], np.cumsum(self.frames)])

    @staticmethod
    def folder(root: Path, split: str, rows: Sequence[tuple[str, str, str]]) -> Path:
        """The cache folder for these rows. It depends on their texts, alignments and recordings."""
        digest = hashlib.blake2b(f"{root.resolve().name}\n".encode(), digest_size=8)
        for row in rows:
            size = (root / split / f"{row[0]}.wav").stat().st_size
            digest.update("\t".join((*row, f"{size}\n")).encode())
        return root.parent / "cache" / f"english-{split}-{_FORMAT}-{digest.hexdigest()}"

    @classmethod
    def ready(cls, root: Path, split: str, admission: Admission = STRICT) -> bool:
        """Whether the cache of a split exists."""
        return (cls.folder(root, split, _distinct(root, split, None, admission)[0]) / "index.json").is_file()

    def __len__(self) -> int:
        return len(self.rows)

    def wav(self, item: int) -> Path:
        return self.root / self.split / f"{self.rows[item][0]}.wav"

    def text(self, item: int) -> str:
        return self.rows[item][1]

    def mel(self, item: int) -> Tensor:
        """The mel (F, 80) of a recording, natural log, without the silence at its ends."""
        part = self._mel[self._frame_starts[item] : self._frame_starts[item + 1]]
        return torch.from_numpy(part.astype(np.float32))

    def phones(self, item: int) -> Tensor:
        """(3, K) of a recording: durations in frames, pitch in Hz, energy. The last column is EOS, with zeros."""
        return torch.from_numpy(self._phones[self._phone_starts[item] : self._phone_starts[item + 1]].T.copy())

    def by_key(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """(translation, phones without </s>) -> index of the recording."""
        keys = ((row[1], tuple(units[:-1])) for row, units in zip(self.rows, self.units, strict=True))
        return {key: item for item, key in enumerate(keys)}

    def joined(self, items: Sequence[int], pause: bool) -> tuple[Tensor, Tensor]:
        """Phones (3, K) and mel (F, 80) of several recordings in a row; a fifth of a second apart if `pause`."""
        phones, mels = self.phones(items[0]), [self.mel(items[0])]
        for item in items[1:]:
            silence = torch.tensor([[_PAUSE_FRAMES], [float(phones[1, :-1].mean())], [0.0]])
            between = [silence] if pause else []
            phones = torch.cat([phones[:, :-1], *between, self.phones(item)], dim=1)
            mels += [torch.full((_PAUSE_FRAMES, MELS), math.log(LOG_FLOOR))] if pause else []
            mels.append(self.mel(item))
        return phones, torch.cat(mels)

    def batch(self, items: Sequence[int], vocabulary: dict[str, int]) -> tuple[Tensor, AcousticBatch]:
        """Unit ids (B, K) padded with <pad>, and the targets."""
        units = [torch.tensor([vocabulary.get(unit, 3) for unit in self.units[item]]) for item in items]
        targets = acoustic_batch([self.phones(item).T for item in items], [self.mel(item) for item in items])
        return pad_sequence(units, batch_first=True, padding_value=1), targets

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mel mean (80,), mel deviation (80,), and (mean, deviation) of log(Hz + 1) and of log(energy + 1)."""
        count, total, squares = 0, np.zeros(MELS), np.zeros(MELS)
        for start in range(0, len(self._mel), 1 << 16):
            part = self._mel[start : start + (1 << 16)].astype(np.float64)
            count, total, squares = count + len(part), total + part.sum(0), squares + (part**2).sum(0)
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
        spoken = np.log1p(self._phones[self._phones[:, 0] > 0, 1:].astype(np.float64))
        pairs = np.stack([spoken.mean(0), np.maximum(spoken.std(0), 1e-4)], 1)  # (2, 2)
        mean, deviation, pitch, energy = (torch.from_numpy(array).float() for array in (mean, deviation, *pairs))
        return mean, deviation, pitch, energy

    def _mended(self, kept: Path) -> bool:
        """Whether a recording that was bad has changed since."""
        bad = [
            self.root / self.split / f"{name}.wav" for _, name in BadRows(json.loads(kept.read_text("utf-8"))["bad"])
        ]
        return any(wav.stat().st_mtime_ns > kept.stat().st_mtime_ns for wav in bad)

    def _build(self, folder: Path) -> None:
        """Write the cache in one step. Processes that do so at the same time write the same files."""
        bad, kept, units, frames, firsts = BadRows(), [], [], [], []
        phones: list[np.ndarray] = []
        mels: list[np.ndarray] = []
        for number, (name, _, alignment) in enumerate(self.rows):
            try:
                targets = acoustic_targets(
                    load_audio(self.root / self.split / f"{name}.wav"), parse_alignment(alignment)
                )
            except InputError as error:
                bad.add(f"no acoustic targets: {str(error).split(',')[0]}", name)
                continue
            kept.append(number)
            units.append(" ".join(targets.units))
            frames.append(targets.mel.shape[0])
            firsts.append(targets.first_frame)
            phones.append(torch.stack([targets.durations.float(), targets.pitch, targets.energy], 1).numpy())
            mels.append(targets.mel.half().numpy())
        index = {"kept": kept, "units": units, "frames": frames, "first_frames": firsts, "bad": bad.names}
        with whole_folder(folder) as fresh:
            np.save(fresh / "phones.npy", np.concatenate(phones) if phones else np.zeros((0, 3), np.float32))
            np.save(fresh / "mel.npy", np.concatenate(mels) if mels else np.zeros((0, MELS), np.float16))
            (fresh / "index.json").write_text(json.dumps(index), encoding="utf-8")


def acoustic_batch(phones: Sequence[Tensor], mels: Sequence[Tensor]) -> AcousticBatch:
    """Pad phones (K, 3) and mels (F, 80) to the longest."""
    padded = pad_sequence(list(phones), batch_first=True)  # (B, K, 3)
    return AcousticBatch(
        lengths=torch.tensor([len(row) for row in phones]),
        durations=padded[..., 0].long(),
        pitch=padded[..., 1],
        energy=padded[..., 2],
        mel=pad_sequence(list(mels), batch_first=True),
        mel_lengths=torch.tensor([len(mel) for mel in mels]),
    )


class EpochItems:
    """Batches of indices for one epoch of `steps` steps, drawn from (seed, epoch), of items of like length."""

    def __init__(self, lengths: Sequence[int], batch_size: int, steps: int, seed: int, epoch: int) -> None:
        generator = np.random.default_rng([seed, epoch])
        count = batch_size * steps
        rounds = [generator.permutation(len(lengths)) for _ in range(-(-count // len(lengths)))]
        items = np.concatenate(rounds)[:count]
        items = items[np.argsort(np.asarray(lengths)[items], kind="stable")].reshape(steps, batch_size)
        self.batches: list[list[int]] = items[generator.permutation(steps)].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def both_splits(
    root: Path, dev_split: str, limit: int | None, dev_rows: int, admission: Admission
) -> tuple[EnglishSpeech, EnglishSpeech]:
    """Speech for training and for development. Raises InputError if they share recordings, or too many rows are bad."""
    names = ([name for name, _ in read_translations(root, split, admission)] for split in ("train", dev_split))
    check_apart(names, "recordings", "Take them out of train.tsv.")
    splits = EnglishSpeech(root, "train", limit, admission), EnglishSpeech(root, dev_split, dev_rows, admission)
    for speech in splits:
        total = len(speech) + speech.bad.count
        admission.check(speech.bad, total, f"distinct rows of {shown(root / f'{speech.split}.tsv')}")
    return splits


def spoken_vocabulary(root: Path, split: str) -> list[str]:
    """The special units, then the phones of a split's alignments in alphabetical order."""
    phones = {phone for alignment in read_alignments(root, split).values() for phone in phone_names(alignment)}
    return [*SPECIALS, *sorted(phones)]


def _distinct(
    root: Path, split: str, limit: int | None, admission: Admission = STRICT
) -> tuple[list[tuple[str, str, str]], BadRows]:
    """(name, translation, alignment) of the first recording of each translation with the same phones."""
    bad = BadRows()
    translations, alignments = read_translations(root, split, admission), read_alignments(root, split)
    rows: list[tuple[str, str, str]] = []
    seen: set[tuple[str, str]] = set()
    for name, text in translations:
        if limit is not None and len(rows) >= limit:
            break
        alignment = alignments.get(name, "")
        key = (text, " ".join(item.rpartition(":")[0] for item in alignment.split()))
        if not text.strip():
            bad.add("no translation", name)
        elif not alignment:
            bad.add("no alignment", name)
        elif key in seen:
            continue
        elif not holds_samples(root / split / f"{name}.wav"):
            bad.add("target recording missing or empty", name)
        else:
            seen.add(key)
            rows.append((name, text, alignment))
    return rows, bad
