"""What `promotion.py` must know about a kind of model or drafter (a system): how it is measured and compared, and its
model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]  # results of a model on one split of a corpus, as values that JSON can hold

SPLITS = {
    "dev": "unseen sentences, which chose the weights",
    "test": "unseen sentences",
    "test_voices": "unseen sentences and voices",
    "paragraphs": "unseen, read in one go",
    "everyday": "unseen, outside the phrasebook, unseen voices",
}


@dataclass(frozen=True)
class Card:
    """The sections of a model card that are the same for all models of one kind."""

    pipeline_tag: str
    tags: Sequence[str]
    library: str
    languages: Sequence[str]
    description: str
    example: str  # Python code after `import mmdec`
    training: str  # the models' training data and method
    data: str  # the data that the results were measured on
    limits: str
    table: Callable[[Sequence[Report]], list[str]]  # reports of all splits -> lines of the card's table of results
    licences: str = "Weights and text: Apache-2.0."


@dataclass(frozen=True)
class Setting:
    """How a model is measured. home: the model's folder in models/, which a better model will replace. limit: number of
    inputs; None: all."""

    home: Path
    corpus: Path
    limit: int | None
    threads: int


def alone(run: Path, target: Path, force: bool) -> str:
    """Return "": no warning. This is the default of `Promotable.check`, for kinds of models that have no drafters in
    their folder."""
    return ""


@dataclass(frozen=True)
class Promotable:
    """How the shipped models or drafters of one kind are replaced by better ones ("promotion"): functions that measure,
    compare and describe them."""

    system: str  # the kind: "system" or, if there is none, "model_type" in config.json
    corpus: Path
    splits: tuple[str, ...]  # splits to measure for the model card, if the corpus has them
    has_split: Callable[[Path, str], bool]  # (corpus, split) -> whether the corpus has the split
    measure: Callable[[Path, str, Setting], Report]  # (model, split, setting) -> the report
    # figures to compare models by, the most important first; lower is better
    score: Callable[[Report], tuple[float, ...]]
    summary: Callable[[Report], str]  # the main figure of a report, in words
    card: Card
    # run -> the folder below models/ that it replaces
    place: Callable[[Path], Path] = lambda run: Path(run.name.removesuffix("-not-better"))
    # (run, target) -> the folder of a drafter in `run`, if nothing else is new; None: the model is new
    instead: Callable[[Path, Path], Path | None] = lambda run, target: None
    check: Callable[[Path, Path, bool], str] = alone  # (run, target, force) -> warning or ""; raises InputError
    left: Callable[[Path], Sequence[str]] = lambda run: ()  # run -> its folders that are not copied
    finish: Callable[[Path], None] = lambda home: None  # updates tables and hashes in the new folder


def render(
    card: Card, name: str, parameters: Mapping[str, int], reports: Sequence[Report], facts: Sequence[str]
) -> str:
    """Write a model card as Markdown.

    parameters: file -> its number of parameters. reports: the results on each split. facts: sentences about the
        training.
    """
    machine = reports[0]["hardware"]
    head = ["---", f"language: [{', '.join(card.languages)}]", "license: apache-2.0", f"library_name: {card.library}"]
    head += [f"pipeline_tag: {card.pipeline_tag}", f"tags: [{', '.join(card.tags)}]", "---", "", f"# {name}", ""]
    listed = [f"| `{file}` | {count / 1e6:.2f} M |" for file, count in parameters.items()]
    measured = (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, {machine['threads']} "
        f"{'thread' if machine['threads'] == 1 else 'threads'}, {machine['dtype']}, "
        f"torch {machine['versions']['torch']}, commit {(machine['commit'] or 'unknown')[:12]}, {machine['date']}. "
        f"{card.data}"
    )
    return "\n".join(
        [
            *head,
            *(card.description, ""),
            *("```python", "import mmdec", "", card.example, "```", "", "## Files", ""),
            *("| file | parameters |", "|---|---|", *listed, ""),
            *("## How it was trained", "", card.training, ""),
            *(f"- {fact}" for fact in facts),
            *("", "## Results", "", measured, "", *card.table(reports), ""),
            *("## Intended use and limits", "", card.limits, ""),
            *("## Licences", "", card.licences, ""),
        ]
    )


def split_cell(report: Report) -> str:
    """Format a table cell: the name of the report's split, and what the split has."""
    return f"`{report['split']}`: {SPLITS.get(report['split'], 'a split')}"


def percent(value: float | None) -> str:
    """Format a share as a percentage; "-" for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def rate_cell(entry: Mapping[str, Any]) -> str:
    """Format a rate with its 95 % interval, as percentages; "-" without a value.

    entry: "value" in [0, 1] or None, and perhaps "low" and "high".
    """
    if entry.get("value") is None:
        return "-"
    interval = f" [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]" if entry.get("low") is not None else ""
    return f"{100 * entry['value']:.1f} %{interval}"
