"""`make train MINUTES=25`: how the minutes are shared among the shipped models that can be trained here."""

from __future__ import annotations

from pathlib import Path

from mmdec.training import schedule, schedule_heads, schedule_whisper
from mmdec.training.schedule import Runner
from mmdec.types import InputError

WHISPER, HEADS = 0.25, 0.2  # of the time, where they can be trained


def main(minutes: float, fresh: bool = False, runner: Runner | None = None) -> list[Path]:
    """Train DASpeech, then the small Whisper, then its heads; the folders of what was made.

    Building a corpus that is missing is not counted. `fresh` trains from random weights.
    """
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    runner = runner or schedule.run
    schedule.check_checkout()
    missing = schedule_whisper.prepare()
    if missing:
        print(missing, flush=True)
    shares = (0.0, 0.0) if missing else (WHISPER, HEADS)
    made = [schedule.main(minutes * (1 - sum(shares)), fresh, runner)]
    if not missing:
        made.append(schedule_whisper.train(60 * minutes * shares[0], runner, fresh))
        made.append(schedule_heads.train(60 * minutes * shares[1], runner, fresh))
    return [folder for folder in made if folder is not None]
