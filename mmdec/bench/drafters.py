"""Times drafters on the same inputs: prompts, recordings, or questions about pictures.

All methods run in turn, A B C A B C, input by input: transformers' greedy decoding, mmdec's loop without a drafter,
each drafter, and transformers' own speculative loops (prompt lookup, and assisted generation by each smaller model).
The tokens of every timed call are compared with those of greedy decoding. A drafter whose tokens differ once has no
figures; for a loop of transformers the inputs on which its tokens differ are left out and counted.

A first call of each method on the first input is a warm-up, and is not timed. What mmdec learns in one call (the cost
of a pass, the acceptance) it uses in the next ones, as in any process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from mmdec.bench.drafter_search import find_drafters, own_drafters
from mmdec.bench.options import DrafterBenchOptions
from mmdec.bench.pairing import MethodTimings, quartiles
from mmdec.bench.report import BenchReport, BenchRun, MethodRow, Spread
from mmdec.bench.workloads import Workload, kind_of_inputs, load_workload
from mmdec.checks.devices import check_device
from mmdec.checks.files import error_line
from mmdec.core.budget import DraftSize
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError, MmdecError
from mmdec.evaluation.harness import GREEDY, Log, Measurement, Method, describe_measurement, no_log, parse_plan
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.generation.small_model_source import small_model
from mmdec.hub.find import find_model
from mmdec.pretrained.language_model import LANGUAGE_MODEL_FILES
from mmdec.pretrained.vlm import VLM_FILES
from mmdec.tasks.threads import keep_threads
from mmdec.whisper.checkpoint import WHISPER_FILES
from mmdec.whisper.hypothesis_call import hypothesis, text_for

PLAIN = "plain"  # name of mmdec's own loop without a drafter
LOOKUP = "prompt lookup"  # name of transformers' loop that copies from the text
LOOKUP_TOKENS = 10  # the most tokens that transformers' prompt lookup copies: the value in its documentation
ASSISTED = "assisted by"  # begins the names of transformers' loops with a smaller model


@final
@dataclass(frozen=True)
class InputMethod:
    """A decoding method whose options may depend on the input: a hypothesis has another text for each."""

    method: Method
    drafter_of: Mapping[int, DrafterChoice] | None = None  # index of the input -> its drafter

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def is_ours(self) -> bool:
        return self.method.loop == "mmdec"

    def for_input(self, index: int) -> Method:
        """Return the method for an input."""
        if self.drafter_of is None:
            return self.method
        return replace(self.method, options={**self.method.options, "drafter": self.drafter_of[index]})


@final
@dataclass
class Turns:
    """What methods that run in turn measured. With a time limit, some inputs may have fewer repeats than others."""

    measured: dict[str, list[list[Measurement]]]  # method's name -> for each input, the measurements of its repeats
    equal: dict[str, list[list[bool]]]  # the same for whether the tokens are those of greedy decoding
    stopped: str = ""  # why they stopped before the end; "" if they did not

    @classmethod
    def of_methods(cls, methods: Sequence[InputMethod]) -> Turns:
        """Begin with no measurements."""
        return cls({method.name: [] for method in methods}, {method.name: [] for method in methods})

    def add(self, index: int, calls: Mapping[str, Measurement]) -> list[str]:
        """Add one call of each method on an input.

        Returns:
            The methods whose tokens differ from those of the first greedy decoding.
        """
        for name, call in calls.items():
            if index == len(self.measured[name]):
                self.measured[name].append([])
                self.equal[name].append([])
            self.measured[name][index].append(call)
            self.equal[name][index].append(call.tokens == self.measured[GREEDY][index][0].tokens)
        return [name for name in calls if not self.equal[name][index][-1]]

    @property
    def always_equal(self) -> dict[str, list[bool]]:
        """For each method and input, whether the tokens of all repeats are those of greedy decoding."""
        return {name: [all(runs) for runs in inputs] for name, inputs in self.equal.items()}


def bench_drafters(
    model: str | os.PathLike[str], options: DrafterBenchOptions | None = None, log: Log = no_log
) -> BenchRun:
    """Time drafters for one model on the same inputs, against plain decoding and transformers' own loops.

    Args:
        model: A shipped name, a folder or a Hugging Face id of a language model, a Whisper, an audio language model or
            a vision-language model.
        options: What is decoded, by which drafters; None: built-in inputs, by the drafters that the model has.
        log: Receives a line for each input.

    Returns:
        The report; drafters whose tokens differ are left out of it.

    Raises:
        InputError: If an option is not valid; before the model is loaded where that can be known.
    """
    start = time.monotonic()
    options = options or DrafterBenchOptions()
    nodes, device = parse_plan(options.plan), check_device(options.device)
    directory = find_model(model, None, (*LANGUAGE_MODEL_FILES, *WHISPER_FILES, *VLM_FILES))
    kind = kind_of_inputs(directory, options.audio, options.images)
    named = find_drafters(options.drafter or own_drafters(directory, kind), directory, kind)
    if kind != "audio" and (options.draft_text or options.draft_model):
        raise InputError("`draft_text` and `draft_model` need recordings, but the model reads none. Leave them out.")
    recognisers = {Path(name).name: hypothesis(Path(name), device=device) for name in options.draft_model}
    keep_threads(options.threads)
    workload = load_workload(kind, directory, device, options)
    ours, stock = make_methods(workload, named, options.inner, nodes)
    ours += _hypotheses(workload, options.draft_text, recognisers, nodes)
    left_out: dict[str, str] = {}
    count, repeats = len(workload.inputs), options.repeats
    log(f"{count} {workload.noun}, {'once' if repeats == 1 else f'{repeats} times'}; a first call of each method:")
    greedy, plain = InputMethod(Method.greedy()), InputMethod(Method.with_drafter(PLAIN, None, nodes))
    runnable = [method for method in (greedy, plain, *ours, *stock) if _is_runnable(workload, method, left_out, log)]
    deadline = None if options.minutes is None else start + 60 * options.minutes
    turns = measure_in_turn(workload, runnable, repeats, deadline, log)
    return _report(workload, runnable, turns, left_out, options)


def make_methods(
    workload: Workload[Any], drafts: Mapping[str, str | Path], inner: str | None, nodes: DraftSize
) -> tuple[list[InputMethod], list[InputMethod]]:
    """Load the drafters.

    Args:
        workload: Has the model.
        drafts: Name in the report -> name, dotted path, index or folder.
        inner: Drafts the chains of smaller models once more.
        nodes: Draft size; None: learned.

    Returns:
        The methods with mmdec's drafters, and those of transformers of the same kind.
    """
    ours = list[InputMethod]()
    stock = [Method(LOOKUP, "transformers", {"prompt_lookup_num_tokens": LOOKUP_TOKENS})]
    has_small = False
    for label, choice in drafts.items():
        small = workload.small_network(choice) if isinstance(choice, Path) else None
        if small is None:
            drafter = resolve_drafter(choice, workload.loaded_target).drafter_for(workload.model)
            ours.append(InputMethod(Method.with_drafter(label, drafter, nodes)))
            continue
        network, options = small
        has_small = True
        drafter = resolve_drafter(network, workload.loaded_target).drafter_for(workload.model)
        ours.append(InputMethod(Method.with_drafter(label, drafter, nodes)))
        if inner is not None:
            source = resolve_drafter(small_model(network, inner=inner), workload.loaded_target)
            name = f"{label}, inner {inner}"
            ours.append(InputMethod(Method.with_drafter(name, source.drafter_for(workload.model), nodes)))
        options = {"assistant_model": network, **options}
        stock.append(Method(f"{ASSISTED} {label}", "transformers", options, (network,)))
    if inner is not None and not has_small:
        raise InputError("`inner` must be for a smaller model, but none is among `drafter`. Name one, or leave it out.")
    return ours, [InputMethod(method) for method in stock]


def _hypotheses(
    workload: Workload[Any], texts: Sequence[Path], recognisers: Mapping[str, DrafterChoice], nodes: DraftSize
) -> list[InputMethod]:
    methods: list[InputMethod] = []
    for folder in texts:
        each: dict[int, DrafterChoice] = {
            index: hypothesis(text_for(recording.path, folder)) for index, recording in enumerate(workload.inputs)
        }
        methods.append(InputMethod(Method.with_drafter(f"text {folder.name}", None, nodes), each))
    for name, source in recognisers.items():
        methods.append(InputMethod(Method.with_drafter(f"heard by {name}", source, nodes)))
    return methods


def _is_runnable(workload: Workload[Any], method: InputMethod, left_out: dict[str, str], log: Log) -> bool:
    """Decode the first input, which warms up. Not every model can be decoded by each loop of transformers.

    Args:
        left_out: Gets the reason if transformers cannot run the method.
    """
    try:
        call = workload.harness.measure([workload.inputs[0]], method.for_input(0))
    except (MmdecError, MemoryError):
        raise
    except Exception as error:
        if method.is_ours or method.name == GREEDY:
            raise
        left_out[method.name] = f"transformers cannot run it here ({error_line(error)})"
        log(f"{method.name}: {left_out[method.name]}")
        return False
    log(f"{method.name}: {call.total:.1f} s")
    return True


def measure_in_turn(
    workload: Workload[Any], methods: Sequence[InputMethod], repeats: int, deadline: float | None, log: Log
) -> Turns:
    """Measure all methods in turn, input by input, until all is done or the time is over.

    Args:
        methods: Greedy decoding comes first.
        deadline: Time of `time.monotonic` after which no input is begun; the first always is. None: there is none.
    """
    turns, count, begin = Turns.of_methods(methods), len(workload.inputs), time.monotonic()
    for number in range(repeats * count):
        repeat, index = divmod(number, count)
        if number and deadline is not None and time.monotonic() > deadline:
            done = f"{number} of {repeats * count} calls of each method"
            turns.stopped = f"the time was over after {done}, {min(number, count)} of {count} {workload.noun}"
            break
        calls = {method.name: _measure(workload, method, index) for method in methods}
        wrong = turns.add(index, calls)
        left = (time.monotonic() - begin) / (number + 1) * (repeats * count - number - 1)
        differing = f"; OTHER TOKENS: {', '.join(wrong)}" if wrong else ""
        log(f"{_progress(workload.label(index), repeat, repeats, calls)}{differing}; {left / 60:.1f} minutes left")
    return turns


def _measure(workload: Workload[Any], method: InputMethod, index: int) -> Measurement:
    watch = Stopwatch()
    begin = watch.process_cpu_time()
    call = workload.harness.measure([workload.inputs[index]], method.for_input(index))
    return replace(call, cpu_seconds=watch.process_cpu_time() - begin)


def _progress(label: str, repeat: int, repeats: int, calls: Mapping[str, Measurement]) -> str:
    greedy = calls[GREEDY]
    parts = [f"{GREEDY} {greedy.total:.1f} s"]
    for name, call in calls.items():
        if name != GREEDY:
            tokens = f" {call.tokens_per_round:.1f} tokens per round," if call.rounds and name != PLAIN else ""
            parts.append(f"{name}{tokens} x{greedy.total / call.total:.2f}")
    turn = f" (repeat {repeat + 1} of {repeats})" if repeats > 1 else ""
    return f"{label}{turn}: {'; '.join(parts)}"


def _report(
    workload: Workload[Any],
    methods: Sequence[InputMethod],
    turns: Turns,
    left_out: Mapping[str, str],
    options: DrafterBenchOptions,
) -> BenchRun:
    measured, same = turns.measured, turns.always_equal
    timings = MethodTimings(measured, same)
    reasons, differing = dict(left_out), dict[str, str]()
    shown: list[InputMethod] = []
    for method in methods:
        wrong = same[method.name].count(False)
        if method.is_ours and wrong:
            differing[method.name] = (
                f"its tokens differ from greedy decoding on {wrong} of {len(same[method.name])} {workload.noun}: no "
                "figures. Report this as a bug."
            )
        elif wrong == len(same[method.name]):
            reasons[method.name] = "its tokens differ from greedy decoding on all inputs: no figures"
        else:
            shown.append(method)
    if turns.stopped:
        reasons["the rest"] = turns.stopped
    ours = [method.name for method in shown if method.is_ours]
    stock = [method.name for method in shown if not method.is_ours and method.name != GREEDY]
    baselines = [GREEDY, *(name for name in ours if name == PLAIN), *stock]
    groups = workload.groups([runs[0] for runs in measured[GREEDY]])
    rows = [*timings.comparisons(ours, baselines, groups), *timings.comparisons(stock, [GREEDY], groups[:1])]
    count = len(measured[GREEDY])
    report = BenchReport(
        bench=workload.bench,
        title=(
            f"Drafters for {workload.directory.name}: {count} {workload.noun}, {options.repeats} times, drafts "
            f"{options.plan}"
        ),
        hardware=describe_measurement(workload.model),
        comparisons=tuple(rows),
        methods=tuple(_row(method, measured[method.name], same[method.name]) for method in shown),
        stages=timings.stages(),
        not_measured=reasons,
        details={"tokens": [len(runs[0].tokens[0]) for runs in measured[GREEDY]]},
    )
    return BenchRun((report,), differing)


def _row(method: InputMethod, measured: Sequence[Sequence[Measurement]], equal: Sequence[bool]) -> MethodRow:
    """Summarise the calls of a method on the inputs where its tokens are equal."""
    inputs = [runs for runs, is_equal in zip(measured, equal, strict=True) if is_equal]
    calls = [run for runs in inputs for run in runs]
    drafted = [run for run in calls if run.rounds]
    tokens = None
    if method.is_ours and method.name != PLAIN and drafted:
        low, _, high = quartiles([run.tokens_per_round for run in drafted])
        mean = sum(run.drafted_tokens for run in drafted) / sum(run.rounds for run in drafted)
        tokens = Spread(mean, low, high, len(drafted))
    total = sum(run.total for run in calls)
    return MethodRow(
        method.name,
        equal=len(inputs),
        compared=len(measured),
        tokens_per_round=tokens,
        drafter_share=sum(run.drafter for run in calls) / total if method.is_ours else None,
        passes=sum(run.passes for run in calls) / len(calls),
        seconds=total / len(calls),
        cpu_seconds=sum(run.cpu_seconds for run in calls) / len(calls),
    )
