"""Times drafters for a vision-language model against transformers' own loops, after a check that tokens are equal.

Before any timing, each method answers each question once. If the tokens of one of mmdec's methods differ from those of
greedy `generate`, there is no report. A question on which the tokens of transformers' prompt lookup differ is left out
of the comparison with prompt lookup, and counted. Then all methods run in turn, A B C D A B C D, question by question:
mmdec through `mmdec.describe`, transformers through `model.generate` on the same tensors. Wall clock is from the
pictures' files to text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mmdec.bench.pairing import LOOKUP, PLAIN, length_groups, runnable_methods, task_groups, time_methods
from mmdec.bench.report import BenchReport, Exactness
from mmdec.checks.arguments import check_threads, check_whole
from mmdec.errors import InputError
from mmdec.evaluation.description import PROMPT, DescriptionHarness, questions_of
from mmdec.evaluation.harness import Log, Method, describe_measurement, no_log, parse_plan
from mmdec.generation.drafter_choice import resolve_drafter
from mmdec.pretrained.vlm import DEFAULT_MODEL, LoadedVlm, load_vlm
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.admission import Admission
from mmdec.vision.describe import AUTO

ANSWER_LENGTHS = ((1, 8), (9, 32), (33, 64), (65, 100_000))  # least and most new tokens of each bin of answers


def bench_vlm(
    questions: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | LoadedVlm = DEFAULT_MODEL,
    *,
    allow_absolute_paths: bool = False,
    prompt: str = PROMPT,
    drafters: Sequence[str] = (AUTO,),
    plan: str = "learned",
    per_task: int = 6,
    repeats: int = 5,
    max_new_tokens: int | None = None,
    device: str | None = "cpu",
    threads: int = 2,
    log: Log = no_log,
) -> BenchReport:
    """Time drafters against greedy `generate`, its prompt lookup, and mmdec's plain decoding.

    Args:
        questions: File or folder of questions; None: the questions about the sample pictures, or, if `images` is given,
            `prompt` about each picture.
        images: Folder of the pictures, or one picture.
        allow_absolute_paths: Accept absolute paths in `questions`.
        max_new_tokens: Maximum number of new tokens of an answer; None: the model's default.
        per_task: Number of questions from each task, evenly spaced.
        repeats: Timed answers of each method to each question.
        drafters: Names or folders, as `mmdec.describe` takes them. They are also compared with each other.
        plan: Draft size: "learned", a chain such as "8", or a tree such as "16x6" (16 nodes, at most 6 deep).

    Raises:
        InputError: If an argument is not valid.
        MmdecError: If mmdec's tokens differ from those of greedy decoding.
    """
    check_whole("per_task", per_task, 1, 2**31, "6 of each task give a first impression.")
    check_whole("repeats", repeats, 1, 10_000, "5 give quartiles.")
    check_threads(threads)
    if not drafters or len(set(drafters)) < len(drafters):
        named = list(drafters)
        raise InputError(f"`drafters` must be different names, at least one, but are {named}. Name them once.")
    nodes = parse_plan(plan)
    keep_threads(threads)
    vlm = model if isinstance(model, LoadedVlm) else load_vlm(model, device)
    chosen = questions_of(questions, images, prompt, per_task, Admission(allow_absolute_paths))
    drafted = [Method.with_drafter(name, resolve_drafter(name, vlm).drafter_for(vlm.model), nodes) for name in drafters]
    harness = DescriptionHarness(vlm, max_new_tokens)
    greedy = Method.greedy()
    stock, left_out = runnable_methods(harness, chosen[0], [LOOKUP])
    methods = [drafted[0], greedy, PLAIN, *drafted[1:], *stock]
    log(f"{len(chosen)} questions; methods: {', '.join(method.name for method in methods)}")
    timed = time_methods(harness, methods, [[question] for question in chosen], repeats, log)
    tokens = [len(repeats[0].tokens[0]) for repeats in timed.measured[greedy.name]]
    groups = [*task_groups([question.task for question in chosen]), *length_groups(tokens, ANSWER_LENGTHS, "tokens")]
    name = vlm.directory.name if vlm.directory else "given"
    return BenchReport(
        bench="vlm",
        title=f"Drafters for pictures: {name}, {len(chosen)} questions, drafts {plan}",
        hardware=describe_measurement(vlm.model),
        exactness=tuple(
            Exactness(f"tokens of {method.name} and of transformers' greedy loop", len(chosen), len(chosen))
            for method in drafted
        ),
        comparisons=tuple(timed.comparisons(drafted, (greedy, *stock, PLAIN, *drafted), groups)),
        stages=timed.stages(),
        depths=timed.depths,
        not_measured=left_out,
        details={"tokens": sum(tokens)},
    )
