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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.bench.options import DrafterBenchOptions
from mmdec.bench.pairing import Group, MethodTimings, length_groups, quartiles, task_groups
from mmdec.bench.prompts import BEGINNINGS, INSTRUCTIONS, encode_prompts, read_chat_prompts
from mmdec.bench.report import BenchReport, BenchRun, MethodRow, Spread
from mmdec.checks.arguments import did_you_mean
from mmdec.checks.devices import check_device
from mmdec.checks.files import error_line
from mmdec.checks.weights import WEIGHTS_SUFFIX
from mmdec.core.budget import DraftSize
from mmdec.core.timing import Stopwatch
from mmdec.drafters.registry import (
    auto_names,
    drafter_entry,
    drafter_names,
    is_dotted,
    loader_names,
)
from mmdec.errors import InputError, MmdecError
from mmdec.evaluation.description import DescriptionHarness, questions_of
from mmdec.evaluation.harness import (
    GREEDY,
    Harness,
    Log,
    Measurement,
    Method,
    describe_measurement,
    no_log,
    parse_language,
    parse_plan,
)
from mmdec.evaluation.language_model import LanguageHarness, TokenPrompt
from mmdec.evaluation.transcription import AudioLmHarness, TranscriptionHarness
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.generation.small_model_source import small_model
from mmdec.hub.find import SHORT_NAMES, drafter_by_name, drafter_folder, find_model, model_kind, shipped_names
from mmdec.pretrained.audio_lm import LoadedAudioLm, audio_family, load_audio_lm
from mmdec.pretrained.drafters import check_drafter_folder
from mmdec.pretrained.language_model import (
    LANGUAGE_MODEL_FILES,
    LoadedLanguageModel,
    is_language_model,
    load_language_model,
)
from mmdec.pretrained.vlm import VLM_FILES, LoadedVlm, is_vision_language_model, load_vlm
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.image_text import ImageQuestion, by_task
from mmdec.whisper.checkpoint import WHISPER_FILES, WHISPER_KIND, LoadedWhisper, load_whisper
from mmdec.whisper.hypothesis_call import hypothesis, read_text_file, text_for

Input = TypeVar("Input")
PLAIN = "plain"  # name of mmdec's own loop without a drafter
LOOKUP = "prompt lookup"  # name of transformers' loop that copies from the text
LOOKUP_TOKENS = 10  # the most tokens that transformers' prompt lookup copies: the value in its documentation
ASSISTED = "assisted by"  # begins the names of transformers' loops with a smaller model
MAX_NEW_TOKENS = 128
DEFAULT_PER_KIND = 2  # prompts of each kind of the built-in ones
WORD_BINS = ((0, 5), (6, 20), (21, 39), (40, 100_000))  # least and most words of each bin of transcripts
ANSWER_BINS = ((1, 8), (9, 32), (33, 64), (65, 100_000))  # least and most new tokens of each bin of answers
SAMPLE_RECORDINGS = Path("data/samples/english")
RECORDING_SUFFIXES = (".flac", ".wav", ".mp3", ".ogg")
TRAINED_FOLDER = "drafter"  # where `mmdec train drafter` puts the drafter, in the folder of its run


@final
@dataclass(frozen=True)
class NamedRecording:
    """A recording to decode."""

    path: Path
    samples: Tensor  # (T,) 16 kHz mono


@final
class RecordingHarness(Harness[NamedRecording]):
    """Transcribes recordings with one loaded model, and measures the calls."""

    def __init__(self, harness: TranscriptionHarness | AudioLmHarness) -> None:
        self._harness = harness

    def measure(self, inputs: Sequence[NamedRecording], method: Method) -> Measurement:
        return self._harness.measure([recording.samples for recording in inputs], method)


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

    def of(self, index: int) -> Method:
        """Return the method for an input."""
        if self.drafter_of is None:
            return self.method
        return replace(self.method, options={**self.method.options, "drafter": self.drafter_of[index]})


class Workload(ABC, Generic[Input]):
    """A loaded model and the inputs to decode."""

    bench: str  # name of the report
    noun: str  # what an input is, in the plural
    model: PreTrainedModel
    home: Any  # finds drafters in the model's folder; None: there is nothing to find
    directory: Path
    harness: Harness[Input]
    inputs: Sequence[Input]

    @abstractmethod
    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        """Load a smaller model.

        Returns:
            The network, and further options of transformers' assisted generation; None: the folder holds a drafter.
        """

    @abstractmethod
    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        """Group the inputs that were measured, which are the first.

        Args:
            measured: One measurement of each.
        """

    def label(self, index: int) -> str:
        """Name an input in lines of progress."""
        return f"{index + 1} of {len(self.inputs)}"


