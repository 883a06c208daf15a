"""Scores a vision-language model on questions about pictures: the right answers by task, and the cost of decoding.

`mmdec.describe` is scored. Questions are about the project's synthetic pictures (data/scenes), from a user's own list,
or from a published benchmark; `corpora/image_text.py` reads all of them. `mmdec eval vlm` prints the report.

mmdec's costs are those that `mmdec.describe` returns. transformers' loops run through `model.generate`, on the tensors
that `describe` would give the model. A call's seconds have three parts: features (pixels and text become tensors),
encoder (the vision encoder) and decoder (all the rest up to the text). The total also includes opening the pictures.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, final

from mmdec.core.timing import Stopwatch, time_passes
from mmdec.errors import BatchError, InputError
from mmdec.evaluation.harness import (
    Harness,
    Log,
    Measurement,
    Method,
    count_passes,
    cut_at_end,
    describe_measurement,
    no_log,
    parse_plan,
    transformers_errors_only,
)
from mmdec.evaluation.options import VlmEvalOptions
from mmdec.generation.drafter_choice import resolve_drafter
from mmdec.pretrained import DEFAULT_VLM
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.tasks.generate_options import MAX_NEW_TOKENS
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.admission import STRICT, Admission
from mmdec.training.corpora.chats import IMAGE
from mmdec.training.corpora.image_text import ImageQuestion, ask_about, by_task, read_questions, swap_pictures
from mmdec.training.metrics import text as metrics
from mmdec.training.metrics.text import count_claims, plain_answer, right_answer, right_in_other_words
from mmdec.vision.answer import Description
from mmdec.vision.describe import describe
from mmdec.vision.questions import Prompt, model_inputs, read_question, render_chat, user_message


@final
class DescriptionHarness(Harness[ImageQuestion]):
    """Answers questions with one loaded model, in at most `max_new_tokens` each, and measures the calls."""

    def __init__(self, vlm: LoadedVlm, max_new_tokens: int | None = None) -> None:
        self.vlm, self.model = vlm, vlm.model
        config: Any = self.model.generation_config
        longest = max_new_tokens or config.max_new_tokens or MAX_NEW_TOKENS
        self.options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": longest}

    def prompt(self, question: ImageQuestion) -> Prompt:
        """Return the question's text; if it says where its pictures belong, the texts between them."""
        texts = question.question.split(IMAGE)
        return tuple(texts) if len(texts) > 1 else question.question

    def describe(self, questions: Sequence[ImageQuestion], method: Method) -> list[Description]:
        """Answer one batch by `mmdec.describe`.

        Raises:
            InputError: Or BatchError if some questions of the batch are refused.
        """
        images: list[Any] = [question.images for question in questions]
        prompts = [self.prompt(question) for question in questions]
        options: dict[str, Any] = {**self.options, **method.options}
        return describe(images, prompts, model=self.vlm, batch_size=len(questions), **options)

    def measure(self, inputs: Sequence[ImageQuestion], method: Method) -> Measurement:
        """Answer questions as one batch with this method, and measure it."""
        with transformers_errors_only(), count_passes(self.model.get_decoder()) as passes:
            return (
                self._describe(inputs, method, passes)
                if method.loop == "mmdec"
                else self._generate(inputs, method, passes)
            )

    def _describe(self, questions: Sequence[ImageQuestion], method: Method, passes: list[int]) -> Measurement:
        stopwatch = Stopwatch(self.model.device)
        answers = self.describe(questions, method)
        total = stopwatch.lap()
        seconds = {
            stage: sum(answer.timings[stage] for answer in answers) for stage in ("read", "vision", "drafter", "total")
        }
        rounds = [answer.rounds - 1 for answer in answers]
        return Measurement(
            tokens=[answer.tokens for answer in answers],
            texts=[answer.text for answer in answers],
            features=seconds["read"],
            encoder=seconds["vision"],
            decoder=seconds["total"] - seconds["read"] - seconds["vision"],
            drafter=seconds["drafter"],
            total=total,
            passes=len(passes),
            windows=1,
            rounds=sum(rounds),
            drafted_tokens=sum(
                round(answer.tokens_per_round * count) for answer, count in zip(answers, rounds, strict=True)
            ),
            accepted=sum(answer.accepted for answer in answers),
        )

    def _generate(self, questions: Sequence[ImageQuestion], method: Method, passes: list[int]) -> Measurement:
        vlm, device, vision = self.vlm, self.model.device, list[float]()
        total, stopwatch = Stopwatch(device), Stopwatch(device)
        read = [read_question(question.images, self.prompt(question)) for question in questions]
        stopwatch.lap()
        inputs = model_inputs(vlm, [render_chat(vlm, [user_message(question)]) for question in read], read)
        features = stopwatch.lap()
        with time_passes(self.model.get_encoder("image"), device, lambda seconds, *_: vision.append(seconds)):
            generated: Any = self.model.generate(  # type: ignore[operator] # torch's types say it is a tensor
                **inputs, **self.options, **method.options
            )
        rows = [cut_at_end(row, self.model) for row in generated[:, inputs["input_ids"].shape[1] :].tolist()]
        texts = [vlm.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
        rest = stopwatch.lap()
        return Measurement(
            tokens=rows,
            texts=texts,
            features=features,
            encoder=sum(vision),
            decoder=rest - sum(vision),
            drafter=0.0,
            total=total.lap(),
            passes=len(passes),
            windows=1,
        )


QUESTIONS = "data/samples/images/samples.tsv"
LOG_INTERVAL = 50  # questions between two lines of progress


@dataclass(frozen=True)
class ScoredAnswer:
    """A question with its answer, which is None if the question was refused."""

    question: ImageQuestion
    answer: Description | None
    right: float  # points of the answer, at most `of`
    of: int  # possible points: 1; for a description its number of claims; 0 without a reference
    error: str = ""
    other_words: bool = False  # right, but in other words than the reference, so that `right` does not count it


def score(question: ImageQuestion, text: str) -> tuple[float, int]:
    """Score an answer. A short answer has 1 point, a description one for each claim that it should make.

    "exact" scoring compares with the listed answers or the reference, and ignores case and the full stop. For counting
    questions about the synthetic pictures, only the total must be right.

    Returns:
        The points for right answers, and the possible points; (0, 0) without a reference.
    """
    kind = question.scoring
    if kind == "claims":
        return count_claims(text, question.claims), len(question.claims)
    if kind == "exact":
        if question.reference:
            expected = question.answers[0] if question.answers else ""
            return float(right_answer(text, question.reference, expected, question.task)), 1
        return float(plain_answer(text) in {plain_answer(answer) for answer in question.answers}), 1
    return 0.0, 0


def evaluate_vlm(
    model: str | os.PathLike[str] | LoadedVlm = DEFAULT_VLM,
    options: VlmEvalOptions | None = None,
    log: Log = no_log,
) -> dict[str, Any]:
    """Score a vision-language model.

    "right" counts answers in the reference's own words. "right_in_any_words" also counts answers that say the same in
    another sentence.

    Intervals are Wilson's, of 95 %. A question that `mmdec.describe` refuses counts as wrong and is listed.

    Args:
        model: A shipped name, a folder, a Hugging Face id, or a loaded model.
        options: What is asked, and how; None: the questions about the sample pictures.
        log: Receives lines of progress.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: If an option, the model or the corpus is refused.
    """
    options = options or VlmEvalOptions()
    questions, images, batch_size = options.questions, options.images, options.batch_size
    nodes = parse_plan(options.plan)
    chosen = questions_of(questions, images, options.prompt, options.limit, Admission(options.allow_absolute_paths))
    chosen = swap_pictures(chosen) if options.swap else chosen
    keep_threads(options.threads)
    vlm = model if isinstance(model, LoadedVlm) else load_vlm(model, options.device)
    drafter = resolve_drafter(None if options.drafter == "none" else options.drafter, vlm).drafter_for(vlm.model)
    method = Method.with_drafter("drafted", drafter, nodes)
    answered = _answers(DescriptionHarness(vlm, options.max_new_tokens), method, chosen, batch_size, log)
    return {
        "model": vlm.directory.name if vlm.directory else "given",
        "questions": os.fspath(questions if questions is not None else images or QUESTIONS),
        "swapped": options.swap,
        "n": len(answered),
        "drafter": "none" if drafter is None else drafter.name,
        "batch_size": batch_size,
        **_report(answered, options.worst),
        "hardware": describe_measurement(vlm.model, batch_size),
    }


def _report(answered: Sequence[ScoredAnswer], worst: int) -> dict[str, Any]:
    """Summarise the answers: right ones, cost, refused questions, and at most `worst` wrong answers."""
    scored = [entry for entry in answered if entry.of]
    return {
        "by_task": _by_task(answered),
        "right": _rate(scored),
        "decoding": _cost([entry.answer for entry in answered if entry.answer is not None]),
        "refused": {entry.question.id: entry.error for entry in answered if entry.error},
        "worst": _wrong(scored)[:worst],
    }


def questions_of(
    questions: str | os.PathLike[str] | None,
    images: str | os.PathLike[str] | None,
    prompt: str,
    limit: int | None,
    admission: Admission = STRICT,
) -> list[ImageQuestion]:
    """Read the questions in a file.

    Without a file, ask `prompt` about each picture in `images`; without both, read the questions about the sample
    pictures.

    Args:
        questions: The file, or None.
        images: With a file, the folder of its pictures; else a folder or one picture.
        limit: Number of questions from each task; None: all.
        admission: Which paths in the file are accepted.

    Raises:
        InputError: If there are no questions.
    """
    if questions is None and images is not None:
        return by_task(ask_about(os.fspath(images), prompt), limit)
    source = os.fspath(QUESTIONS if questions is None else questions)
    if questions is None and not os.path.isfile(source):
        raise InputError(f"`questions` must be given, because '{source}' does not exist. Name a list of your own.")
    chosen = read_questions(source, None if images is None else os.fspath(images), limit, admission)
    if not chosen:
        raise InputError(f"`questions` must hold questions, but '{source}' has none. Check the file.")
    return chosen


def _wrong(scored: Sequence[ScoredAnswer]) -> list[dict[str, Any]]:
    """List answers that are wrong, or partly wrong, with the right answers."""
    return [
        {
            "id": entry.question.id,
            "task": entry.question.task,
            "question": entry.question.question,
            "answer": entry.answer.text if entry.answer else "",
            "right": entry.right,
            "of": entry.of,
            "expected": entry.question.reference or ", ".join(entry.question.answers[:3]),
        }
        for entry in scored
        if entry.right < entry.of
    ]


def _answers(
    harness: DescriptionHarness, method: Method, questions: Sequence[ImageQuestion], batch_size: int, log: Log
) -> list[ScoredAnswer]:
    """Answer and score all questions, in batches."""
    answered: list[ScoredAnswer] = []
    for start in range(0, len(questions), batch_size):
        batch, before = questions[start : start + batch_size], len(answered)
        errors: dict[int, InputError] = {}
        try:
            answers: list[Any] = [*harness.describe(batch, method)]
        except BatchError as error:
            answers, errors = error.results, error.errors
        for index, (question, answer) in enumerate(zip(batch, answers, strict=True)):
            right, of = score(question, answer.text if answer else "")
            reason = str(errors[index]) if index in errors else ""
            other = answer is not None and not right and _in_other_words(question, answer.text)
            answered.append(ScoredAnswer(question, answer, 0.0 if answer is None else right, of, reason, other))
        if len(answered) // LOG_INTERVAL > before // LOG_INTERVAL or len(answered) == len(questions):
            log(f"answered {len(answered)} of {len(questions)}")
    return answered


def _by_task(answered: Sequence[ScoredAnswer]) -> dict[str, dict[str, Any]]:
    tasks: dict[str, list[ScoredAnswer]] = defaultdict(list)
    for entry in answered:
        tasks[entry.question.task].append(entry)
    return {
        task: {
            "questions": len(group),
            "scoring": group[0].question.scoring,
            "right": _rate(group),
            **({"right_in_any_words": _any_words(group)} if any(entry.other_words for entry in group) else {}),
            "decoding": _cost([entry.answer for entry in group if entry.answer is not None]),
        }
        for task, group in sorted(tasks.items())
    }


def _rate(answered: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """Compute the rate of right answers, with its interval. For descriptions, n is the number of claims."""
    right: Any = sum(entry.right for entry in answered)  # VQA accuracy gives fractions, which `Rate` accepts
    return metrics.Rate(right, sum(entry.of for entry in answered)).summary()


def _in_other_words(question: ImageQuestion, text: str) -> bool:
    return (
        question.scoring == "exact"
        and bool(question.reference and question.answers)
        and right_in_other_words(text, question.answers[0])
    )


def _any_words(answered: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """Compute the rate of answers that are right, in the reference's words or in other words."""
    right: Any = sum(entry.right + entry.other_words for entry in answered)
    return metrics.Rate(right, sum(entry.of for entry in answered)).summary()


def _cost(answers: Sequence[Description]) -> dict[str, Any]:
    """Sum up the cost of decoding.

    It has the rounds after the prompts' passes, the seconds, the drafter's share of decoding and of the total, and how
    often each image compressor was used.
    """
    if not answers:
        return {}
    compressors = Counter(answer.compressor for answer in answers if answer.compressor is not None)
    rounds = sum(answer.rounds - 1 for answer in answers)
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = {stage: sum(answer.timings[stage] for answer in answers) for stage in answers[0].timings}
    decoding = sum(seconds[stage] for stage in ("decoder", "drafter", "core"))
    return {
        "tokens": tokens,
        "rounds": rounds,
        # the first token of an answer comes from the pass over the prompt, so it is not counted
        "tokens_per_round": (tokens - len(answers)) / rounds if rounds else None,
        "accepted_per_round": sum(answer.accepted for answer in answers) / rounds if rounds else None,
        "drafted_per_round": sum(answer.drafted for answer in answers) / rounds if rounds else None,
        "drafter_share": {
            "of_decoding": seconds["drafter"] / decoding if decoding else None,
            "of_all": seconds["drafter"] / seconds["total"] if seconds["total"] else None,
        },
        "seconds": seconds,
        "median_seconds": median(answer.timings["total"] for answer in answers),
        "compressors": dict(compressors.most_common()),
    }
