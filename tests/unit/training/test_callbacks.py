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
        self.global_step, self.num_training_batches, self.check_val_every_n_epoch = 0, 5, None

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
