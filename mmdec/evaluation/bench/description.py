"""Times drafters for a vision-language model against transformers' own loops, after a check that tokens are equal.

Before any timing, each method answers each question once. If the tokens of one of mmdec's methods differ from those of
greedy `generate`, there is no report. A question on which transformers' prompt lookup differs is left out of that
comparison and counted. Then all methods run in turn, A B C D A B C D, question by question: mmdec through
`mmdec.describe`, transformers through `model.generate` on the same tensors. Wall clock is from the pictures' files to
text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from mmdec.checks.arguments import check_threads, check_whole
from mmdec.evaluation.bench.pairing import compare, comparisons, middle, recorded, stages
from mmdec.evaluation.bench.report import BenchReport, Comparison, Exactness, Kind
from mmdec.evaluation.quality.description import PROMPT, DescriptionHarness, questions_of
from mmdec.evaluation.quality.harness import Log, Measurements, Method, dtype_of, no_log, parse_plan
from mmdec.hub.provenance import hardware
from mmdec.hub.vlm import DEFAULT_MODEL, LoadedVlm, load_vlm
from mmdec.pipelines.description.describe import AUTO
from mmdec.pipelines.drafters import as_drafter
from mmdec.pipelines.threads import keep_threads
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.image_text import ImageQuestion
from mmdec.types import InputError, MmdecError

LENGTHS = ((1, 8), (9, 32), (33, 64), (65, 100_000))  # bins of the number of new tokens in an answer
COPIED = 10  # the most tokens that transformers' prompt lookup copies: the value in its documentation
PLAIN = "plain"  # mmdec's own loop without a drafter
LOOKUP = "prompt lookup"


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question, and the number of tokens in its greedy answer, by which results are grouped."""

    question: ImageQuestion
    tokens: int


@final
@dataclass(frozen=True)
class VlmBench:
    """The options of `bench_vlm`, which documents them."""

    allow_absolute_paths: bool = False
    prompt: str = PROMPT
    drafters: Sequence[str] = (AUTO,)
    plan: str = "learned"
    per_task: int = 6
    repeats: int = 5
    max_new_tokens: int | None = None
    device: str | None = "cpu"
    threads: int = 2
    log: Log = no_log


def bench_vlm(
    questions: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | LoadedVlm = DEFAULT_MODEL,
    **options: Any,
) -> BenchReport:
    """Time drafters against greedy `generate`, its prompt lookup, and mmdec's plain decoding.

    questions, images, allow_absolute_paths, prompt: what is asked about which pictures, see `evaluate_vlm`.
    per_task: number of questions from each task, evenly spaced.
    drafters: names or folders, as `mmdec.describe` takes them. They are also compared with each other.
    plan: draft size, see `parse_plan`.
    Raises InputError, and MmdecError if mmdec's tokens differ from those of greedy decoding.
    """
    how = VlmBench(**options)
    check_whole("per_task", how.per_task, 1, 2**31, "6 of each task give a first impression.")
    check_whole("repeats", how.repeats, 1, 10_000, "5 give quartiles.")
    check_threads(how.threads)
    if not how.drafters or len(set(how.drafters)) < len(how.drafters):
        named = list(how.drafters)
        raise InputError(f"`drafters` must be different names, at least one, but are {named}. Name them once.")
    nodes = parse_plan(how.plan)
    keep_threads(how.threads)
    vlm = model if isinstance(model, LoadedVlm) else load_vlm(model, how.device)
    chosen = questions_of(questions, images, how.prompt, how.per_task, Admission(how.allow_absolute_paths))
    drafted = [Method.drafted(name, as_drafter(vlm, name), nodes) for name in how.drafters]
    harness = DescriptionHarness(vlm, how.max_new_tokens)
    found = {
        "what": "a = mmdec with a drafter, b = the other; ratios are b / a",
        "model": vlm.directory.name if vlm.directory else "given",
        "plan": how.plan,
        **_all_methods(harness, drafted, chosen, how.repeats, how.log),
        "hardware": hardware(
            device=vlm.model.device, dtype=dtype_of(vlm.model), batch=1, threads=torch.get_num_threads()
        ),
    }
    rows: list[Comparison] = []
    for drafter, entry in found["drafters"].items():
        for baseline, groups in entry["against"].items():
            for group, row in groups.items():
                size = middle(group)
                kind: Kind = "task" if group.startswith("task ") else "all" if size is None else "length"
                more = {} if size is None else {"size": size, "unit": "tokens"}
                rows += comparisons(row, drafter, baseline, group, kind, **more)
    whole = {drafter: entry["against"]["greedy"]["all"] for drafter, entry in found["drafters"].items()}
    return BenchReport(
        bench="vlm",
        title=f"Drafters for pictures: {found['model']}, {found['questions']} questions, drafts {how.plan}",
        hardware=found["hardware"],
        exactness=tuple(
            Exactness(f"tokens of {drafter} and of transformers' greedy loop", row["identical"], row["of"])
            for drafter, row in whole.items()
        ),
        comparisons=tuple(rows),
        stages=found["stages"],
        depths={name: tuple(shares) for name, shares in found["depths"].items() if shares},
        not_measured=found["left_out"],
        details=found,
    )


