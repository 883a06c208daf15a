"""Shows tokens per round by epoch of training, for several drafters with several seeds, as a table and a plot.

python -m mmdec.evaluation.quality.drafter_epochs eagle=runs/eagle-1,runs/eagle-2 msd=runs/msd-1 --plot epochs.png

Training logs the figures after each epoch, as `dev/decoded`: it decodes held-out questions completely.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmdec.evaluation.bench.plots import import_pyplot, new_figure, training_curves
from mmdec.types import InputError

MEASURE = "dev/decoded"


def epochs_of(run: str | Path) -> list[float]:
    """Read the tokens per round after each epoch of a training run. Raises InputError if its folder has none."""
    curves = training_curves(next(Path(run).rglob("metrics.csv"), Path(run) / "metrics.csv"))
    if MEASURE not in curves:
        raise InputError(f"`runs` must have logged {MEASURE}, but '{run}' did not. Train with `decoded` above 0.")
    return [value for _, value in curves[MEASURE]]


def table(groups: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Write a Markdown table: a row for each drafter with the mean, the least and the most tokens per round over its
    seeds.

    groups: drafter's name -> for each seed, the tokens per round by epoch.
    """
    longest = max(len(run) for runs in groups.values() for run in runs)
    lines = ["| drafter | seeds | " + " | ".join(f"epoch {epoch + 1}" for epoch in range(longest)) + " |"]
    lines.append("|---" * (2 + longest) + "|")
    for name, runs in groups.items():
        columns = [[run[epoch] for run in runs if epoch < len(run)] for epoch in range(longest)]
        cells = (f"{sum(at) / len(at):.2f} ({min(at):.2f} to {max(at):.2f})" if at else "" for at in columns)
        lines.append(f"| `{name}` | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(groups: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Plot a line for each drafter's mean over its seeds, and a band from the least to the most.

    groups: drafter's name -> for each seed, the tokens per round by epoch.
    """
    pyplot = import_pyplot()
    with new_figure(pyplot) as (figure, axes):
        for name, runs in groups.items():
            columns = [list(at) for at in zip(*runs, strict=False)]
            epochs = range(1, len(columns) + 1)
            axes.plot(epochs, [sum(at) / len(at) for at in columns], marker="o", label=name)
            axes.fill_between(epochs, [min(at) for at in columns], [max(at) for at in columns], alpha=0.2)
        axes.set_xlabel("epochs of training")
        axes.set_ylabel("tokens a round (bonus included)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
        figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=RUN[,RUN]", help="a drafter's runs, one for each seed")
    parser.add_argument("--plot", type=Path, help="draw into this .png, too")
    options = parser.parse_args()
    groups: dict[str, list[list[float]]] = {}
    for group in options.groups:
        name, _, runs = group.partition("=")
        if not name or not runs:
            raise InputError(f"`groups` must be like eagle=runs/eagle-1, but one is {group!r}.")
        groups[name] = [epochs_of(run) for run in runs.split(",")]
    print(table(groups))
    if options.plot is not None:
        draw(groups, options.plot)


if __name__ == "__main__":
    main()
