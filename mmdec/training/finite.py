"""A run whose loss or weights are no longer finite ends, before a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from mmdec.checks.weights import is_finite
from mmdec.types import REFUSED, MmdecError

RATES = ("lr", "learning_rate")  # the recipes' keys of the learning rate


class FiniteNumbers(Callback):
    """Looks at each step's loss, and at the weights where an epoch ends. Several processes end together, at the next
    step: one that went on alone would wait for the others."""

    def __init__(self) -> None:
        self.fault = ""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for name, value in _losses(trainer, outputs):
            if not is_finite(value):
                self.fault = f"{name} is {float(value.detach().float().mean())}"
                break
        if trainer.world_size == 1:
            self._end(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fault = self.fault or not_finite(pl_module.state_dict())
        self._end(trainer, pl_module)

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise MmdecError if there is a fault in any process."""
        if any_process(trainer, bool(self.fault)):
            if not trainer.is_global_zero:
                raise SystemExit(REFUSED)  # one process says it
            raise diverged(
                self.fault or "another process has a loss that is not", trainer.global_step, pl_module.hparams
            )


def any_process(trainer: Trainer, flag: bool) -> bool:
    """Whether the flag is set in one process at least. All processes must ask."""
    return flag if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(flag, all=False)


def check_finite_training(state: Mapping[str, Tensor], step: int, options: Mapping[str, Any] | None) -> None:
    """Raise MmdecError for weights that must not become a checkpoint. options: the module's hyperparameters."""
    fault = not_finite(state)
    if fault:
        raise diverged(fault, step, options or {})


def not_finite(state: Mapping[str, Tensor]) -> str:
    """Which weights are not finite, in a few words; "" where all are."""
    names = [name for name, value in state.items() if isinstance(value, Tensor) and not is_finite(value)]
    return f"{len(names)} of {len(state)} weights hold NaN or infinity, '{names[0]}' first" if names else ""


def diverged(fault: str, step: int, options: Mapping[str, Any]) -> MmdecError:
    """The error of a run that left the finite numbers."""
    key = next((name for name in RATES if name in options), RATES[0])
    now = f", which is {options[key]:g}" if isinstance(options.get(key), (int, float)) else ""
    return MmdecError(
        f"Loss and weights must stay finite, but after step {step}, {fault}. Lower `model.init_args.{key}`{now}. No "
        "checkpoint holds them."
    )


def _losses(trainer: Trainer, outputs: object) -> Iterator[tuple[str, Tensor]]:
    """What was minimised: the step's loss, or all that was logged where a module takes its own steps."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor):
        yield "the loss", loss
        return
    for name, value in trainer.callback_metrics.items():
        if name.startswith("train/") and torch.is_tensor(value):
            yield name, value