def _all_methods(
    harness: DescriptionHarness,
    drafted: Sequence[Method],
    chosen: Sequence[ImageQuestion],
    repeats: int,
    log: Log,
) -> dict[str, Any]:
    greedy, plain = Method.greedy(), Method.drafted(PLAIN, None)
    lookup, left_out = Method(LOOKUP, "transformers", {"prompt_lookup_num_tokens": COPIED}), dict[str, str]()
    try:  # not every model of transformers can decode with prompt lookup
        harness.measure(chosen[:1], lookup)
    except (MmdecError, MemoryError):
        raise
    except Exception as error:
        left_out[LOOKUP] = f"transformers cannot run it here ({type(error).__name__}: {error!s:.200})"
    baselines = [] if left_out else [lookup]
    methods = [drafted[0], greedy, plain, *drafted[1:], *baselines]
    log(f"{len(chosen)} questions; methods: {', '.join(method.name for method in methods)}")
    singles = [[question] for question in chosen]
    watched, recorders = recorded(methods)
    equal = harness.gate(watched, singles, log, [method for method in watched[2:] if method.loop == "mmdec"])
    measured = harness.interleave(methods, singles, repeats, log)
    answered = [
        AnsweredQuestion(question, len(calls[0].tokens[0]))
        for question, calls in zip(chosen, measured[greedy.name], strict=True)
    ]
    groups = _groups(answered)
    return {
        "questions": len(answered),
        "tokens": sum(entry.tokens for entry in answered),
        "repeats": repeats,
        "stages": stages(measured, range(len(answered))),
        "depths": {name: recorder.shares() for name, recorder in recorders.items()},
        "left_out": left_out,
        "drafters": {
            method.name: {
                "drafter": getattr(method.options["drafter"], "name", method.options["drafter"]),
                "against": {
                    other.name: _against(measured, method, other, groups, equal[other.name])
                    for other in (greedy, *baselines, plain, *drafted)
                    if other is not method
                },
            }
            for method in drafted
        },
    }


def _groups(answered: Sequence[AnsweredQuestion]) -> dict[str, list[int]]:
    """Group the indices of the questions: all, by task, and by length of the answer."""
    groups = {"all": list(range(len(answered)))}
    for task in sorted({entry.question.task for entry in answered}):
        groups[f"task {task}"] = [index for index, entry in enumerate(answered) if entry.question.task == task]
    for low, high in LENGTHS:
        name = f"{low}+ tokens" if (low, high) == LENGTHS[-1] else f"{low}-{high} tokens"
        groups[name] = [index for index, entry in enumerate(answered) if low <= entry.tokens <= high]
    return groups


def _against(
    measured: Measurements, method: Method, other: Method, groups: dict[str, list[int]], equal: Sequence[bool]
) -> dict[str, Any]:
    """Compare `method` with `other` on each group, without the questions where other's tokens differ. groups: name ->
    indices of questions. equal: for each question, whether other's tokens are equal."""
    rows = {}
    for name, indices in groups.items():
        same = [index for index in indices if equal[index]]
        if indices:
            rows[name] = {"identical": len(same), "of": len(indices), **compare(measured, method, other, same)}
    return rows