@final
class PromptWorkload(Workload[TokenPrompt]):
    """Prompts for a language model."""

    bench, noun, home = "drafters-text", "prompts", None

    def __init__(self, language: LoadedLanguageModel, prompts: Sequence[TokenPrompt]) -> None:
        self.language, self.model, self.directory, self.inputs = language, language.model, language.directory, prompts
        self.harness = LanguageHarness(language)

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        if not is_language_model(folder):
            return None
        small, language = load_language_model(folder, self.model.device), self.language
        options: dict[str, Any] = {}
        if small.tokenizer.get_vocab() != language.tokenizer.get_vocab():
            options = {"tokenizer": language.tokenizer, "assistant_tokenizer": small.tokenizer}
        return small.model, options

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        return task_groups([prompt.task for prompt in self.inputs[: len(measured)]])

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].task}"


@final
class RecordingWorkload(Workload[NamedRecording]):
    """Recordings for a Whisper or an audio language model."""

    bench, noun = "drafters-audio", "recordings"

    def __init__(
        self,
        loaded: LoadedWhisper | LoadedAudioLm,
        directory: Path,
        paths: Sequence[Path],
        harness: TranscriptionHarness | AudioLmHarness,
    ) -> None:
        self.home, self.model, self.directory = loaded, loaded.model, directory
        self.harness = RecordingHarness(harness)
        self.inputs = [NamedRecording(path, harness.read(path)) for path in paths]

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        if isinstance(self.home, LoadedWhisper):
            return (load_whisper(folder, self.model.device).model, {}) if model_kind(folder) == WHISPER_KIND else None
        return (load_language_model(folder, self.model.device).model, {}) if is_language_model(folder) else None

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        words = [len(measurement.texts[0].split()) for measurement in measured]
        return [Group("all", "all", range(len(words))), *length_groups(words, WORD_BINS, "words")]

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].path.name}"


