"""Training of text-to-speech: FastSpeech 2 learns mel frames from phones (the second of DASpeech's three stages).

The training data are the distinct English recordings of the corpus. An alignment is a line like "pau:0.224 w:0.262
eh:0.325": each phone and its end in seconds. Silence (`pau`) at both ends is removed; inside a sentence it is a phone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from mmdec.checks.files import quote_path, write_atomically
from mmdec.daspeech.acoustic import (
    AcousticBatch,
    AcousticLoss,
    FastSpeech2,
    FastSpeech2Config,
    FastSpeech2Output,
    acoustic_loss,
)
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder
from mmdec.io.audio import HOP, LOG_FLOOR, MELS, SAMPLE_RATE, energy, load_audio, log_mel, pitch
from mmdec.phonetics.lexicon import spoken_slice
from mmdec.training.corpora.admission import MAX_BAD_SHARE, STRICT, Admission, BadRows, check_apart
from mmdec.training.corpora.cvss import (
    SPECIALS,
    holds_samples,
    no_rows_error,
    parse_alignment,
    phone_names,
    read_alignments,
    read_translations,
)
from mmdec.training.optim import Schedule, token_weight, with_schedule

EOS = "</s>"


@dataclass(frozen=True)
class AcousticTargets:
    """FastSpeech 2's targets for an utterance of K phones and F frames. The last phone is EOS; its values are all 0."""

    units: tuple[str, ...]  # (K,) phones, then "</s>"
    durations: Tensor  # (K,) int64, frames; their sum is F
    pitch: Tensor  # (K,) Hz, mean over the phone's frames; unvoiced frames are interpolated
    energy: Tensor  # (K,) mean over the phone's frames, linear
    mel: Tensor  # (F, 80) natural logarithms of mel bands
    first_frame: int  # frame f of `mel` is centred on sample 256 * (first_frame + f) of the recording


def acoustic_targets(samples: Tensor, phones_with_ends: Sequence[tuple[str, float]]) -> AcousticTargets:
    """Compute FastSpeech 2's targets from 16 kHz samples (T,) and phones [(phone, end in seconds), ...].

    Starts and ends are rounded to frames before durations are computed, so that rounding errors do not add up. A phone
    without frames gets pitch and energy of the frame at its start. Pitch is interpolated over unvoiced frames.

    Raises:
        InputError: If the sound ends before the last phone.
    """
    span = spoken_slice([phone for phone, _ in phones_with_ends])
    first, last = span.start, span.stop
    if first == last:
        raise InputError("`alignment` must hold a phone other than silence, but holds none. Leave the row out.")
    start = phones_with_ends[first - 1][1] if first else 0.0
    ends = torch.tensor([start, *[end for _, end in phones_with_ends[first:last]]], dtype=torch.float64)
    # the first phone's start, then each phone's end, in frames; EOS is not included
    edges = (ends * (SAMPLE_RATE / HOP)).round().long()
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
        pitch=torch.cat([_phone_means(interpolate_pitch(pitch(samples)[window]), durations), zero]),
        energy=torch.cat([_phone_means(energy(samples)[window], durations), zero]),
        mel=log_mel(samples)[window],
        first_frame=low,
    )


def interpolate_pitch(contour: Tensor) -> Tensor:
    """Interpolate a pitch contour (F,) in Hz where it is 0 (unvoiced): linearly inside, constant at both ends."""
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
    """Average values (F,) over the frames of each phone.

    Args:
        durations: (K,) frames.

    Returns:
        (K,).
    """
    ends = durations.cumsum(0)
    starts = (ends - durations).clamp(max=values.shape[0] - 1)
    total = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    stops = torch.maximum(ends, starts + 1)
    return ((total[stops] - total[starts]) / (stops - starts)).float()


_PAUSE_FRAMES = 12  # frames of silence between two joined recordings
_FORMAT = 3  # version number in the name of the cache's folder; increase it to make old caches unused


