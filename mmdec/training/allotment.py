"""`make train MINUTES=25`: how the minutes are shared among the shipped models that can be trained here."""

from __future__ import annotations

from pathlib import Path

from mmdec.training import schedule, schedule_heads
from mmdec.training.schedule import Runner
from mmdec.types import InputError

HEADS = 0.25  # of the time, where Whisper's heads can be trained


def main(minutes: float, fresh: bool = False, runner: Runner | None = None) -> list[Path]:
    """Train DASpeech, then the heads of the shipped Whisper; the folders of what was made.

    Building a corpus that is missing is not counted. `fresh` trains from random weights.
    """
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    runner = runner or schedule.run
    missing = schedule_heads.ready()
    if missing:
        print(missing, flush=True)
    share = 0.0 if missing else HEADS
    made = [schedule.main(minutes * (1 - share), fresh, runner)]
    if share:
        made.append(schedule_heads.train(60 * minutes * share, runner, fresh))
    return [folder for folder in made if folder is not None]
