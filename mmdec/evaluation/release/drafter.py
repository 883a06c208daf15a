"""How drafters of a model that reads pictures are measured, compared and described when they are promoted.

A drafter goes to the folder of its system in its model's folder. Both are replaced in one step: the model's card has a
table of its drafters.
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
from mmdec.evaluation.quality.description import PROMPT, questions_of
from mmdec.evaluation.quality.drafter_pairs import BATCH, counts, difference
from mmdec.evaluation.quality.harness_description import DescriptionHarness
from mmdec.evaluation.release.promotable import Card, Promotable, Report, Setting
from mmdec.hub.drafters import CONFIG, PICTURE, load_drafter, read_network
from mmdec.hub.publish import PROVENANCE
from mmdec.hub.vlm import load_vlm
from mmdec.nn.fingerprint import fingerprint
from mmdec.pipelines.threads import keep_threads
from mmdec.provenance import CARD, hardware, weights
from mmdec.runtime import dtype_of
from mmdec.types import InputError

CHAIN = 7  # drafts of a round: as training scores them, whatever the machine's times
HEADING = "## Its drafters"
SPLITS = {
    "dev": "unseen scenes, which chose the weights",
    "test": "unseen scenes",
    "test_fonts": "unseen fonts",
    "test_templates": "unseen wordings",
}


def promotable(system: str) -> Promotable:
    """Drafters of a system, as `mmdec.drafters.registry` names it."""
    return Promotable(
        system=system,
        corpus=Path("data/scenes"),
        splits=tuple(SPLITS),
        has_split=lambda corpus, split: (corpus / f"{split}.json").is_file(),
        measure=measure,
        score=lambda report: (-report["tokens_per_round"]["value"],),
        summary=lambda report: f"{report['tokens_per_round']['value']:.3f} tokens a round",
        place=place,
        check=check,
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
            table=table,
        ),
    )


def measure(model: Path, split: str, setting: Setting) -> Report:
    """Tokens a round of the drafter in `model` for the model in `setting.home`: descriptions, in chains."""
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
        "tokens_per_round": difference(totals, np.zeros_like(totals)),  # less nothing: the interval alone
        "hardware": hardware(device=vlm.model.device, dtype=dtype_of(vlm.model), batch=BATCH, threads=setting.threads),
    }


def table(reports: Sequence[Report]) -> list[str]:
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
    """<its model>/<its system>. Raises InputError for a drafter that names no model."""
    target = str(read_object(run / CONFIG).get("target") or "")
    if not re.fullmatch(r"\w[\w.-]*", target):
        raise InputError(
            f"`run` must be a drafter whose {CONFIG} names its model as `target`, but '{run}' names {target!r:.60}."
        )
    return Path(target) / hub.kind(run)


def check(run: Path, target: Path, force: bool) -> str:
    """Refuse a drafter whose model is not there; warn of one that was trained for other weights."""
    home = target.parent
    if not hub.kind(home):
        raise InputError(
            f"`run` must be a drafter for a model in {home.parent}, but is for '{home}'. Promote that one."
        )
    base, own = trained_for(run), fingerprint(load_vlm(home, "cpu").model)
    return "" if base in ("", own) else f"'{run}' was trained for other weights ({base}) than '{home}' has ({own})"


def trained_for(drafter: Path) -> str:
    """The fingerprint of the model that it was trained for; "" where it does not say."""
    return str(read_object(drafter / CONFIG).get("base") or "")


def drafters(model: Path) -> list[str]:
    """The names of the drafters in a model's folder."""
    return sorted(file.parent.name for file in model.glob(f"[!.]*/{CONFIG}") if hub.kind(file.parent) in auto_names())


def list_drafters(model: Path) -> None:
    """Write the table of a model's drafters, from their provenances, into its card, and their hashes into its
    provenance, in place of those of before."""
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