@final
class QuestionWorkload(Workload[ImageQuestion]):
    """Questions about pictures for a vision-language model."""

    bench, noun = "drafters-images", "questions"

    def __init__(
        self, vlm: LoadedVlm, directory: Path, questions: Sequence[ImageQuestion], max_new_tokens: int | None
    ) -> None:
        self.home, self.model, self.directory, self.inputs = vlm, vlm.model, directory, questions
        self.harness = DescriptionHarness(vlm, max_new_tokens)

    def small_network(self, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
        return (load_vlm(folder, self.model.device).model, {}) if is_vision_language_model(folder) else None

    def groups(self, measured: Sequence[Measurement]) -> list[Group]:
        tokens = [len(measurement.tokens[0]) for measurement in measured]
        tasks = task_groups([question.task for question in self.inputs[: len(measured)]])
        return [*tasks, *length_groups(tokens, ANSWER_BINS, "tokens")]

    def label(self, index: int) -> str:
        return f"{super().label(index)}, {self.inputs[index].task}"


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
    kind = _kind(directory, options.audio, options.images)
    named = find_drafters(options.drafter or _own_drafters(directory, kind), directory, kind)
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
    measured, equal, stopped = measure_in_turn(workload, runnable, repeats, deadline, log)
    return _report(workload, runnable, measured, equal, left_out, stopped, options.plan, repeats, directory.name)


def _kind(directory: Path, audio: Sequence[Path], images: object) -> str:
    """Return what the model in a folder decodes here: "audio", "images" or "text".

    Raises:
        InputError: If the inputs are for another kind of model.
    """
    of_model = model_kind(directory)
    if of_model == WHISPER_KIND or audio_family(directory):
        kind = "audio"
    elif is_vision_language_model(directory):
        kind = "images"
    elif is_language_model(directory):
        kind = "text"
    else:
        raise InputError(
            f"`model` must be a language model, or one for sound or pictures, but '{directory}' is "
            f"{repr(of_model) if of_model else 'none'}."
        )
    for name, given, needed in (("audio", audio, "audio"), ("images", images, "images")):
        if given and kind != needed:
            raise InputError(
                f"`{name}` must be for a model that reads it, but '{directory.name}' is {of_model!r}. Leave it out."
            )
    return kind


def _own_drafters(directory: Path, kind: str) -> list[str]:
    """Return the drafters without weights, and those in the model's folder."""
    names = auto_names(speech=kind == "audio")
    return [*drafter_names(), *(name for name in names if drafter_folder(directory, name) is not None)]


def find_drafters(names: Sequence[str], directory: Path, kind: str) -> dict[str, str | Path]:
    """Find drafters by name, without the model.

    Args:
        names: Names, folders, Hugging Face ids.
        directory: The model's folder.
        kind: What the model decodes.

    Returns:
        Name in the report -> name, dotted path, index or folder of the drafter.

    Raises:
        InputError: If there is no such drafter, it is named twice, or its folder does not fit the model.
    """
    if len(set(names)) < len(names):
        raise InputError(f"`drafter` must name each drafter once, but is {', '.join(names):.200}.")
    found: dict[str, str | Path] = {}
    for name in names:
        choice = _find(name, directory)
        if isinstance(choice, Path):
            check_drafter_folder(choice, directory, "drafter")
        label = name
        if isinstance(choice, Path):
            label = choice.resolve().parent.name if choice.name == TRAINED_FOLDER else choice.name
        found[label if label not in found else name] = choice
    return found


def _find(name: str, directory: Path) -> str | Path:
    entry = None if not name or "/" in name else drafter_entry(name)
    if entry is not None and entry.has_weights:
        folder = drafter_folder(directory, name)
        if folder is None:
            raise InputError(
                f"`drafter` must be a folder for {name}, which has weights, where the model's folder '{directory}' has "
                f"none of that name. Give the folder."
            )
        return folder
    if entry is not None or is_dotted(name) or (name.endswith(WEIGHTS_SUFFIX) and os.path.isfile(name)):
        return name  # the last is an index of texts
    if name in shipped_names(None) or any(pattern.fullmatch(name) for pattern in SHORT_NAMES):
        return find_model(name, None, LANGUAGE_MODEL_FILES)
    folder = Path(name) if name and os.path.isdir(name) else drafter_by_name(name, "drafter")
    if folder is None:
        names = [*drafter_names(), *loader_names()]
        raise InputError(
            f"`drafter` must be one of {', '.join(names)}, or the folder or Hugging Face id of a drafter or a smaller "
            f"model, but is {name!r:.100}.{did_you_mean(name, names)}"
        )
    return folder


def _recordings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in RECORDING_SUFFIXES)


def load_workload(kind: str, directory: Path, device: torch.device, options: DrafterBenchOptions) -> Workload[Any]:
    """Read the inputs, then load the model.

    Args:
        kind: "text", "images" or "audio".
        directory: The model's folder.
        device: Where the model is loaded.
        options: What is decoded.

    Raises:
        InputError: If there is nothing to decode, or the model is damaged.
    """
    per_kind = options.per_kind
    if per_kind is None and options.data is None and options.images is None:
        per_kind = DEFAULT_PER_KIND
    if kind == "text":
        given = None if options.data is None else read_chat_prompts(os.fspath(options.data))
        language = load_language_model(directory, device)
        prompts = (INSTRUCTIONS if language.tokenizer.chat_template else BEGINNINGS) if given is None else given
        chosen: Any = in_turn(by_task(list[Any](prompts), per_kind))
        return PromptWorkload(language, encode_prompts(language, chosen, options.max_new_tokens or MAX_NEW_TOKENS))
    if kind == "images":
        admission = Admission(options.allow_absolute_paths)
        questions = questions_of(options.data, options.images, options.prompt, per_kind, admission)
        return QuestionWorkload(load_vlm(directory, device), directory, in_turn(questions), options.max_new_tokens)
    if options.data is not None:
        raise InputError("`data` must be prompts or pictures, but this is a speech model. Give `audio` instead.")
    recordings = options.audio or _recordings(SAMPLE_RECORDINGS)
    if not recordings:
        raise InputError(f"`audio` must name recordings where '{SAMPLE_RECORDINGS}' has none. Name files or a folder.")
    for path in recordings:
        if not path.is_file():
            raise InputError(f"`audio` must be files, but '{path}' is none. Check the path.")
        for folder in options.draft_text:
            read_text_file(text_for(path, folder))
    if audio_family(directory):
        hearing = load_audio_lm(directory, device)
        return RecordingWorkload(hearing, directory, recordings, AudioLmHarness(hearing, options.max_new_tokens))
    whisper = load_whisper(directory, device)
    harness = TranscriptionHarness(whisper, parse_language(options.language), options.max_new_tokens)
    return RecordingWorkload(whisper, directory, recordings, harness)


