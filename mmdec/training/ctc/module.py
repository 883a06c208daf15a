"""Training of a CTC head on a frozen encoder's kept states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F

from mmdec.nn.ctc_head import BLANK, CtcHead, CtcHeadConfig, collapse
from mmdec.training.checkpoints import load_averaged, read_checkpoint
from mmdec.training.ctc.data import CtcBatch
from mmdec.training.daspeech.module import load_network
from mmdec.training.metrics.text import phone_distance
from mmdec.training.optim import MuonAdamW, Schedule, scheduled, seed_step
from mmdec.training.options import keep_options


@dataclass(frozen=True)
class CtcOptions:
    """What a recipe sets. time_masks: spans of at most `mask_states` states that a row loses; channels: share of the
    states' channels that it loses throughout. start: a checkpoint to begin from."""

    d_states: int = 512
    stride: int = 2
    d_model: int = 320
    layers: int = 5
    kernel: int = 11
    dropout: float = 0.1
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 200
    decay_from: int | None = None
    decay_steps: int = 1000
    time_masks: int = 2
    mask_states: int = 12
    channels: float = 0.1
    start: str | None = None
    seed: int = 0


class CtcModule(LightningModule):
    """L = -log P(pieces | states) of a row, per piece, mean over rows.

    units: the pieces by number, the blank first. options: those of `CtcOptions`. All randomness of a step follows from
    (seed, epoch, step).
    """

    def __init__(self, units: list[str], **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.options = CtcOptions(**options)
        keep_options(self, self.options)
        torch.manual_seed(self.options.seed)
        names = ("d_states", "stride", "d_model", "layers", "kernel", "dropout")
        sizes = {name: getattr(self.options, name) for name in names}
        self.head = CtcHead(CtcHeadConfig(pieces=len(units), **sizes))
        if self.options.start is not None:
            load_network(self, read_checkpoint(Path(self.options.start))["state_dict"])
        self.rate = Schedule("trapezoid", self.options.warmup, self.options.decay_from, self.options.decay_steps)

    def on_train_batch_start(self, batch: CtcBatch, batch_idx: int) -> None:
        seed_step(self.options.seed, self.current_epoch, batch_idx)

    def masked(self, batch: CtcBatch) -> Tensor:
        """The states (B, S, D) without some spans and channels."""
        rows, size, width = batch.states.shape
        begins = (torch.rand(rows, self.options.time_masks, 1) * batch.lengths.cpu()[:, None, None]).long()
        spans = torch.randint(0, self.options.mask_states + 1, (rows, self.options.time_masks, 1))
        steps = torch.arange(size)
        lost = ((steps >= begins) & (steps < begins + spans)).any(1)[..., None]  # (B, S, 1)
        lost = lost | (torch.rand(rows, 1, width) < self.options.channels)
        return batch.states.masked_fill(lost.to(batch.states.device), 0.0)

    def loss(self, logits: Tensor, lengths: Tensor, batch: CtcBatch) -> Tensor:
        """Rows whose text is too long for their frames count as 0."""
        scores = logits.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch.pieces, lengths, batch.piece_lengths, blank=BLANK, zero_infinity=True)

    def training_step(self, batch: CtcBatch, batch_idx: int) -> Tensor:
        logits, lengths = self.head(self.masked(batch), batch.lengths)
        loss = self.loss(logits, lengths, batch)
        self.log("train/ctc", loss.detach(), batch_size=len(batch.rows))
        self.log("step", float(self.global_step))
        return loss

    def validation_step(self, batch: CtcBatch, batch_idx: int) -> None:
        logits, lengths = self.head(batch.states, batch.lengths)
        self.log("dev/ctc", self.loss(logits, lengths, batch), batch_size=len(batch.rows), sync_dist=True)
        counts = batch.piece_lengths.tolist()
        wanted = [row[:count] for row, count in zip(batch.pieces.tolist(), counts, strict=True)]
        written = collapse(logits.argmax(-1), lengths)
        wrong = sum(map(phone_distance, wanted, written))
        self.log("dev/wrong", wrong / sum(counts), batch_size=sum(counts), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        named, options = self.head.named_parameters(), self.options
        optimizer = MuonAdamW.of(named, lambda name, _: name.startswith("blocks"), options.lr, options.weight_decay)
        return scheduled(optimizer, lambda step: self.rate(step))


def load_module(checkpoints: Sequence[Path]) -> tuple[CtcModule, int]:
    """The training module with the averaged weights of its checkpoints, and the last one's step."""
    return load_averaged(lambda options: CtcModule(**{**options, "start": None}), checkpoints)
