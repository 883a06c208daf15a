"""`make train MINUTES=25`: how the minutes are shared among the systems that can be trained here, and what came of it.

The minutes hold everything but the building of a corpus that is missing: loading, validation, export and comparison.
What is made is in runs/; `mmdec promote` puts it into models/.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmdec.training import timed_run
from mmdec.training.daspeech import timed as daspeech
from mmdec.training.processes import only_one, sigterm_exits
from mmdec.training.systems import ONE_STAGE
from mmdec.training.timed_run import RUNS, Allowance, Outcome, Runner, System
from mmdec.types import InputError

RECIPES = Path("recipes")


@dataclass(frozen=True)
class Wish:
    """What of a `System` the sharing of the time needs, for one of several stages."""

    name: str
    share: float  # of the time, where all are trained
    least: float  # seconds, below which it is left to those before it
    missing: Callable[[], str]  # builds what it can; why there is nothing to train: "" where there is
    train: Callable[[Allowance, Runner, bool], Outcome]


SYSTEMS: tuple[Wish | System, ...] = (
    Wish(daspeech.NAME, 0.55, 60.0, daspeech.missing, daspeech.train),
    *ONE_STAGE,
)


def main(
    minutes: float,
    fresh: bool = False,
    runner: Runner | None = None,
    systems: Sequence[Wish | System] = SYSTEMS,
    now: Callable[[], float] = time.time,
    begun: float | None = None,
) -> list[Outcome]:
    """Train the systems one after the other, and print what came of it; one outcome for each.

    Building a corpus that is missing is not counted. The minutes begin at `begun` by the clock `now`. `fresh` trains
    from random weights. SIGTERM is a SystemExit, after the checkpoint of what is trained. Raises InputError outside a
    checkout, and where another `make train` works in runs/.
    """
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    if not RECIPES.is_dir():
        raise InputError(
            f"`make train` needs a checkout, but '{Path.cwd()}' has no {RECIPES}. Clone the repository, run it there."
        )
    with only_one(RUNS, "make train"), sigterm_exits():
        building = now()
        reasons = {system.name: system.missing() for system in systems}
        begun = (building if begun is None else begun) + now() - building
        time_left = Allowance(begun + 60 * minutes, now)
        able = [system for system in systems if not reasons[system.name]]
        chosen = affordable([(system.name, system.share, system.least) for system in able], 60 * minutes)
        outcomes = []
        for system in systems:
            if reasons[system.name]:
                outcomes.append(Outcome(system.name, reasons[system.name]))
            elif system.name not in chosen:
                outcomes.append(Outcome(system.name, f"not trained: {minutes:g} minutes are too short for it"))
            else:
                shares = [other.share for other in able[able.index(system) :] if other.name in chosen]
                part = time_left.part(system.share / sum(shares))
                outcomes.append(system.train(part, runner or timed_run.run, fresh))
        Console(width=max(Console().width, 100)).print(table(outcomes, now() - begun))
    for folder in sorted({str(outcome.folder) for outcome in outcomes if outcome.better and outcome.folder}):
        print(f"Into models/, if it is better there, too: python -m mmdec promote {folder}", flush=True)
    return outcomes


def affordable(wishes: Sequence[tuple[str, float, float]], seconds: float) -> list[str]:
    """Names of those whose share of the time is at least what they need, from (name, share, least): the last ones give
    way. The first is always there."""
    fitting = list(wishes)
    while len(fitting) > 1:
        total = sum(share for _, share, _ in fitting)
        if all(seconds * share / total >= least for _, share, least in fitting):
            break
        fitting.pop()
    return [name for name, _, _ in fitting]


def table(outcomes: Sequence[Outcome], seconds: float) -> Table:
    """What was trained, before and after."""
    total = round(seconds)
    title = f"trained in {total // 60}:{total % 60:02d} minutes; measured on the development splits"
    grid = Table("system", "trained", "measure", "before", "after", "", title=title, title_justify="left")
    for outcome in outcomes:
        numbers = ("-" if value is None else f"{value:.3f}" for value in (outcome.before, outcome.after))
        verdict = "" if outcome.after is None else f"better: {outcome.folder}" if outcome.better else "not better"
        grid.add_row(outcome.system, outcome.trained, outcome.measure, *numbers, verdict)
    return grid
