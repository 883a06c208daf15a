"""How small vision-language models and their drafters are promoted, that is, replace the shipped ones: how they are
measured, compared and described.

A model is promoted together with its drafters: drafters for the old weights would draft worse, and their published
figures would be false. A promoted drafter is put into its model's folder, in a subfolder named after the drafter's
kind, such as `eagle3`. The model's folder is replaced in one step, because the model's card has a table of its
drafters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdec import hub
from mmdec.checks.files import read_object
from mmdec.drafters.registry import auto_names
from mmdec.evaluation.quality.description import PROMPT, DescriptionHarness, evaluate_vlm, questions_of
from mmdec.evaluation.quality.drafter_pairs import BATCH as DRAFTED_TOGETHER
from mmdec.evaluation.quality.drafter_pairs import counts, difference
from mmdec.evaluation.quality.harness import measured_on
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting, rate_cell
from mmdec.hub.drafters import CONFIG, PICTURE, load_drafter, read_network
from mmdec.hub.provenance import CARD, weights
from mmdec.hub.publish import PROVENANCE
from mmdec.hub.vlm import load_vlm
from mmdec.nn.fingerprint import fingerprint
from mmdec.pipelines.threads import keep_threads
from mmdec.types import InputError

CHAIN = 7  # drafted tokens in a round, as in training's scores; fixed, so that the machine's speed does not matter
HEADING = "## Its drafters"
SPLITS = {
    "dev": "unseen scenes, which chose the weights",
    "test": "unseen scenes",
    "test_fonts": "unseen fonts",
    "test_templates": "unseen wordings",
}


def promotable(system: str) -> Promotable:
    """Return how drafters of one kind are promoted. system: the kind, such as "eagle3"."""
    return Promotable(
        system=system,
        corpus=Path("data/scenes"),
        splits=tuple(SPLITS),
        has_split=lambda corpus, split: (corpus / f"{split}.json").is_file(),
        measure=measure_drafter,
        score=lambda report: (-report["tokens_per_round"]["value"],),
        summary=lambda report: f"{report['tokens_per_round']['value']:.3f} tokens a round",
        place=place,
        check=check_drafter,
        finish=list_drafters,
        card=Card(
            pipeline_tag="image-text-to-text",
            tags=("speculative-decoding", system),
            library="mmdec",
            languages=("en",),
            description=(
                f"A drafter of the system {system} for the model in whose folder it lies. It proposes tokens; the "
                "model checks them, and its text stays its own."
            ),
            example=(f'out = mmdec.describe("{PICTURE}", drafter="{system}")\nprint(out.text, out.tokens_per_round)'),
            training=f"On the model's own answers about drawn scenes, by `recipes/vlm_drafters/scenes/{system}.yaml`.",
            data="All pictures are drawn.",
            limits="For the weights of this model alone; for others it drafts worse, and the text is still theirs.",
            table=drafter_table,
        ),
    )


def measure_drafter(model: Path, split: str, setting: Setting) -> Report:
    """Measure tokens per round of a drafter, with drafts of `CHAIN` tokens in a chain, on the questions that ask for a
    description.

    model: folder of the drafter. split: name of a split of the corpus. setting: has the folder of the target model
        (`home`).
    """
    asked = questions_of(str(setting.corpus / f"{split}.json"), None, PROMPT, setting.limit)
    asked = [question for question in asked if question.scoring == "claims"]
    if not asked:
        raise InputError(f"`corpus` must have descriptions in {split}, but has none. Draw the scenes anew.")
    vlm = load_vlm(setting.home, "cpu")
    keep_threads(setting.threads)
    totals = counts(DescriptionHarness(vlm), asked, load_drafter(model, vlm.model), CHAIN)
    return {
        "split": split,
        "n": len(asked),
        "chain": CHAIN,
        "model": setting.home.name,
        "base": fingerprint(vlm.model),
        # the argument 0 is subtracted from each value, because only `difference` also gives an interval
        "tokens_per_round": difference(totals, np.zeros_like(totals)),
        "hardware": measured_on(vlm.model, DRAFTED_TOGETHER),
    }


def drafter_table(reports: Sequence[Report]) -> list[str]:
    rows = [
        f"| `{report['split']}`: {SPLITS.get(report['split'], 'a split')} | {report['n']} | "
        f"{_figure(report['tokens_per_round'])} |"
        for report in reports
    ]
    return [
        f"Of descriptions, in chains of {CHAIN} drafts, for the model with the fingerprint {reports[0]['base']}.",
        *("", "| split | n | tokens a round, bonus included |", "|---|---|---|", *rows),
    ]


def place(run: Path) -> Path:
    """Return the folder below models/ into which a drafter is put, such as vlm-scenes/eagle3. Raises InputError if its
    config names no model."""
    target = str(read_object(run / CONFIG).get("target") or "")
    if not re.fullmatch(r"\w[\w.-]*", target):
        raise InputError(
            f"`run` must be a drafter whose {CONFIG} names its model as `target`, but '{run}' names {target!r:.60}."
        )
    return Path(target) / hub.kind(run)


def check_drafter(run: Path, target: Path, force: bool) -> str:
    """Check a drafter before it replaces the shipped one.

    run: the drafter's new folder. target: the folder in models/ that it replaces. force: not used.
    Returns: a warning if the drafter was trained for other weights of the model, else "".
    Raises: InputError if its model does not exist.
    """
    home = target.parent
    if not hub.kind(home):
        raise InputError(
            f"`run` must be a drafter for a model in {home.parent}, but is for '{home}'. Promote that one."
        )
    base, own = trained_for(run), fingerprint(load_vlm(home, "cpu").model)
    return "" if base in ("", own) else f"'{run}' was trained for other weights ({base}) than '{home}' has ({own})"


def trained_for(drafter: Path) -> str:
    """Return the fingerprint of the target model that a drafter was trained for, from its config.json; "" if it is not
    recorded."""
    return str(read_object(drafter / CONFIG).get("base") or "")


def drafters(model: Path) -> list[str]:
    """List the names of the drafters in a model's folder."""
    return sorted(file.parent.name for file in model.glob(f"[!.]*/{CONFIG}") if hub.kind(file.parent) in auto_names())


