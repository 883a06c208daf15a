"""`mmdec promote RUN`: a better model from runs/ takes its place in models/, with a card of what was measured here.

Both are measured on the development split, and the one in models/ gives way to a better one alone. Card and provenance
are written anew, from measurements of the very weights that are put there: nothing is kept from before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mmdec import hub
from mmdec.evaluation import cards
from mmdec.evaluation.transcription import evaluate_asr
from mmdec.evaluation.translation import evaluate_speech
from mmdec.hub.processes import only_one
from mmdec.hub.publish import whole_folder
from mmdec.provenance import CARD, stamp, weights
from mmdec.types import InputError, MmdecError

CHOSEN_BY = "dev"
DECODINGS = ("lookahead", "autoregressive")
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a system's models are measured. `score`: lower is better, the first number counts first."""

    corpus: Path
    splits: tuple[str, ...]  # for the card; those that the corpus has
    has: Callable[[Path, str], bool]
    measure: Callable[[Path, Path, str, int | None, int], Report]  # model, corpus, split, limit, threads
    score: Callable[[Report], tuple[float, ...]]
    said: Callable[[Report], str]
    card: Callable[[str, Mapping[str, int], Sequence[Report], Sequence[str]], str]


def _speech(model: Path, corpus: Path, split: str, limit: int | None, threads: int) -> Report:
    return evaluate_speech(split, corpus, model, DECODINGS, limit=limit, asr=False, device="cpu", threads=threads)


def _phone_errors(report: Report) -> tuple[float, ...]:
    found = [
        scores["phone_error_rate_nearest"] or scores["phone_error_rate"] for scores in report["strategies"].values()
    ]
    if not all(found):
        raise InputError(f"`corpus` must have alignments of {report['split']}, but has none. Build it whole.")
    return (sum(one["value"] for one in found) / len(found),)


def _transcription(model: Path, corpus: Path, split: str, limit: int | None, threads: int) -> Report:
    return evaluate_asr(split, corpus, model, plain=False, limit=limit, device="cpu", threads=threads)


def _tokens(report: Report) -> float:
    return float(next(iter(report["decoding"].values())).get("tokens_per_round") or 1.0)


KINDS: dict[str, Kind] = {  # by what a model's config.json says that it is
    "daspeech": Kind(
        Path("data/corpus"),
        ("dev", "test", "test_voices"),
        lambda corpus, split: (corpus / "cvss_c" / f"{split}.tsv").is_file(),
        _speech,
        _phone_errors,
        lambda report: f"{100 * _phone_errors(report)[0]:.2f} % phone errors",
        cards.speech_card,
    ),
    "whisper": Kind(
        Path("data/english"),
        ("dev", "test", "test_voices", "paragraphs", "everyday"),
        lambda corpus, split: (corpus / split).is_dir(),
        _transcription,
        lambda report: (float(report["wer"]["value"]), -_tokens(report)),  # of equal errors, better heads
        lambda report: f"{100 * report['wer']['value']:.2f} % word errors, {_tokens(report):.3f} tokens per round",
        cards.whisper_card,
    ),
}


def promote(
    run: Path,
    *,
    force: bool = False,
    models: Path = Path("models"),
    corpus: Path | None = None,
    limit: int | None = None,
    threads: int = 2,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Put the model in `run` into `models`, under its folder's name, if it is better than the one there.

    corpus: where it is measured; None takes the system's own. limit: so many utterances of each split, evenly spaced.
    force: also one that is not better. Raises InputError, with both numbers, for a model that is not better, for what
    is no model, and while `make train` works in runs/.
    """
    kind = KINDS.get(hub.kind(run))
    if kind is None:
        raise InputError(
            f"`run` must be a model that `make train` made ({', '.join(KINDS)}), but '{run}' is "
            f"{hub.kind(run) or 'none'!r}. Give its folder, runs/daspeech-phrasebook say."
        )
    place, root = models / run.name.removesuffix("-not-better"), corpus or kind.corpus
    if place.exists() and place.resolve() == run.resolve():
        raise InputError(f"`run` must lie in runs/, but '{run}' is the model in {models}. Give the folder of a run.")
    if not kind.has(root, CHOSEN_BY):
        raise InputError(
            f"`corpus` must have a split {CHOSEN_BY}, but '{root}' has none. Build it: see data/README.md."
        )
    with only_one(run.parent, "mmdec promote"):
        mine = weights(run)
        log(f"measuring {run} on {CHOSEN_BY}")
        new = kind.measure(run, root, CHOSEN_BY, limit, threads)
        old = None
        if hub.kind(place):
            log(f"measuring {place} on {CHOSEN_BY}")
            old = kind.measure(place, root, CHOSEN_BY, limit, threads)
        compared = f"{kind.said(new)} on {CHOSEN_BY}, n = {new['n']}" + (
            f", where the one in {models} had {kind.said(old)}" if old else ""
        )
        if old is not None and kind.score(new) >= kind.score(old) and not force:
            raise InputError(f"`run` must be better than '{place}', but has {compared}. Train on, or give --force.")
        log(compared)
        reports = [new]
        for split in kind.splits:
            if split != CHOSEN_BY and kind.has(root, split):
                log(f"measuring {run} on {split}")
                reports.append(kind.measure(run, root, split, limit, threads))
        return _put(run, place, mine, kind, reports, compared)


def _put(run: Path, place: Path, mine: dict[str, str], kind: Kind, reports: Sequence[Report], compared: str) -> Path:
    """Whole or not at all, and with these very weights."""
    path = run / "provenance.json"
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with whole_folder(place) as fresh:
        shutil.copytree(run, fresh, dirs_exist_ok=True, ignore=lambda folder, _: [CARD] if Path(folder) == run else [])
        if weights(fresh) != mine:
            raise MmdecError(f"The weights in '{run}' changed while they were measured. Stop what writes there.")
        before.pop("compared", None)
        text = {**before, "promoted": stamp(), "weights": mine, "chosen": compared, "measured": list(reports)}
        written = json.dumps(text, indent=2, ensure_ascii=False, default=str)
        (fresh / "provenance.json").write_text(written + "\n", encoding="utf-8")
        facts = [*_facts(before), f"Chosen by {compared}."]
        (fresh / CARD).write_text(kind.card(place.name, parameters(fresh), reports, facts), encoding="utf-8")
    return place


def _facts(before: Mapping[str, Any]) -> list[str]:
    training = before.get("training") or {}
    found = [f"Written on {before.get('date', 'an unknown day')} at commit {str(before.get('commit'))[:12]}."]
    if "step" in training:
        found.append(f"The last stage had {training['step']} steps; `provenance.json` has its hyperparameters.")
    start = (training.get("hyperparameters") or {}).get("start")
    return [*found, f"It began from `{start}`."] if start else found


def parameters(folder: Path) -> dict[str, int]:
    """Numbers in each safetensors file of a folder, by its path there."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(
                f"`run` must hold sound safetensors, but '{path}' is none ({error}). Train again."
            ) from error
        count = 0
        for shape in shapes:
            size = 1
            for length in shape:
                size *= length
            count += size
        found[path.relative_to(folder).as_posix()] = count
    return found