class EnglishSpeech:
    """The English recordings of a split and their acoustic targets, which are cached in `<root>/../cache/english-...`.

    Reads `{split}.tsv`, `{split}.alignment.tsv` and `{split}/<name>.wav` in `root`. Of recordings with the same
    translation and phones, only the first is used. `bad` lists unusable rows.

    Args:
        limit: Use at most this many rows.
    """

    def __init__(self, root: Path, split: str, limit: int | None = None, admission: Admission = STRICT) -> None:
        self.root, self.split = root, split
        self.rows, self.bad = _distinct(root, split, limit, admission)  # (name, translation, alignment) of each
        folder = self.folder(root, split, self.rows)
        index_file = folder / "index.json"
        if not index_file.is_file() or self._is_repaired(index_file):
            self._build(folder)
        index = json.loads(index_file.read_text(encoding="utf-8"))
        for reason, name in BadRows(index["bad"]):
            self.bad.add(reason, name)
        self.rows = [self.rows[number] for number in index["kept"]]
        self.units: list[list[str]] = [line.split() for line in index["units"]]
        if not self.rows:
            raise no_rows_error(split, self.bad)
        self._phones = np.load(folder / "phones.npy")  # (phones of all recordings, 3): duration, pitch, energy
        self._mel = np.load(folder / "mel.npy", mmap_mode="r")  # (frames of all recordings, 80) fp16
        self.frames = np.asarray(index["frames"], dtype=np.int64)
        self.first_frames: list[int] = index["first_frames"]
        self._phone_starts = np.concatenate([[0], np.cumsum([len(row) for row in self.units])])
        self._frame_starts = np.concatenate([[0], np.cumsum(self.frames)])

    @staticmethod
    def folder(root: Path, split: str, rows: Sequence[tuple[str, str, str]]) -> Path:
        """Return the cache folder for rows (name, translation, alignment): a hash of them and of file sizes."""
        digest = hashlib.blake2b(f"{root.resolve().name}\n".encode(), digest_size=8)
        for row in rows:
            size = (root / split / f"{row[0]}.wav").stat().st_size
            digest.update("\t".join((*row, f"{size}\n")).encode())
        return root.parent / "cache" / f"english-{split}-{_FORMAT}-{digest.hexdigest()}"

    @classmethod
    def ready(cls, root: Path, split: str, admission: Admission = STRICT) -> bool:
        """Return whether the cache of a whole split exists."""
        return (cls.folder(root, split, _distinct(root, split, None, admission)[0]) / "index.json").is_file()

    def __len__(self) -> int:
        return len(self.rows)

    def wav(self, item: int) -> Path:
        return self.root / self.split / f"{self.rows[item][0]}.wav"

    def mel(self, item: int) -> Tensor:
        """Return a recording's mel (F, 80), natural logarithms, without the silence at its ends.

        Args:
            item: Its index.
        """
        part = self._mel[self._frame_starts[item] : self._frame_starts[item + 1]]
        return torch.from_numpy(part.astype(np.float32))

    def phones(self, item: int) -> Tensor:
        """Return (3, K) for a recording's K phones: duration in frames, pitch in Hz, energy. The last is EOS: zeros."""
        return torch.from_numpy(self._phones[self._phone_starts[item] : self._phone_starts[item + 1]].T.copy())

    def by_key(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Map each (translation, phones without </s>) to the index of its recording."""
        keys = ((row[1], tuple(units[:-1])) for row, units in zip(self.rows, self.units, strict=True))
        return {key: item for item, key in enumerate(keys)}

    def join(self, items: Sequence[int], pause: bool) -> tuple[Tensor, Tensor]:
        """Join recordings: phones (3, K) and mel (F, 80).

        Args:
            pause: Put 0.2 s of silence between two recordings.
        """
        phones, mels = self.phones(items[0]), [self.mel(items[0])]
        for item in items[1:]:
            silence = torch.tensor([[_PAUSE_FRAMES], [float(phones[1, :-1].mean())], [0.0]])
            between = [silence] if pause else []
            phones = torch.cat([phones[:, :-1], *between, self.phones(item)], dim=1)
            mels += [torch.full((_PAUSE_FRAMES, MELS), math.log(LOG_FLOOR))] if pause else []
            mels.append(self.mel(item))
        return phones, torch.cat(mels)

    def batch(self, items: Sequence[int], vocabulary: Sequence[str]) -> tuple[Tensor, AcousticBatch]:
        """Make a batch of recordings.

        Returns:
            Phone ids (B, K), indices in `vocabulary` padded with <pad>; and the acoustic targets.
        """
        ids = {unit: number for number, unit in enumerate(vocabulary)}
        units = [torch.tensor([ids.get(unit, 3) for unit in self.units[item]]) for item in items]
        targets = acoustic_batch([self.phones(item).T for item in items], [self.mel(item) for item in items])
        return pad_sequence(units, batch_first=True, padding_value=1), targets

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the statistics of the training data.

        Returns:
            Mean (80,) and standard deviation (80,) of the mel; (mean, deviation) of log(Hz + 1), and of log(energy +
            1).
        """
        count, total, squares = 0, np.zeros(MELS), np.zeros(MELS)
        for start in range(0, len(self._mel), 1 << 16):
            part = self._mel[start : start + (1 << 16)].astype(np.float64)
            count, total, squares = count + len(part), total + part.sum(0), squares + (part**2).sum(0)
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
        logarithms = np.log1p(self._phones[self._phones[:, 0] > 0, 1:].astype(np.float64))
        pairs = np.stack([logarithms.mean(0), np.maximum(logarithms.std(0), 1e-4)], 1)  # (2, 2): of pitch and of energy
        mean, deviation, pitch, energy = (torch.from_numpy(array).float() for array in (mean, deviation, *pairs))
        return mean, deviation, pitch, energy

    def _is_repaired(self, index_file: Path) -> bool:
        """Return whether a bad recording's file has changed since the cache's index file, `index_file`, was written."""
        names = [name for _, name in BadRows(json.loads(index_file.read_text("utf-8"))["bad"])]
        wavs = (self.root / self.split / f"{name}.wav" for name in names)
        return any(wav.stat().st_mtime_ns > index_file.stat().st_mtime_ns for wav in wavs)

    def _build(self, folder: Path) -> None:
        """Compute the targets and write the cache, completely or not at all. Several processes may do this at once."""
        bad, rows, units, frames, firsts = BadRows(), [], [], [], []
        phones: list[np.ndarray] = []
        mels: list[np.ndarray] = []
        for number, (name, _, alignment) in enumerate(self.rows):
            try:
                targets = acoustic_targets(load_audio(self.wav(number)), parse_alignment(alignment))
            except InputError as error:
                bad.add(f"no acoustic targets: {str(error).split(',')[0]}", name)
                continue
            rows.append(number)
            units.append(" ".join(targets.units))
            frames.append(targets.mel.shape[0])
            firsts.append(targets.first_frame)
            phones.append(torch.stack([targets.durations.float(), targets.pitch, targets.energy], 1).numpy())
            mels.append(targets.mel.half().numpy())
        index = {"kept": rows, "units": units, "frames": frames, "first_frames": firsts, "bad": bad.names}
        with atomic_folder(folder) as fresh:
            np.save(fresh / "phones.npy", np.concatenate(phones) if phones else np.zeros((0, 3), np.float32))
            np.save(fresh / "mel.npy", np.concatenate(mels) if mels else np.zeros((0, MELS), np.float16))
            (fresh / "index.json").write_text(json.dumps(index), encoding="utf-8")


def acoustic_batch(phones: Sequence[Tensor], mels: Sequence[Tensor]) -> AcousticBatch:
    """Batch the phones (K, 3) (duration, pitch, energy) and mels (F, 80) of utterances, padded to the longest."""
    padded = pad_sequence(list(phones), batch_first=True)  # shape (B, K, 3)
    return AcousticBatch(
        lengths=torch.tensor([len(row) for row in phones]),
        durations=padded[..., 0].long(),
        pitch=padded[..., 1],
        energy=padded[..., 2],
        mel=pad_sequence(list(mels), batch_first=True),
        mel_lengths=torch.tensor([len(mel) for mel in mels]),
    )


def epoch_batches(lengths: Sequence[int], batch_size: int, steps: int, seed: int, epoch: int) -> list[list[int]]:
    """Draw one epoch's `steps` batches of item indices from (seed, epoch). A batch has items of similar length."""
    generator = np.random.default_rng([seed, epoch])
    count = batch_size * steps
    rounds = [generator.permutation(len(lengths)) for _ in range(-(-count // len(lengths)))]
    items = np.concatenate(rounds)[:count]
    items = items[np.argsort(np.asarray(lengths)[items], kind="stable")].reshape(steps, batch_size)
    return items[generator.permutation(steps)].tolist()


def read_train_and_dev(
    root: Path, dev_split: str, limit: int | None, dev_rows: int, admission: Admission
) -> tuple[EnglishSpeech, EnglishSpeech]:
    """Read the training speech (at most `limit` rows) and the development speech (at most `dev_rows`).

    Raises:
        InputError: If they share recordings or too many rows are bad.
    """
    names = ([name for name, _ in read_translations(root, split, admission)] for split in ("train", dev_split))
    check_apart(names, "recordings", "Remove them from train.tsv.")
    splits = EnglishSpeech(root, "train", limit, admission), EnglishSpeech(root, dev_split, dev_rows, admission)
    for speech in splits:
        table = f"'{quote_path(root / f'{speech.split}.tsv')}'"
        admission.check(speech.bad, len(speech) + speech.bad.count, f"distinct rows of {table}")
    return splits


def _distinct(
    root: Path, split: str, limit: int | None, admission: Admission = STRICT
) -> tuple[list[tuple[str, str, str]], BadRows]:
    """Return the rows (name, translation, alignment) of a split without repetitions, and the bad rows."""
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


def save_weights(network: nn.Module, path: Path) -> None:
    """Save a network's weights as safetensors, which the callback `InitialWeights` loads into a later training."""
    write_atomically(path, save({name: value.contiguous().cpu() for name, value in network.state_dict().items()}))


def save_stage(folder: Path, name: str, network: nn.Module, described: dict[str, Any]) -> None:
    """Write a stage's result: the weights to `{name}.safetensors`, and the dict `described` to `{name}.json`."""
    save_weights(network, folder / f"{name}.safetensors")
    write_atomically(folder / f"{name}.json", json.dumps(described, indent=1).encode())


def distributed_loss(output: FastSpeech2Output, batch: AcousticBatch, model: FastSpeech2) -> AcousticLoss:
    """Compute FastSpeech 2's losses as means over the frames and phones of all processes' batches."""
    loss = acoustic_loss(output, batch, model)
    voiced_count = (batch.durations > 0).sum()
    frames, phones, voiced = token_weight(torch.stack([output.mel_lengths.sum(), batch.lengths.sum(), voiced_count]))
    return AcousticLoss(loss.mel * frames, loss.duration * phones, loss.pitch * voiced, loss.energy * voiced)


CONFIGS = {"paper": FastSpeech2Config, "small": FastSpeech2Config.small}
Step = tuple[Tensor, AcousticBatch]


class AcousticData(LightningDataModule):
    """A data module for text-to-speech: phones and acoustic targets of English recordings.

    `root` is the folder with `{split}.tsv`, `{split}.alignment.tsv` and the wavs. An epoch has `steps_per_epoch`
    batches, determined by (seed, epoch): a training resumed at an epoch's end has those of an uninterrupted one.
    `max_bad_share`: largest share of bad rows. `allow_absolute_paths`: allow files outside `root`.
    """

    def __init__(
        self,
        root: str = "data/corpus/cvss_c",
        batch_size: int = 32,
        steps_per_epoch: int = 100,
        limit: int | None = None,
        max_frames: int = 1200,
        validation_split: str = "dev",
        validation_rows: int = 64,
        seed: int = 0,
        max_bad_share: float = MAX_BAD_SHARE,
        allow_absolute_paths: bool = False,
    ) -> None:
        super().__init__()
        self.admission = Admission(allow_absolute_paths, max_bad_share)
        self.root, self.batch_size, self.steps_per_epoch = Path(root), batch_size, steps_per_epoch
        self.limit, self.max_frames, self.seed = limit, max_frames, seed
        self.validation_split, self.validation_rows = validation_split, validation_rows
        self.train_set: EnglishSpeech | None = None
        self.validation_set: EnglishSpeech | None = None
        self.train_items: list[int] = []  # indices of the training recordings that are not too long

    @cached_property
    def units(self) -> list[str]:
        """The vocabulary: the special tokens, then the training split's phones in alphabetical order."""
        alignments = read_alignments(self.root, "train").values()
        return [*SPECIALS, *sorted({phone for alignment in alignments for phone in phone_names(alignment)})]

    def prepare_data(self) -> None:
        """Compute and cache the targets of all recordings. Lightning calls this in one process only."""
        self._splits()

    def _splits(self) -> tuple[EnglishSpeech, EnglishSpeech]:
        return read_train_and_dev(self.root, self.validation_split, self.limit, self.validation_rows, self.admission)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        self.train_set, self.validation_set = self._splits()
        self.train_items = [item for item, frames in enumerate(self.train_set.frames) if frames <= self.max_frames]
        for item in set(range(len(self.train_set))) - set(self.train_items):
            self.train_set.bad.add(f"longer than {self.max_frames} frames", self.train_set.rows[item][0])
        if not self.train_items:
            raise InputError(
                f"`max_frames` must admit at least one training recording, but {self.max_frames} admits none. Raise it."
            )
        bad = self.train_set.bad
        rank_zero_info(
            f"English speech: {len(self.train_items)} distinct sentences, {bad.count} rows left out {bad.report()}"
        )

    def train_dataloader(self) -> DataLoader[Step]:
        assert self.train_set is not None
        assert self.trainer is not None
        train = self.train_set
        rank, world = self.trainer.global_rank, self.trainer.world_size
        batches = epoch_batches(
            [int(train.frames[item]) for item in self.train_items],
            self.batch_size * world,
            self.steps_per_epoch,
            self.seed,
            self.trainer.current_epoch,
        )
        mine = [[self.train_items[number] for number in batch[rank::world]] for batch in batches]
        numbers: Any = range(len(train))  # the dataset holds indices; `collate_fn` reads the recordings
        return DataLoader(numbers, batch_sampler=mine, collate_fn=lambda items: train.batch(items, self.units))

    def val_dataloader(self) -> DataLoader[Step]:
        assert self.validation_set is not None
        dataset = self.validation_set
        numbers: Any = range(len(dataset))
        return DataLoader(numbers, batch_size=16, collate_fn=lambda items: dataset.batch(items, self.units))


class AcousticModule(LightningModule):
    """Trains FastSpeech 2. Durations, pitch and energy are teacher-forced.

    `units` is the vocabulary of phones. `config` is the model size. `normalise_variance` divides log pitch and log
    energy by their standard deviations before the loss; the paper does not. `schedule`: how the learning rate falls
    after the warm-up: "inverse-sqrt" (paper), or "cosine" to 0 at the trainer's `max_steps`. When training ends,
    `tts.safetensors` and `tts.json` are written to the trainer's root folder.
    """

    def __init__(
        self,
        units: list[str],
        config: Literal["paper", "small"] = "small",
        learning_rate: float = 5e-4,
        warmup: int = 4000,
        schedule: Literal["inverse-sqrt", "cosine"] = "inverse-sqrt",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        normalise_variance: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.units, self.learning_rate, self.warmup, self.schedule = list(units), learning_rate, warmup, schedule
        self.weight_decay, self.betas, self.seed = weight_decay, betas, seed
        self.normalise_variance = normalise_variance
        torch.manual_seed(seed)
        self.tts = FastSpeech2(CONFIGS[config](), len(units))

    @property
    def network(self) -> AcousticModule:
        """This module, into which `InitialWeights` loads weights. They have the same names as in DASpeech."""
        return self

    def setup(self, stage: str) -> None:
        """Compute mean and deviation of the training data. When training resumes, the checkpoint's values are used."""
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined] # not declared by Lightning
        mean, deviation, pitch, energy = data.train_set.statistics()
        neutral = torch.tensor([0.0, 1.0])
        scaled = self.normalise_variance
        self.tts.set_statistics(mean, deviation, pitch if scaled else neutral, energy if scaled else neutral)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )
        return with_schedule(optimizer, lambda step: self._schedule()(step))

    def _schedule(self) -> Schedule:
        """Return the schedule for the trainer's `max_steps`, which a time limit may change after each epoch."""
        if self.schedule == "cosine" and self.trainer.max_steps > self.warmup:
            return Schedule("cosine", self.warmup, decay_steps=self.trainer.max_steps - self.warmup)
        return Schedule("inverse-sqrt", self.warmup)

    def on_train_batch_start(self, batch: Step, batch_idx: int) -> None:
        # A resumed training draws the same dropout masks as an uninterrupted training. Each process draws other masks.
        torch.manual_seed((self.seed * 1_000_003 + self.global_step) * 64 + self.global_rank)

    def training_step(self, batch: Step, batch_idx: int) -> Tensor:
        return self._log_loss("train", batch)

    def validation_step(self, batch: Step, batch_idx: int) -> None:
        self._log_loss("dev", batch)

    def _log_loss(self, name: str, batch: Step) -> Tensor:
        units, targets = batch
        output = self.tts(self.tts.embed(units), targets.lengths, targets.durations, targets.pitch, targets.energy)
        loss = distributed_loss(output, targets, self.tts)
        parts = {"mel": loss.mel, "duration": loss.duration, "pitch": loss.pitch, "energy": loss.energy}
        values = {f"{name}/{part}": value.detach() for part, value in (parts | {"loss": loss.total}).items()}
        self.log_dict(values, batch_size=len(units), sync_dist=True)
        return loss.total

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            save_stage(folder, "tts", self.tts, {"config": asdict(self.tts.config), "units": self.units})