def list_drafters(model: Path) -> None:
    """Update a model's folder after a change of its drafters: the card's table of drafters, and the hashes of all
    weights in provenance.json."""
    names = drafters(model)
    if names:
        card = model / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else f"# {model.name}\n"
        before, _, rest = text.partition(f"\n{HEADING}\n")
        after = re.search(r"^## ", rest, re.MULTILINE)
        parts = [before.rstrip("\n"), "\n".join(_section(model, names))]
        parts += [rest[after.start() :].rstrip("\n")] if after else []
        card.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    provenance = read_object(model / PROVENANCE)
    if "weights" in provenance:
        provenance["weights"] = weights(model)
        text = json.dumps(provenance, indent=2, ensure_ascii=False)
        (model / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def _section(model: Path, names: Sequence[str]) -> list[str]:
    lines = [
        HEADING,
        "",
        f"In folders of their name. Tokens a round of descriptions, the bonus included, in chains of {CHAIN} drafts: "
        "as `mmdec promote` measured it on `dev`, decoding, and as training did, from the ranks of the drafts.",
        "",
        "| drafter | parameters | tokens a round | in training | trained for |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        provenance = read_object(model / name / PROVENANCE)
        reports = [report for report in _items(provenance.get("measured")) if isinstance(report, dict)]
        measured = next((one for one in reports if one.get("split") == "dev" and "tokens_per_round" in one), None)
        trained = _mapping(_mapping(provenance.get("training")).get("dev")).get("chain")
        count = sum(weight.numel() for weight in read_network(model / name).parameters())
        found = f"{_figure(measured['tokens_per_round'])}, n = {measured['n']}" if measured else "not measured"
        cells = [f"`{name}`", f"{count / 1e6:.2f} M", found, "-" if trained is None else f"{trained:.2f}"]
        lines.append(f"| {' | '.join([*cells, trained_for(model / name) or '-'])} |")
    return lines


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _figure(rate: Mapping[str, float]) -> str:
    return f"{rate['value']:.2f} [{rate['low']:.2f}, {rate['high']:.2f}]"


DRAFTERS = {system: promotable(system) for system in auto_names()}


SWAPPED = "swapped"  # name for the test split in which each question gets another picture
COLUMNS = {**SPLITS, SWAPPED: "another picture"}
BATCH = 8  # questions at once; the answers do not depend on this number


def measure(model: Path, split: str, setting: Setting) -> Report:
    """Score a model's answers to a split's questions, without a drafter. For the split `SWAPPED`, each question gets
    another picture."""
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
    """Compute the share of wrong answers, as the mean over tasks: rare tasks count as much as others. Lower is
    better."""
    rights = [row["right"]["value"] for row in report["by_task"].values() if row["right"]["n"]]
    if not rights:
        raise InputError(f"`corpus` must say what is right of {report['split']}, but does not. Draw the scenes anew.")
    return (1.0 - sum(rights) / len(rights),)


def summary(report: Report) -> str:
    return f"{100 * (1 - score(report)[0]):.2f} % right, the mean of {len(report['by_task'])} tasks"


def table(reports: Sequence[Report]) -> list[str]:
    """Write the lines of the results table: one row for each task, one column for each report (split)."""
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
    """Find out whether only a drafter in `run`, a newly trained model's folder, is new. target: the shipped model's
    folder.

    Returns: the folder of the new drafter, if the models are the same; None if the model is new, too.
    Raises: InputError if the models are the same, and none or several of the drafters are new.
    """
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
    """Check the drafters in `run`, a newly trained model's folder. Each must be trained for this model's weights, and
    none that is in `target`, the shipped model's folder, may be missing.

    Returns: "" if this is so; a warning if not, with `force`.
    Raises: InputError if not, without `force`.
    """
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
    """List the names of the drafters in `run`, a model's folder, that were trained for other weights than the
    model's."""
    names = drafters(run)
    own = fingerprint(load_vlm(run, "cpu").model) if names else ""
    return [name for name in names if trained_for(run / name) != own]


def _same_model(run: Path, target: Path) -> bool:
    """Return whether both folders have the same model weights; drafters are not compared."""
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
