"""Tests the callbacks that the recipes of all systems use."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule

from mmdec.training.callbacks import Deadline, epochs_that_fit, lightning_says
from mmdec.training.optim import Schedule
from tests.support.pretended_training import module


def test_the_callbacks_of_all_recipes_load_no_system() -> None:
    code = (
        "import sys, mmdec.training.callbacks, mmdec.training.__main__\n"
        "print(*(m for m in sys.modules if m.startswith('mmdec.nn') or m.endswith('.speech')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


class FakeTrainer:
    """As much of a trainer as `Deadline` touches."""

    def __init__(self, max_steps: int = -1) -> None:
        progress = SimpleNamespace(current=SimpleNamespace(processed=0))
        loop = SimpleNamespace(max_steps=max_steps)
        self.fit_loop = SimpleNamespace(epoch_progress=progress, epoch_loop=loop, max_epochs=1000)
        self.strategy = SimpleNamespace(broadcast=lambda value: value)
        self.global_step, self.num_training_batches = 0, 5
        self.check_val_every_n_epoch: int | None = None

    @property
    def max_steps(self) -> int:
        return self.fit_loop.epoch_loop.max_steps


def epochs(deadline: Deadline, trainer: FakeTrainer, seconds: list[float], made: LightningModule) -> list[int]:
    """Run epochs that take so long; the limits after each."""
    clock = SimpleNamespace(now=0.0)
    limits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdec.training.callbacks.time", SimpleNamespace(time=lambda: clock.now))
        deadline.on_train_start(trainer, made)  # type: ignore[arg-type]
        for took in seconds:
            clock.now += took
            trainer.fit_loop.epoch_progress.current.processed += 1
            trainer.global_step += 5
            deadline.on_train_epoch_end(trainer, made)  # type: ignore[arg-type]
            limits.append(trainer.fit_loop.max_epochs)
    return limits


def test_a_deadline_counts_the_epochs_that_fit():
    made = LightningModule()
    assert epochs(Deadline(100), FakeTrainer(), [10, 10, 30, 30], made) == [10, 10, 4, 4]
    assert epochs(Deadline(5), FakeTrainer(), [10], made) == [1]  # too late: stop at once
    assert epochs(Deadline(100, epochs=4), FakeTrainer(), [10, 10], made) == [4, 4]
    trainer = FakeTrainer(max_steps=7000)
    epochs(Deadline(100), trainer, [10, 20], made)
    assert trainer.max_steps == 10 + 3 * 5


def validated(deadline: Deadline, every: int, seconds: list[float], look: float) -> list[int]:
    """Run epochs that take so long, with validations of `look` seconds, until the deadline stops; those validated."""
    made, trainer, clock = LightningModule(), FakeTrainer(), SimpleNamespace(now=0.0)
    trainer.check_val_every_n_epoch = every
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdec.training.callbacks.time", SimpleNamespace(time=lambda: clock.now))
        deadline.on_train_start(trainer, made)  # type: ignore[arg-type]
        progress = trainer.fit_loop.epoch_progress.current
        while progress.processed < trainer.fit_loop.max_epochs:
            clock.now += seconds[min(progress.processed, len(seconds) - 1)]
            for step in range(trainer.num_training_batches):
                deadline.on_train_batch_end(trainer, made, None, None, step)  # type: ignore[arg-type]
            if (progress.processed + 1) % (trainer.check_val_every_n_epoch or 1) == 0:
                deadline.on_validation_start(trainer, made)  # type: ignore[arg-type]
                clock.now += look
                deadline.on_validation_end(trainer, made)  # type: ignore[arg-type]
                found.append(progress.processed + 1)
            progress.processed += 1
            deadline.on_train_epoch_end(trainer, made)  # type: ignore[arg-type]
    return [*found, progress.processed]


@pytest.mark.parametrize(
    ("every", "seconds", "look", "epochs"),
    [
        (4, [10], 2, [4, 8, 9, 9]),  # 9 epochs and 3 validations take 96 s
        (4, [10], 12, [4, 7, 7]),
        (4, [10, 10, 10, 10, 10, 70], 2, [4, 6, 6]),  # it slowed down: no other epoch fits
        (1, [30], 5, [1, 2, 2]),
        (50, [10], 5, [9, 9]),
        (3, [200], 5, [1, 1]),  # too late
    ],
)
def test_the_last_epoch_before_a_deadline_is_validated(every, seconds, look, epochs):
    assert validated(Deadline(100), every, seconds, look) == epochs


def test_a_deadline_brings_the_rate_to_zero_in_time():
    made = module(["<s>", "<pad>", "</s>", "<unk>"], mu=0.0)
    made.rate = Schedule("trapezoid", warmup=1)
    epochs(Deadline(100, decay=True), FakeTrainer(), [10], made)
    assert [made.rate(step) for step in (5, 50)] == pytest.approx([1.0, 0.0])
    made.rate = Schedule("trapezoid", warmup=1)
    epochs(Deadline(100), FakeTrainer(), [10], made)
    assert made.rate(50) == 1.0


@pytest.mark.parametrize(
    ("seconds", "epoch", "validation", "done", "every", "more"),
    [
        (100, 10, 50, 0, None, 10),
        (100, 10, 50, 0, 5, 5),
        (100, 10, 20, 4, 5, 6),
        (100, 10, 5, 0, 1, 6),
        (5, 10, 0, 0, 1, 0),
    ],
)
def test_validations_are_part_of_the_time(
    seconds: float, epoch: float, validation: float, done: int, every: int | None, more: int
):
    assert epochs_that_fit(seconds, epoch, validation, done, every) == more


def test_lightning_is_heard_again_afterwards() -> None:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    with lightning_says(logging.ERROR):
        assert logger.level == logging.ERROR
    assert logger.level == before
