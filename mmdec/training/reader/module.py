"""Training of the reader with its autoregressive decoder, on text: pieces that are heard to pieces that are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from mmdec.metrics.text import bleu, chrf
from mmdec.nn.ar_decoder import ArConfig
from mmdec.nn.piece_reader import PiecesToUnits, ReaderConfig
from mmdec.training.daspeech.losses import autoregressive_loss
from mmdec.training.lr_schedule import Schedule
from mmdec.training.optim import MuonAdamW
from mmdec.training.options import keep_options
from mmdec.training.reader.data import PairBatch, PairData


@dataclass(frozen=True)
class ReaderOptions:
    """What a recipe sets."""

    d_model: int = 256
    ffn: int = 1024
    heads: int = 4
    layers: int = 6
    decoder_layers: int = 4
    dropout: float = 0.1
    lr: float = 1.5e-3
    weight_decay: float = 0.01
    warmup: int = 400
    decay_from: int | None = None
    decay_steps: int = 1000
    label_smoothing: float = 0.1
    seed: int = 0


class ReaderModule(LightningModule):
    """L = cross-entropy of the written pieces.

    units: the pieces by number, heard and written. options: those of `ReaderOptions`. All randomness of a step follows
    from (seed, epoch, step).
    """

    def __init__(self, units: list[list[str]], **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.options = ReaderOptions(**options)
        keep_options(self, self.options)
        torch.manual_seed(self.options.seed)
        sizes = {name: getattr(self.options, name) for name in ("d_model", "ffn", "heads", "dropout")}
        decoder = ArConfig(**sizes, layers=self.options.decoder_layers)
        config = ReaderConfig(len(units[0]), len(units[1]), **sizes, layers=self.options.layers, ar=decoder)
        self.network = PiecesToUnits(config)
        self.rate = Schedule("trapezoid", self.options.warmup, self.options.decay_from, self.options.decay_steps)
        self.written: dict[int, list[int]] = {}

    def on_train_batch_start(self, batch: PairBatch, batch_idx: int) -> None:
        torch.manual_seed((self.options.seed * 100_003 + self.current_epoch) * 1_000_003 + batch_idx)

    def loss(self, batch: PairBatch, label_smoothing: float) -> Tensor:
        states = self.network.reader(batch.pieces, batch.weights, batch.lengths)
        logits = self.network.ar(batch.units[:, :-1], states, batch.lengths)
        return autoregressive_loss(logits, batch.units, label_smoothing)

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        loss = self.loss(batch, self.options.label_smoothing)
        self.log("train/ar", loss.detach(), batch_size=len(batch.rows))
        self.log("step", float(self.global_step))
        return loss

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        self.log("dev/ar", self.loss(batch, 0.0), batch_size=len(batch.rows), sync_dist=True)
        states = self.network.reader(batch.pieces, batch.weights, batch.lengths)
        longest = 2 * int(batch.lengths.max()) + 10
        written = self.network.ar.generate(states, batch.lengths, longest)
        self.written.update(zip(batch.rows, written, strict=True))

    def on_validation_epoch_end(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # undeclared by Lightning
        if isinstance(data, PairData) and self.written:
            texts = [data.english.decode(self.written[row]) for row in sorted(self.written)]
            references = [data.dev[row].references for row in sorted(self.written)]
            self.log("dev/bleu", bleu(texts, references).value)
            self.log("dev/chrf", chrf(texts, references).value)
        self.written = {}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices, others = [], []
        for name, parameter in self.network.named_parameters():
            (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
        decay = self.options.weight_decay
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = MuonAdamW(matrices, groups, lr=self.options.lr, weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
