"""Training of text-to-speech: FastSpeech 2 learns mel frames from phones (the second of DASpeech's three stages)."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import DataLoader

from mmdec.checks.files import write_whole
from mmdec.nn.fastspeech2 import AcousticBatch, AcousticLoss, FastSpeech2, FastSpeech2Config
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission
from mmdec.training.daspeech.acoustic_data import EnglishSpeech, EpochItems, both_splits, spoken_vocabulary
from mmdec.training.daspeech.losses import acoustic_loss
from mmdec.training.optim import Schedule, scheduled
from mmdec.types import InputError

CONFIGS = {"paper": FastSpeech2Config.paper, "small": FastSpeech2Config.small}
Step = tuple[Tensor, AcousticBatch]


class AcousticData(LightningDataModule):
    """A data module: phones and acoustic targets of the English half of CVSS, or of the phrasebook.

    `root` is the folder with `{split}.tsv`, `{split}.alignment.tsv` and the wavs. An epoch has `steps_per_epoch`
    batches, drawn from (seed, epoch) alone: a run that resumes at an epoch's end sees the same batches as an
    uninterrupted one. `max_bad_share`, `allow_absolute_paths`: see `Admission`.
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
        self.train_items: list[int] = []  # indices of the recordings that are not too long

    @cached_property
    def units(self) -> list[str]:
        """The vocabulary: the special units, then the training split's phones."""
        return spoken_vocabulary(self.root, "train")

    def prepare_data(self) -> None:
        """Compute the cached targets, in one process only."""
        self._splits()

    def _splits(self) -> tuple[EnglishSpeech, EnglishSpeech]:
        return both_splits(self.root, self.validation_split, self.limit, self.validation_rows, self.admission)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        self.train_set, self.validation_set = self._splits()
        self.train_items = [item for item, frames in enumerate(self.train_set.frames) if frames <= self.max_frames]
        for item in set(range(len(self.train_set))) - set(self.train_items):
            self.train_set.bad.add(f"longer than {self.max_frames} frames", self.train_set.rows[item][0])
        if not self.train_items:
            raise InputError(f"`max_frames` must leave a training row, but is {self.max_frames}. Raise it.")
        bad = self.train_set.bad
        rank_zero_info(
            f"English speech: {len(self.train_items)} distinct sentences, {bad.count} rows left out {bad.report()}"
        )

    def train_dataloader(self) -> DataLoader[Step]:
        assert self.train_set is not None
        assert self.trainer is not None
        train, index = self.train_set, {unit: number for number, unit in enumerate(self.units)}
        rank, world = self.trainer.global_rank, self.trainer.world_size
        batches = EpochItems(
            [int(train.frames[item]) for item in self.train_items],
            self.batch_size * world,
            self.steps_per_epoch,
            self.seed,
            self.trainer.current_epoch,
        ).batches
        mine = [[self.train_items[number] for number in batch[rank::world]] for batch in batches]
        numbers: Any = range(len(train))  # the sampler only needs a length and items
        return DataLoader(numbers, batch_sampler=mine, collate_fn=lambda items: train.batch(items, index))

    def val_dataloader(self) -> DataLoader[Step]:
        assert self.validation_set is not None
        held, index = self.validation_set, {unit: number for number, unit in enumerate(self.units)}
        numbers: Any = range(len(held))
        return DataLoader(numbers, batch_size=16, collate_fn=lambda items: held.batch(items, index))


class AcousticModule(LightningModule):
    """FastSpeech 2 with teacher-forced durations, pitch and energy; the loss of `acoustic_loss`.

    `units` is the vocabulary (the command line takes it from the data). `config` is the model size, "paper" or "small".
    `normalise_variance` divides pitch and energy by their standard deviation before the loss; the paper compares plain
    logarithms. `schedule` after the warm-up: "inverse-sqrt" (paper), or "cosine" to 0 at the trainer's `max_steps`.
    When training ends, `tts.safetensors` and `tts.json` are written to the trainer's root.
    """

    def __init__(
        self,
        units: list[str],
        config: str = "small",
        learning_rate: float = 5e-4,
        warmup: int = 4000,
        schedule: str = "inverse-sqrt",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        normalise_variance: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if config not in CONFIGS:
            raise InputError(f"`config` must be one of {', '.join(CONFIGS)}, but is {config!r}. Choose one.")
        if schedule not in ("inverse-sqrt", "cosine"):
            raise InputError(f"`schedule` must be inverse-sqrt or cosine, but is {schedule!r}. Choose one.")
        self.units, self.learning_rate, self.warmup, self.schedule = list(units), learning_rate, warmup, schedule
        self.weight_decay, self.betas, self.normalise_variance, self.seed = (
            weight_decay,
            betas,
            normalise_variance,
            seed,
        )
        torch.manual_seed(seed)
        self.tts = FastSpeech2(CONFIGS[config](), len(units))

    @property
    def network(self) -> AcousticModule:
        """What `InitialWeights` loads into, with DASpeech's parameter names: it takes another model's voice."""
        return self

    def setup(self, stage: str) -> None:
        """Compute the corpus' statistics. When a run resumes, the checkpoint's values replace them."""
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined] # undeclared by Lightning
        mean, deviation, pitch, energy = data.train_set.statistics()
        neutral = torch.tensor([0.0, 1.0])
        scaled = self.normalise_variance
        self.tts.set_statistics(mean, deviation, pitch if scaled else neutral, energy if scaled else neutral)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )
        return scheduled(optimizer, lambda step: self._schedule()(step))

    def _schedule(self) -> Schedule:
        """The schedule for the current `max_steps`, which a run with a time limit changes after each epoch."""
        if self.schedule == "cosine" and self.trainer.max_steps > self.warmup:
            return Schedule("cosine", self.warmup, decay_steps=self.trainer.max_steps - self.warmup)
        return Schedule("inverse-sqrt", self.warmup)

    def on_train_batch_start(self, batch: Step, batch_idx: int) -> None:
        # A resumed step draws the same dropout as an uninterrupted one; each rank draws its own.
        torch.manual_seed((self.seed * 1_000_003 + self.global_step) * 64 + self.global_rank)

    def training_step(self, batch: Step, batch_idx: int) -> Tensor:
        loss = self._losses(batch)
        self._log("train", loss, len(batch[0]))
        return loss.total

    def validation_step(self, batch: Step, batch_idx: int) -> None:
        self._log("dev", self._losses(batch), len(batch[0]))

    def _losses(self, batch: Step) -> AcousticLoss:
        units, targets = batch
        output = self.tts(self.tts.embed(units), targets.lengths, targets.durations, targets.pitch, targets.energy)
        return acoustic_loss(output, targets, self.tts)

    def _log(self, name: str, loss: AcousticLoss, size: int) -> None:
        parts = {"mel": loss.mel, "duration": loss.duration, "pitch": loss.pitch, "energy": loss.energy}
        values = {f"{name}/{part}": value.detach() for part, value in (parts | {"loss": loss.total}).items()}
        self.log_dict(values, batch_size=size, sync_dist=True)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.export(Path(self.trainer.default_root_dir))

    def export(self, folder: Path) -> None:
        """Write `tts.safetensors` (fp32 weights and statistics) and `tts.json` (sizes and phones)."""
        state = {name: value.contiguous().cpu() for name, value in self.tts.state_dict().items()}
        write_whole(folder / "tts.safetensors", save(state))
        described = {"config": asdict(self.tts.config), "units": self.units}
        write_whole(folder / "tts.json", json.dumps(described, indent=1).encode())
