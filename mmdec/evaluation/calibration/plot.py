"""The reliability plot of models' confidence: the confidence against the share that is right, in ten bins.

python -m mmdec.evaluation.calibration.plot models/* --output docs/pictures/confidence.png

It draws the test results in confidence.json, one panel for each kind of decoding; see
`mmdec.evaluation.calibration`, which writes this file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdec.evaluation.bench.plots import Axes, import_pyplot, new_figure
from mmdec.pipelines.confidence import FILE, read_calibrations
from mmdec.types import InputError

COLUMNS = 2
PANEL = (3.1, 2.8)  # width and height of a panel in inches
DOTS = 96  # pixels an inch: a small file, because a web page loads it
LARGEST = 260.0  # area in square points of the dot for a bin that holds all outputs; other dots are smaller


def plot_reliability(folders: Sequence[Path], path: Path) -> Path:
    """Draw the test results in the confidence.json of several models' folders into one PNG at `path`, which is
    returned. Raises InputError for a folder without test results."""
    panels = [(f"{folder.name}: {kind}", entry) for folder in folders for kind, entry in measured(folder).items()]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_figure(import_pyplot(), rows, columns, PANEL) as (figure, axes):
        flat = list(axes.flat) if len(panels) > 1 else [axes]
        for axis, (title, entry) in zip(flat, panels, strict=False):
            _panel(axis, title, entry)
        for axis in flat[len(panels) :]:
            axis.set_axis_off()
        figure.supxlabel("confidence, mean of a bin", fontsize=8)
        figure.supylabel("share that is right", fontsize=8)
        # without matplotlib's version in the file, equal figures give equal bytes
        figure.savefig(path, dpi=DOTS, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return path


def measured(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Read the test results in a model's confidence.json: kind of decoding -> results. Raises InputError if there are
    none to draw."""
    read_calibrations(folder)  # this reads the file only to raise an error that explains what is damaged
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))["measured"]
        kinds = {str(kind): entry for kind, entry in content.items()}
        numbers = [entry["calibration_error"] for entry in kinds.values()]
        for entry in kinds.values():
            numbers += [bin_[name] for bin_ in entry["reliability"] for name in ("count", "said", "right")]
        if not numbers or not all(math.isfinite(number) for number in numbers):
            raise ValueError("it has no measured bins")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"`folders` must have a {FILE} with what was measured, but '{folder}' has none ({type(error).__name__}: "
            f"{error!s:.200}). Run `python -m mmdec.evaluation.calibration` with --write."
        ) from None
    return kinds


def _panel(axes: Axes, title: str, entry: Mapping[str, Any]) -> None:
    """Draw one dot for each bin of confidences. Its area, and the number beside it, show the bin's number of outputs.
    The diagonal is perfect calibration.

    entry: the test results of one kind of decoding.
    """
    bins = entry["reliability"]
    said, right, counts = ([bin_[name] for bin_ in bins] for name in ("said", "right", "count"))
    total = max(sum(counts), 1)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    axes.scatter(said, right, [max(LARGEST * count / total, 4.0) for count in counts], alpha=0.7, linewidths=0)
    for x, y, count in zip(said, right, counts, strict=True):
        above = y > x  # whether the point is above the diagonal: its number is placed on the other side
        shift, side = (0, 7 if above else -7), "bottom" if above else "top"
        axes.annotate(str(count), (x, y), shift, textcoords="offset points", fontsize=7, ha="center", va=side)
    axes.set_title(
        f"{title}\n{total} outputs, calibration error {entry['calibration_error']:.3f}", fontsize=8, loc="left"
    )
    axes.set_xticks((0, 0.5, 1))
    axes.set_yticks((0, 0.5, 1))
    axes.tick_params(labelsize=7)
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.12, 1.12)


def main() -> None:
    """Run the command: draw the plot and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of models that have a confidence.json")
    parser.add_argument("--output", type=Path, required=True, help="the PNG")
    options = parser.parse_args()
    print(plot_reliability(options.folders, options.output))


if __name__ == "__main__":
    main()
