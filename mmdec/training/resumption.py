"""A resumed run goes on with the very batch that would have come next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader


class Resumption(Callback):
    """Sets Lightning's counts so that an epoch that was over is over, and one that was not goes on where it stood.

    Left alone, Lightning (2.6) takes an epoch's end for its middle wherever `max_steps` is set: the resumed run's first
    epoch ends after one batch. And a run that was saved within an epoch sees that epoch's first batches again.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        current, total, done = batches["current"], batches["total"], batches["current"]["processed"]
        begun = current["ready"] > done  # saved before the next batch's step
        over = batches["is_last_batch"] and not begun
        if (
            trainer.accumulate_grad_batches == 1
        ):  # within a batch's end and a validation Lightning has not counted it yet
            loop["epoch_loop.state_dict"]["_batches_that_stepped"] = total["processed"]
        total.update(dict.fromkeys(total, total["processed"]))
        for part in ("total", "current"):
            epochs = loop["epoch_progress"][part]
            ready = epochs["ready"]
            whole = ready if over else ready - 1
            epochs.update(dict.fromkeys(epochs, whole))
            if done and not over:
                epochs |= {"ready": ready, "started": ready}
        if over or not done:
            for name, progress in loop.items():
                if name.startswith("epoch_loop.") and name.endswith("progress") and ".val_loop." not in name:
                    _start_again(progress)
            return
        current.update(dict.fromkeys(current, done))
        batches["is_last_batch"] = False
        if isinstance(data := getattr(trainer, "datamodule", None), LightningDataModule):
            _pass_over(data, done)


def _start_again(progress: dict[str, Any]) -> None:
    """Set all counts of the current epoch to zero, at any depth."""
    for name, value in progress.items():
        if name == "current":
            value.update(dict.fromkeys(value, 0))
        elif isinstance(value, dict):
            _start_again(value)


def _pass_over(data: LightningDataModule, done: int) -> None:
    """The next loader of training batches, and that one alone, leaves out the first `done`."""
    make = data.train_dataloader

    def rest() -> Any:
        data.train_dataloader = make
        loader = make()
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return loader
        return DataLoader(
            loader.dataset,
            batch_sampler=_Rest(list(loader.batch_sampler), done),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            pin_memory=loader.pin_memory,
        )

    data.train_dataloader = rest


class _Rest:
    """Batches without the first `done`, which still count in its length, as Lightning counts."""

    def __init__(self, batches: list[Any], done: int) -> None:
        self.batches, self.done = batches, done

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches[self.done :])

    def __len__(self) -> int:
        return len(self.batches)