def in_turn(inputs: Sequence[Any]) -> list[Any]:
    """Order inputs so that their kinds take turns: a run that is stopped early has measured some of each.

    Args:
        inputs: Each has its kind as `task`.
    """
    numbers = Counter[str]()
    turns: list[int] = []
    for item in inputs:
        turns.append(numbers[item.task])
        numbers[item.task] += 1
    return [inputs[index] for index in sorted(range(len(inputs)), key=turns.__getitem__)]


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
            drafter = resolve_drafter(choice, workload.home).drafter_for(workload.model)
            ours.append(InputMethod(Method.with_drafter(label, drafter, nodes)))
            continue
        network, options = small
        has_small = True
        drafter = resolve_drafter(network, workload.home).drafter_for(workload.model)
        ours.append(InputMethod(Method.with_drafter(label, drafter, nodes)))
        if inner is not None:
            source = resolve_drafter(small_model(network, inner=inner), workload.home)
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
        call = workload.harness.measure([workload.inputs[0]], method.of(0))
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
) -> tuple[dict[str, list[list[Measurement]]], dict[str, list[list[bool]]], str]:
    """Measure all methods in turn, input by input, until all is done or the time is over.

    Args:
        methods: Greedy decoding comes first.
        deadline: Time of `time.monotonic` after which no input is begun; the first always is. None: there is none.

    Returns:
        method's name -> for each measured input, the measurements of its repeats; the same for whether the tokens are
        those of greedy decoding; and why it stopped before the end, "" if it did not.
    """
    measured: dict[str, list[list[Measurement]]] = {method.name: [] for method in methods}
    equal: dict[str, list[list[bool]]] = {method.name: [] for method in methods}
    count, begin = len(workload.inputs), time.monotonic()
    for number in range(repeats * count):
        repeat, index = divmod(number, count)
        if number and deadline is not None and time.monotonic() > deadline:
            done = f"{number} of {repeats * count} calls of each method"
            return measured, equal, f"the time was over after {done}, {min(number, count)} of {count} {workload.noun}"
        expected: list[list[int]] = []
        calls = dict[str, Measurement]()
        for method in methods:
            call = calls[method.name] = _measure(workload, method, index)
            if method.name == GREEDY:
                expected = measured[GREEDY][index][0].tokens if repeat else call.tokens
            if not repeat:
                measured[method.name].append([])
                equal[method.name].append([])
            measured[method.name][index].append(call)
            equal[method.name][index].append(call.tokens == expected)
        left = (time.monotonic() - begin) / (number + 1) * (repeats * count - number - 1)
        wrong = [name for name in calls if not equal[name][index][-1]]
        differing = f"; OTHER TOKENS: {', '.join(wrong)}" if wrong else ""
        log(f"{_progress(workload.label(index), repeat, repeats, calls)}{differing}; {left / 60:.1f} minutes left")
    return measured, equal, ""


def _measure(workload: Workload[Any], method: InputMethod, index: int) -> Measurement:
    watch = Stopwatch()
    begin = watch.process_cpu_time()
    call = workload.harness.measure([workload.inputs[index]], method.of(index))
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
    measured: Mapping[str, Sequence[Sequence[Measurement]]],
    equal: Mapping[str, Sequence[Sequence[bool]]],
    left_out: Mapping[str, str],
    stopped: str,
    plan: str,
    repeats: int,
    name: str,
) -> BenchRun:
    # with a time limit, some inputs may have fewer repeats than others
    same = {method: [all(runs) for runs in inputs] for method, inputs in equal.items()}
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
    if stopped:
        reasons["the rest"] = stopped
    ours = [method.name for method in shown if method.is_ours]
    stock = [method.name for method in shown if not method.is_ours and method.name != GREEDY]
    baselines = [GREEDY, *(name for name in ours if name == PLAIN), *stock]
    groups = workload.groups([runs[0] for runs in measured[GREEDY]])
    rows = [*timings.comparisons(ours, baselines, groups), *timings.comparisons(stock, [GREEDY], groups[:1])]
    count = len(measured[GREEDY])
    report = BenchReport(
        bench=workload.bench,
        title=f"Drafters for {name}: {count} {workload.noun}, {repeats} times, drafts {plan}",
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
