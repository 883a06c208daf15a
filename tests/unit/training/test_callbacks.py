"""Tests the callbacks that the recipes of all systems use."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import timer

from mmdec.training.callbacks import TimeLimit, lightning_log_level
from mmdec.training.optim import Schedule


@pytest.mark.slow
def test_the_callbacks_of_all_recipes_load_no_system() -> None:
    code = (
        "import sys, mmdec.training.callbacks, mmdec.training.__main__\n"
        "print(*(m for m in sys.modules if m.startswith('mmdec.nn') or m.endswith('.speech')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_time_limit_brings_the_rate_to_zero_and_a_resumed_run_has_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time for 50 steps: the rate falls from there to zero at step 100."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    module = LightningModule()
    module.rate = Schedule("trapezoid", warmup=1)  # type: ignore[assignment] # not a submodule
    broadcast = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(global_step=0, should_stop=False, lightning_module=module, strategy=broadcast)
    limit = TimeLimit(100.0)
    limit.on_train_start(trainer, module)  # type: ignore[arg-type]
    clock.now, trainer.global_step = 50.0, 50
    limit.on_train_batch_end(trainer)  # type: ignore[arg-type]
    limit.on_train_epoch_end(trainer)  # type: ignore[arg-type]
    assert not trainer.should_stop
    assert [module.rate(step) for step in (50, 75, 100)] == pytest.approx([1.0, 0.5, 0.0])  # type: ignore[operator]
    clock.now, trainer.global_step = 100.0, 90  # slower than it was
    limit.on_train_batch_end(trainer)  # type: ignore[arg-type]
    assert trainer.should_stop
    assert limit.state_dict() == {}


def test_lightnings_logging_is_restored() -> None:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    with lightning_log_level(logging.ERROR):
        assert logger.level == logging.ERROR
    assert logger.level == before
