"""`mmdec doctor`: tests whether a drafter's checkpoint is read as in its training.

It also measures how many drafted tokens are accepted.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdec.checks.files import json_text, printable
from mmdec.cli.options import AsJson, Device, Dtype, Threads, log, resolve_dtype
from mmdec.cli.progress import show_loading

if TYPE_CHECKING:
    from mmdec.doctor.examine import Examination, Share, Trial

Source = Annotated[
    str,
    typer.Argument(
        metavar="DRAFTER", help="A drafter's folder or Hugging Face id, or <model>/<drafter> for a shipped one."
    ),
]
Target = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its target: a folder, a Hugging Face id, or a shipped name.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Prompts: .txt, one on each line; .jsonl of chats (messages or conversations); .json as LLaVA's, pictures "
        "in images/ next to it. Default: mmdec's own, without pictures.",
        show_default=False,
    ),
]
Most = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Use only this many prompts, evenly spaced.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, max=4096, metavar="N", help="Maximum tokens of an answer.")]
Template = Annotated[bool, typer.Option("--template/--raw", help="Give prompts through the chat template, or as is.")]


def doctor(
    drafter: Source,
    model: Target,
    data: Data = None,
    limit: Most = 64,
    tokens: Tokens = 128,
    template: Template = True,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
) -> None:
    """Find out why a drafter's tokens are accepted less often than published, and how to correct it.

    The model answers the prompts, and the drafter is measured on these answers: first as its checkpoint is read now,
    then with one convention changed at a time (a choice that a checkpoint may leave open). The report says which
    conventions are wrong, and ends with the tokens per round for chains and trees of several sizes.
    """
    from mmdec.checks.arguments import check_threads
    from mmdec.checks.sampling import evenly_spaced
    from mmdec.doctor.answers import built_in_prompts, has_template, load_examined_model, read_doctor_prompts
    from mmdec.doctor.examine import examine
    from mmdec.tasks.threads import with_threads

    check_threads(threads)
    prompts = None if data is None else read_doctor_prompts(data, limit)
    with show_loading(model, quiet=as_json):
        loaded = load_examined_model(model, device, resolve_dtype(dtype, device))
    if prompts is None:
        prompts = evenly_spaced(built_in_prompts(template and has_template(loaded)), limit)
    with with_threads(threads, loaded.model):
        examination = examine(drafter, loaded, prompts, template=template, tokens=tokens, log=log)
    print(json_text(asdict(examination), 2) if as_json else _text(examination))


def _text(examination: Examination) -> str:
    """Format the result of `examine` as text with tables."""
    template = "with the chat template" if examination.template else "without a chat template"
    pictures = f", {examination.pictures} with pictures" if examination.pictures else ""
    lines = [
        f"{printable(examination.drafter)}: {examination.system}, {examination.layout} layout, for "
        f"{printable(examination.target)}",
        f"{examination.prompts} prompts {template}{pictures}; {examination.positions} positions of the model's own "
        "greedy text",
        "",
        f"First token accepted: {_share(examination.acceptance)}",
    ]
    if examination.after_changes is not None:
        lines[-1] += f"; after the changes: {_share(examination.after_changes)}"
    for row in examination.findings:
        lines += [
            "",
            f"OFF: {row.convention}. It is read as: {row.now}. Better: {row.tried}.",
            f"  {_token(row)}: {_percent(row.before.value)} -> {_percent(row.after.value)}, gain {_share(row.gain)}",
            f"  {row.remedy}",
        ]
    if not examination.findings:
        lines += ["", "Nothing is off: no other setting gains." if examination.conventions else "No setting was tried."]
    if examination.conventions:
        rows = [("convention", "read as", "tried", "accepted", "gain, 95 % interval", "assessment")]
        rows += [
            (
                row.convention,
                row.now,
                row.tried,
                _percent(row.after.value) + (" (2nd token)" if row.depth > 1 else ""),
                _share(row.gain),
                row.assessment,
            )
            for row in examination.conventions
        ]
        title = "What else was tried, on top of the changes" if examination.findings else "What else was tried"
        lines += ["", title, *_table(rows)]
    changed = any(row.after_changes is not None for row in examination.rounds)
    sizes: list[tuple[str, ...]] = [("drafts", "tokens per round, bonus included")]
    sizes += [(row.name, f"{row.as_is:.2f}") for row in examination.rounds]
    if changed:
        after = [f"{row.after_changes:.2f}" if row.after_changes else "" for row in examination.rounds]
        sizes = [(*cells, last) for cells, last in zip(sizes, ["after the changes", *after], strict=True)]
    lines += ["", *_table(sizes)]
    if examination.depths:
        shares = ", ".join(_percent(share) for share in examination.depths if share == share)
        lines += ["", f"Accepted, token by token of a chain, where those before were: {shares}"]
    return "\n".join([*lines, *(["", *examination.notes] if examination.notes else [])])


def _token(row: Trial) -> str:
    return "First token" if row.depth == 1 else "Second token"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(share: Share) -> str:
    return f"{_percent(share.value)} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
