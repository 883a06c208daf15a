"""How small models that read pictures are measured, compared and described when they are promoted.

A model comes with its drafters: those for the weights of before would draft worse, under figures that are false.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmdec.evaluation.quality.description import evaluate_vlm
from mmdec.evaluation.release.drafter import drafters, list_drafters, trained_for
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting, rate_cell
from mmdec.hub.vlm import load_vlm
from mmdec.nn.fingerprint import fingerprint
from mmdec.provenance import weights
from mmdec.types import InputError

SWAPPED = "swapped"  # test's questions about another picture
COLUMNS = {
    "dev": "unseen scenes, which chose the weights",
    "test": "unseen scenes",
    "test_fonts": "unseen fonts",
    "test_templates": "unseen wordings",
    SWAPPED: "another picture",
}
BATCH = 8  # questions at once: the answers do not depend on it


def measure(model: Path, split: str, setting: Setting) -> Report:
    report = evaluate_vlm(
        _file(setting.corpus, split),
        model=model,
        drafter=None,
        swap=split == SWAPPED,
        limit=setting.limit,
        batch_size=BATCH,
        device="cpu",
        threads=setting.threads,
    )
    return {"split": split, **report}


def score(report: Report) -> tuple[float, ...]:
    """What is not right, the mean of the tasks: rare tasks count as others do."""
    rights = [row["right"]["value"] for row in report["by_task"].values() if row["right"]["n"]]
    if not rights:
        raise InputError(f"`corpus` must say what is right of {report['split']}, but does not. Draw the scenes anew.")
    return (1.0 - sum(rights) / len(rights),)


def summary(report: Report) -> str:
    return f"{100 * (1 - score(report)[0]):.2f} % right, the mean of {len(report['by_task'])} tasks"


def table(reports: Sequence[Report]) -> list[str]:
    """A row for each task, a column for each split."""
    rows = []
    for task in sorted({task for report in reports for task in report["by_task"]}):
        found = [report["by_task"].get(task, {}).get("right", {}) for report in reports]
        cells = (f"{rate_cell(right)}, {right['n']}" if right.get("n") else "-" for right in found)
        rows.append(f"| {task} | {' | '.join(cells)} |")
    means = (f"{100 * (1 - score(report)[0]):.1f} %" for report in reports)
    rows.append(f"| mean of the tasks | {' | '.join(means)} |")
    head = " | ".join(f"`{report['split']}`: {COLUMNS.get(report['split'], 'a split')}" for report in reports)
    return [
        "Share of right answers in the reference's own words, greedy, with the number of questions (claims, of "
        "descriptions).",
        "",
        f"| task | {head} |",
        "|---" * (1 + len(reports)) + "|",
        *rows,
    ]


def instead(run: Path, target: Path) -> Path | None:
    """The one drafter that is new, where the model is the one in models/: what training a drafter leaves in runs/."""
    if not _same_model(run, target):
        return None
    new = [name for name in drafters(run) if weights(run / name) != weights(target / name)]
    if len(new) == 1:
        return run / new[0]
    calls = ", ".join(f"`mmdec promote {run / name}`" for name in new)
    raise InputError(
        f"`run` must hold other weights than '{target}', but its model is the same. "
        + (f"Promote its drafters: {calls}." if new else "Train on, or give --force to measure it again.")
    )


def check(run: Path, target: Path, force: bool) -> str:
    """Refuse a model without the drafters that the one in models/ has, or with some that are for other weights."""
    there, brought = drafters(target), drafters(run)
    if not there and not brought:
        return ""
    missing = [name for name in there if name not in brought]
    stale = stale_drafters(run)
    if not missing and not stale:
        return ""
    which = "; ".join(
        f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has for other weights", stale)) if names
    )
    if force:
        return f"drafters: '{run}' {which}; those in '{target}' are removed with its weights, and none of these comes"
    raise InputError(
        f"`run` must bring drafters trained for its own weights, as '{target}' has them ({', '.join(there) or 'none'}),"
        f" but {which}. Train each anew: `python -m mmdec.training fit --config recipes/vlm_drafters/scenes/NAME.yaml "
        f"--data.init_args.base={run}`, and copy runs/vlm_drafters/NAME/drafter to {run}/NAME; or give --force to do "
        "without."
    )


def stale_drafters(run: Path) -> list[str]:
    """The names of its drafters that were not trained for its weights."""
    names = drafters(run)
    own = fingerprint(load_vlm(run, "cpu").model) if names else ""
    return [name for name in names if trained_for(run / name) != own]


def _same_model(run: Path, target: Path) -> bool:
    """Whether both have the same weights but for their drafters."""
    first, second = ({name: value for name, value in weights(at).items() if "/" not in name} for at in (run, target))
    return first == second


def _file(corpus: Path, split: str) -> Path:
    return corpus / f"{'test' if split == SWAPPED else split}.json"


DESCRIPTION = Promotable(
    system="llava",
    corpus=Path("data/scenes"),
    splits=tuple(COLUMNS),
    has_split=lambda corpus, split: _file(corpus, split).is_file(),
    measure=measure,
    score=score,
    summary=summary,
    instead=instead,
    check=check,
    left=stale_drafters,
    finish=list_drafters,
    card=Card(
        pipeline_tag="image-text-to-text",
        tags=("llava", "speculative-decoding"),
        library="transformers",
        languages=("en",),
        description=(
            "A small vision-language model (`LlavaForConditionalGeneration`: a SigLIP encoder, a deep and narrow "
            "Llama) that answers questions about drawn pictures: rooms, streets, menus, timetables, tickets, price "
            "tags, signs, clocks, thermometers, maps. It is there to try and test drafters, and gives them something "
            "to save."
        ),
        example='print(mmdec.describe("menu.png", "How much is BURGER?").text)',
        training=(
            "On drawn scenes alone (`data/build/scenes.py`), by `make train` or `recipes/vlm/scenes.yaml`. What makes "
            "it read and answer: an auxiliary loss on what patches show (letters by cell), printed words spelled "
            "letter by letter in the text, heads of the language model guided to the patch that is read, a projector "
            "trained on whitened states, and short answers that weigh more than their tokens. docs/log.md has what "
            "failed."
        ),
        data=(
            "All pictures are drawn; training has none of these scene graphs, nor the fonts and wordings of the splits "
            "named after them. About another picture: what the language alone tells."
        ),
        limits=(
            "It knows drawn scenes of 128 x 128 pixels and nothing of photographs, which were not measured. An answer "
            "counts as right only in the reference's own words."
        ),
        table=table,
    ),
)
