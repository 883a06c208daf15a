r"""Measures `mmdec.corpus` where answers resemble texts that exist: dictation, code, answers from templates.

python recipes/measure/corpus.py speech --model openai/whisper-base --recordings recordings.jsonl
python recipes/measure/corpus.py code --model HuggingFaceTB/SmolLM2-135M-Instruct
python recipes/measure/corpus.py answers --model HuggingFaceTB/SmolLM2-135M-Instruct

- speech: each line of the file is an object with `path`, relative to the file's folder, and `text`, the true one. Of
  recordings of more than 30 s the second half is transcribed, and the first belongs to the corpus.
- code: functions of two modules of `asyncio` are completed from their first line on; the corpus is the other modules.
- answers: questions that differ in a few words; the corpus is the model's answers to earlier ones.

A corpus that holds what is decoded is the upper bound, and is named so. All methods take turns, input by input; the
first is plain decoding, and each text must equal its text. CPU time is that of the whole call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmdec
from mmdec.bench.drafters import InputMethod, measure_in_turn
from mmdec.bench.pairing import quartiles
from mmdec.bench.prompts import ChatPrompt, encode_prompts
from mmdec.bench.workloads import NamedRecording, PromptWorkload, RecordingWorkload, Workload
from mmdec.checks.devices import check_device
from mmdec.errors import exit_on_error
from mmdec.evaluation.harness import GREEDY, Measurement, Method, parse_plan
from mmdec.evaluation.language_model import TokenPrompt
from mmdec.evaluation.transcription import TranscriptionHarness
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.hub.find import find_model
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.language_model import load_language_model
from mmdec.tasks.threads import keep_threads
from mmdec.whisper.checkpoint import load_whisper

SHORTEST, HALVED = 5 * SAMPLE_RATE, 30 * SAMPLE_RATE  # recordings of fewer samples are only heard; of more, halved
HELD_MODULES = ("proactor_events", "streams")  # of asyncio; its other modules are the corpus
CONTEXT_LINES = 24  # of the module, before a function's first line
LEAST_BODY = 8  # lines of a function that is completed
TEMPLATES = (
    "Write a short letter to {name} that confirms an order of {count} {things} and says that they arrive on {day}.",
    "Write a short reply to {name}, who complains that {count} {things} came broken. Promise new ones by {day}.",
    "Write a reminder for {name}: the invoice for {count} {things} is due on {day}.",
)
NAMES = ("Ms Miller", "Mr Smith", "Dr Jones", "Ms Brown", "Mr Clark", "Dr Evans", "Ms Green", "Mr Hall", "Dr Young")
COUNTS = ("12", "3", "40", "7", "25", "6", "15", "30", "9")
THINGS = ("garden chairs", "desk lamps", "notebooks", "plates", "curtains", "mirrors", "clocks", "blankets", "vases")
DAYS = ("Monday", "Friday", "3 May", "Tuesday", "12 June", "Thursday", "1 July", "Wednesday", "20 August")


@dataclass
class Job:
    """What is decoded, and the drafters of each input."""

    workload: Workload[Any]
    drafters: dict[str, list[DrafterChoice]]  # method's name -> the drafter of each input


def speech(options: argparse.Namespace) -> Job:
    """Dictation: the corpus of a recording is what the model heard in all others, or the documents dictated."""
    directory = find_model(options.model, None, ())
    whisper = load_whisper(directory, check_device("cpu"))
    harness = TranscriptionHarness(whisper, "en")
    lines = [json.loads(line) for line in options.recordings.read_text(encoding="utf-8").splitlines()]
    pieces, dictated = list[NamedRecording](), list[int]()
    for line in lines:
        path = options.recordings.parent / line["path"]
        samples = harness.read(path)
        middle = len(samples) // 2 if len(samples) > HALVED else 0
        if middle:
            pieces.append(NamedRecording(path, samples[:middle]))
        if len(samples) >= SHORTEST:
            dictated.append(len(pieces))
        pieces.append(NamedRecording(path, samples[middle:]))
    plain = Method.with_drafter("plain", None)
    heard = [harness.measure([piece.samples], plain).texts[0] for piece in pieces]
    workload = RecordingWorkload(whisper, directory, [], harness)
    workload.inputs = [pieces[index] for index in dictated]
    count = len(dictated)
    others = [mmdec.corpus([text for at, text in enumerate(heard) if at != index and text]) for index in dictated]
    documents = mmdec.corpus([line["text"] for line in lines if line.get("text")])
    return Job(
        workload,
        {
            "corpus: other recordings": [*others],
            "corpus: the true documents (upper bound)": [documents] * count,
            "corpus: the model's own transcripts (upper bound)": [mmdec.corpus([text for text in heard if text])]
            * count,
        },
    )


def functions(source: str) -> Iterator[str]:
    """Yield the prompts of a module: some lines and the first line of a function or method."""
    lines = source.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if line.lstrip().startswith("def ") and line.rstrip().endswith(":")]
    for at, following in zip(starts, [*starts[1:], len(lines)], strict=True):
        if following - at >= LEAST_BODY and at >= CONTEXT_LINES:
            yield "".join(lines[at - CONTEXT_LINES : at + 1])


def code(options: argparse.Namespace) -> Job:
    """Completion of functions: the corpus is the other modules of the package, or the whole package."""
    directory = find_model(options.model, None, ())
    language = load_language_model(directory, check_device("cpu"))
    modules = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    prompts = list[TokenPrompt]()
    for name in HELD_MODULES:
        source = next(path for path in modules if path.stem == name).read_text(encoding="utf-8")
        found = list(functions(source))
        step = max(1, len(found) * len(HELD_MODULES) // options.count)
        for text in found[::step]:
            ids = language.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            prompts.append(TokenPrompt(name, ids, options.max_new_tokens))
    rest = mmdec.corpus([path for path in modules if path.stem not in HELD_MODULES], tokenizer=language.tokenizer)
    whole = mmdec.corpus(modules, tokenizer=language.tokenizer)
    count = len(prompts)
    return Job(
        PromptWorkload(language, prompts),
        {"corpus: other modules": [rest] * count, "corpus: the whole package (upper bound)": [whole] * count},
    )


def answers(options: argparse.Namespace) -> Job:
    """Answers from templates: the corpus is the model's own answers to other questions of the same templates."""
    directory = find_model(options.model, None, ())
    language = load_language_model(directory, check_device("cpu"))
    slots = list(zip(NAMES, COUNTS, THINGS, DAYS, strict=True))
    chats = [
        ChatPrompt.from_turns(f"template {number}", template.format(name=name, count=count, things=things, day=day))
        for name, count, things, day in slots
        for number, template in enumerate(TEMPLATES, 1)
    ]
    prompts = encode_prompts(language, chats, options.max_new_tokens)
    workload = PromptWorkload(language, prompts)
    new = prompts[-options.count :]
    plain = Method.with_drafter("plain", None)
    earlier = [workload.harness.measure([prompt], plain).tokens[0] for prompt in prompts[: -options.count]]
    texts = [str(language.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in earlier]
    print(f"{len(texts)} earlier answers", flush=True)
    workload.inputs = new
    one = mmdec.corpus(texts[: len(TEMPLATES)], tokenizer=language.tokenizer)
    every = mmdec.corpus(texts, tokenizer=language.tokenizer)
    return Job(
        workload,
        {"corpus: an earlier answer of each": [one] * len(new), "corpus: all earlier answers": [every] * len(new)},
    )


def methods_of(job: Job, plan: str) -> list[InputMethod]:
    """List plain decoding, lookup, recycling and the corpora."""
    workload, nodes = job.workload, parse_plan(plan)

    def ready(choice: DrafterChoice) -> Any:
        return resolve_drafter(choice, workload.loaded_target).drafter_for(workload.model)

    methods = [InputMethod(Method(GREEDY, "mmdec", {"drafter": None}))]
    methods += [InputMethod(Method.with_drafter(name, ready(name), nodes)) for name in ("lookup", "recycling")]
    for name, drafters in job.drafters.items():
        each = {index: ready(drafter) for index, drafter in enumerate(drafters)}
        methods.append(InputMethod(Method.with_drafter(name, None, nodes), each))
    return methods


def row(name: str, runs: Sequence[Measurement], plain: Sequence[Measurement], equal: Sequence[bool]) -> str:
    """Format a row of the table, of the first repeat of each input."""
    rounds, tokens = sum(run.rounds for run in runs), sum(len(run.tokens[0]) for run in runs)
    low, _, high = quartiles([run.tokens_per_round for run in runs])
    rate = sum(run.drafted_tokens for run in runs) / rounds
    faster = quartiles([baseline.cpu_seconds / run.cpu_seconds for run, baseline in zip(runs, plain, strict=True)])
    share = sum(run.drafter for run in runs) / sum(run.total for run in runs)
    cells = [name, f"{sum(equal)} of {len(equal)}", f"{rate:.2f} ({low:.2f}-{high:.2f})", f"{share:.0%}"]
    cells += [f"{1e3 * sum(run.cpu_seconds for run in runs) / tokens:.0f}"]
    return f"| {' | '.join(cells)} | {faster[1]:.2f} ({faster[0]:.2f}-{faster[2]:.2f}) |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("speech", "code", "answers"))
    parser.add_argument("--model", required=True, help="name, folder or Hugging Face id")
    parser.add_argument("--recordings", type=Path, help="speech: a line for each recording, with path and text")
    parser.add_argument("--plan", default="7", help="draft size, as of `mmdec bench drafters`")
    parser.add_argument("--count", type=int, default=12, help="code, answers: number of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    if options.kind == "speech" and options.recordings is None:
        parser.error("speech needs --recordings")
    keep_threads(1)
    job = {"speech": speech, "code": code, "answers": answers}[options.kind](options)
    methods = methods_of(job, options.plan)
    for method in methods:  # warms up
        job.workload.harness.measure([job.workload.inputs[0]], method.for_input(0))
    turns = measure_in_turn(job.workload, methods, 1, None, lambda line: print(line, flush=True))
    columns = ("method", "equal", "tokens per round", "drafter", "CPU ms per token", "against plain, CPU")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    plain = [runs[0] for runs in turns.measured[GREEDY]]
    for method in methods:
        runs = [repeats[0] for repeats in turns.measured[method.name]]
        same = [repeats[0] for repeats in turns.equal[method.name]]
        name = "plain" if method.name == GREEDY else method.name
        print(row(name, runs, plain, same), flush=True)
    if not all(runs[0] for inputs in turns.equal.values() for runs in inputs):
        raise SystemExit("error: a drafter changed a text")


if __name__ == "__main__":
    with exit_on_error():
        main()
