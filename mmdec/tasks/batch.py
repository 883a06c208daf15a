"""Code that the public calls of all tasks share: loading a model and a drafter that fits it, reading inputs, returning
results, and rejecting results of low confidence.

Each call puts its inputs into a `Batch`, reads them (`Batch.read`), decodes those that were read, and returns the
results (`Batch.finish`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import check_callable, show
from mmdec.checks.devices import check_device, check_dtype, check_same_dtype
from mmdec.core.loop import Round
from mmdec.core.summary import cut_note
from mmdec.drafters.other_vocabulary import OtherVocabulary
from mmdec.drafters.registry import AUTO, NAME, drafter_entry, drafter_names
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.generation.run import DecodingOptions, DrafterChoice, Speculation
from mmdec.hub.cache import path_version
from mmdec.hub.find import drafter_by_name, drafter_folder
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.small_model import small_drafter
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.hf_target import source_folder
from mmdec.targets.registry import target_of
from mmdec.targets.ropes import max_positions
from mmdec.tasks.confidence import CUT_CONFIDENCE, Output, confidence_error
from mmdec.types import Drafter

MAX_BATCH = 4096  # maximum batch size
RESERVED = {  # option of `generate` that no task accepts -> the task's argument to use instead, or ""
    "assistant_model": "drafter",
    "custom_generate": "drafter",
    "generation_config": "options",
    "num_return_sequences": "",
    "output_attentions": "",
    "output_hidden_states": "",
    "return_dict_in_generate": "",
    "token_healing": "",
    "tokenizer": "",
}
LENGTH_OPTIONS = ("max_new_tokens", "max_length")  # options of `generate` that limit a text's length
# maximum number of new tokens of a text, if neither the caller nor the model's generation config sets one
MAX_NEW_TOKENS = 512
Given = TypeVar("Given")  # type of one input as the caller gives it
Read = TypeVar("Read")
Loaded = TypeVar("Loaded")


class BatchError(InputError):
    """Raised if some inputs of a list were rejected.

    Holds the results of the accepted inputs (`results`) and the errors of the rejected ones (`errors`).
    """

    def __init__(self, results: list[Any], errors: dict[int, InputError], what: str = "recordings") -> None:
        self.results = results  # results in the order of the inputs; None for rejected inputs
        self.errors = errors  # index of a rejected input -> its error
        first = next(iter(errors))
        super().__init__(
            f"{len(errors)} of {len(results)} {what} were refused, the first at index {first}: {errors[first]} "
            "The others are in `results` of this error."
        )


@final
class InputBatch(Generic[Given]):
    """The inputs of one call, a single one or a list, and the errors of those that were rejected."""

    def __init__(self, given: Sequence[Given], single: bool, what: str = "recordings") -> None:
        """Initialize.

        Args:
            given: The inputs.
            single: Whether the caller gave one input instead of a list.
            what: The inputs' name in errors.
        """
        self.given, self.single, self.what = given, single, what
        self.errors: dict[int, InputError] = {}  # index of a rejected input -> its error

    def __len__(self) -> int:
        return len(self.given)

    def check_listener(self, name: str, function: object, rule: str, remedy: str) -> None:
        """Raise InputError if a callback is not callable, or is given for a list of inputs, where it is not supported.

        Args:
            name: The argument's name.
            rule, remedy: For the message: what the argument must be, and what the caller can do.
        """
        check_callable(name, function, rule)
        if function is not None and not self.single:
            raise InputError(f"`{name}` must be None for a list of {self.what}, but is given. {remedy}")

    def read(self, read: Callable[[Given], Read]) -> dict[int, Read]:
        """Call the function `read` for each input.

        Returns:
            Input index -> its result. If it raises InputError for an input, the input is left out, and the error is
            added to `errors`.
        """
        inputs: dict[int, Read] = {}
        for index, item in enumerate(self.given):
            try:
                inputs[index] = read(item)
            except InputError as error:
                self.errors[index] = error
        return inputs

    def finish(
        self, results: Mapping[int, Output], least: float | None, arguments: Mapping[int, str] | None = None
    ) -> Output | list[Output]:
        """Reject unsure results, and return what the public call returns.

        A result of an input with an error is left out.

        Args:
            results: Input index -> its result.
            least: The argument `min_confidence`.
            arguments: Input index -> the name of the call's argument, for the error about an unsure result; None:
                "audio" for all.

        Returns:
            A single result, or the list of results.

        Raises:
            InputError: That of a single input.
            BatchError: If some inputs of a list were rejected.
        """
        for index, result in results.items():
            refusal = confidence_error(result.confidence, least, "audio" if arguments is None else arguments[index])
            if refusal is not None:
                self.errors.setdefault(index, refusal)
        errors = dict(sorted(self.errors.items()))
        if errors and self.single:
            raise errors[0]
        if errors:
            accepted = [None if index in errors else results[index] for index in range(len(self))]
            raise BatchError(accepted, errors, self.what)
        return results[0] if self.single else [results[index] for index in range(len(self))]


@dataclass(frozen=True)
class ArgumentKind:
    """Describes a network or processor that a caller may pass: its class, and words for errors."""

    kind: type  # the class of transformers
    rule: str  # what it is called in errors, such as "a processor"
    loader: str  # name of transformers' class whose `from_pretrained` loads it, for errors


@dataclass(frozen=True)
class TaskLoader(Generic[Loaded]):
    """How a task loads its models."""

    # function that loads a model: (name, device, dtype) -> loaded model
    load: Callable[[Any, Any, torch.dtype], Loaded]
    # function that combines a model of transformers with its processor: (model, processor, model's folder or None) ->
    # loaded model
    loaded: Callable[[Any, Any, Any], Loaded]
    network: ArgumentKind
    processor: ArgumentKind
    integers: bool = False  # whether the dtype may be int8


def as_loaded(
    system: TaskLoader[Loaded],
    model: str | os.PathLike[str] | PreTrainedModel | Loaded,
    processor: ProcessorMixin | None,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
) -> Loaded:
    """Convert the arguments of a public call to a loaded model with its processor.

    Args:
        model: A shipped name, a directory or a hub id (loaded once for each device and dtype), or a loaded model.
        processor: The processor of a loaded model; otherwise None.
        device: None: a GPU if there is one.
        dtype: None: float32. For a loaded model, `device` and `dtype` must each be None or equal the model's.

    Raises:
        InputError: If there is no such model, files are damaged, the processor is missing, superfluous or another
            model's, or a loaded model has another device or dtype.
    """
    wanted = check_dtype(dtype, system.integers)
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return system.load(model, device, wanted)
    loaded: Any = model
    if not isinstance(model, system.loaded):  # type: ignore[arg-type] # it is a class
        for name, value, part, after in (
            ("model", model, system.network, "a name, a directory, a hub id or {}"),
            ("processor", processor, system.processor, "{} with a loaded `model`"),
        ):
            if not isinstance(value, part.kind):
                raise InputError(
                    f"`{name}` must be {after.format(part.rule)}, but is {show(value)}. Load it with "
                    f"`{part.loader}.from_pretrained`."
                )
        loaded = system.loaded(model, processor, source_folder(loaded))
    check_placement(loaded.model, device, dtype)
    return loaded


def check_placement(model: Any, device: str | torch.device | None, dtype: Any, remedy: str = "Leave it out.") -> None:
    """Raise InputError if `device` or `dtype` is not None and differs from the loaded model's.

    Args:
        remedy: Last sentence of the message about `device`.
    """
    if device is not None and check_device(device).type != model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.device}, but is {show(str(device))}. {remedy}"
        )
    check_same_dtype(dtype, model.dtype)


def load_speculation(options: DecodingOptions, model: PreTrainedModel, known: set[str] | None = None) -> Speculation:
    """Make the decoding loop from the options: load the drafter, and check that it fits the model.

    Args:
        known: Names of drafters that passed the check for this model before. For these the check is skipped, because it
            takes a large part of the time of a short answer. A new drafter's name is added.

    Raises:
        InputError: If the drafter does not fit.
    """
    speculation, known = Speculation(options), set() if known is None else known
    drafter = speculation.drafter_for(model)
    name = "" if drafter is None else drafter.name
    if name not in known:
        target = target_of(model)
        if drafter is not None:
            drafter.check(target)
        known.add(name)
    return speculation


LanguageModel = LoadedVlm | LoadedAudioLm


def as_drafter(loaded: LanguageModel, drafter: DrafterChoice) -> DrafterChoice:
    """Convert a task's argument `drafter` to a value that `speculate` accepts.

    "auto" becomes the drafter that `auto_drafter` finds. The name, folder or hub id of a drafter with weights becomes
    that drafter, loaded once on the model's device and in its precision. Other values are returned unchanged.

    Raises:
        InputError: If weights are missing, damaged, or were trained for another model.
    """
    if isinstance(drafter, PreTrainedModel):
        # a small model with the same vocabulary needs no change: `Speculation` makes the drafter, and locks the model
        made = small_drafter(drafter, loaded.model, None, loaded.tokenizer)
        return made if isinstance(made, OtherVocabulary) else drafter
    if isinstance(drafter, str) and drafter == AUTO:
        return auto_drafter(loaded.model, loaded.directory, partial(_read, loaded))
    named = drafter_by_name(drafter, "drafter")
    if named is not None:
        return _read(loaded, named)
    entry = None
    # a registered name takes precedence over a folder of the same name
    if isinstance(drafter, str) and NAME.fullmatch(drafter):
        entry = drafter_entry(drafter)
        if entry is not None and entry.factory is not None:
            return drafter
        folder = find_drafter_folder(loaded, drafter)
        if folder is not None:
            return _read(loaded, folder)
    if isinstance(drafter, (str, os.PathLike)) and _is_folder(drafter):
        return _read(loaded, Path(drafter))
    if entry is not None:
        raise _missing_weights_error(loaded, str(drafter))
    return drafter


def find_drafter_folder(loaded: LanguageModel, name: str) -> Path | None:
    """Return the folder of a drafter that belongs to this model, by the drafter's name; None if there is none."""
    return None if loaded.directory is None else drafter_folder(loaded.directory, name)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the name cannot be that of a folder
        return False


def _read(loaded: LanguageModel, folder: Path) -> Drafter:
    return loaded.drafters.get(
        path_version(folder), lambda: load_drafter(folder, loaded.model, "drafter", tokenizer=loaded.tokenizer)
    )


def _missing_weights_error(loaded: LanguageModel, name: str) -> InputError:
    home = loaded.directory
    where = (
        "it was loaded by its user"
        if home is None
        else f"neither '{home / name}' nor '{home.with_name(f'{home.name}-{name}')}' is there"
    )
    return InputError(
        f"`drafter` must have weights for this model, but {name!r} has none: {where}. Train it with "
        f"recipes/vlm_drafters, give its folder, or use one without weights: {', '.join(drafter_names())}."
    )


def check_reserved(options: Mapping[str, Any], reserved: Mapping[str, str], otherwise: str) -> None:
    """Raise InputError if the caller passed options of `generate` that the task sets itself.

    Args:
        options: What the caller passed.
        reserved: Option -> the task's argument that sets it, or "" if there is none.
        otherwise: Name of a call that accepts the option, for the message.
    """
    for name in options:
        if name in reserved:
            remedy = f"Use `{reserved[name]}`." if reserved[name] else f"Call `{otherwise}` for it."
            raise InputError(f"`{name}` must be left out, but is {show(options[name])}. {remedy}")


def sets_length(options: Mapping[str, Any]) -> bool:
    """Return whether options of `generate` limit the length of the text."""
    return any(options.get(name) is not None for name in LENGTH_OPTIONS)


def with_length(options: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return the options without those that are None.

    `max_new_tokens` is added, unless the options limit the length or the model's generation config has it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config: Any = model.generation_config
    if not sets_length(given) and config.max_new_tokens is None:
        given["max_new_tokens"] = MAX_NEW_TOKENS
    return given


def length_errors(model: PreTrainedModel, inputs: Mapping[str, Any], rule: str, remedy: str) -> dict[int, InputError]:
    """Return an error for each prompt that is longer than the model's maximum: row -> error.

    Args:
        inputs: Inputs of `generate`.
        rule: Beginning of the message, in which `{most}` stands for the maximum.
        remedy: Last sentence of the message.
    """
    most = max_positions(model.config.get_text_config(decoder=True))
    # fast check: a prompt never needs more positions than it has tokens
    if most is None or inputs["input_ids"].shape[1] <= most:
        return {}
    target = target_of(model)
    assert isinstance(target, DecoderTarget)
    return {
        row: InputError(f"{rule.format(most=most)}, but takes {count}. {remedy}")
        for row, count in enumerate(target.prompt_positions(inputs))
        if count > most
    }


def renumber_rounds(on_round: Callable[[Round], None] | None, indices: Sequence[int]) -> Callable[[Round], None] | None:
    """Wrap the callback `on_round` for one batch, so that the rows of each round are indices in the whole call.

    Args:
        indices: Index in the call of each input of the batch.
    """
    if on_round is None:
        return None
    return lambda round_: on_round(replace(round_, rows=[indices[row] for row in round_.rows]))


@dataclass
class Usage:
    """Counts of one input: its rounds and tokens, and its share of the batch's time."""

    rounds: int = 0  # number of rounds, passes over prompts included
    prompts: int = 0  # number of passes over prompts: one, or one for each window of a recording
    later: int = 0  # number of tokens from the rounds after the prompt's pass, correction and bonus tokens included
    drafted: int = 0  # number of tokens that the drafter proposed
    accepted: int = 0  # number of drafted tokens that were accepted
    tokens: list[int] = field(default_factory=list)  # ids of all new tokens
    logprobs: list[float] = field(default_factory=list)  # ln P of the tokens from which the confidence is computed
    cut: int = 0  # tokens after which the text, or one of its windows, was cut at the maximum length; 0: it was not
    raisable: bool = True  # whether the model could have written more than `cut` tokens
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # stage of decoding -> seconds

    def count(self, round_: Round, index: int, drafts: bool) -> None:
        """Add one round.

        Args:
            index: The input's index among the rows of the round.
            drafts: Whether there is a drafter.
        """
        tokens = round_.tokens[index]
        self.rounds += 1
        self.tokens += tokens
        self.drafted += round_.drafted[index]
        self.accepted += round_.accepted[index]
        if round_.index:
            self.later += len(tokens)
        else:
            self.prompts += 1
        if drafts:  # without a drafter, these seconds are only the time that reading the clock takes
            self.seconds["drafter"] += round_.drafter / len(round_.rows)

    def clock(self, round_: Round, index: int, drafts: bool) -> None:
        """Add one round of a language model: counts, log-probabilities, and the seconds of each stage.

        Args:
            index: The input's index among the rows of the round.
            drafts: Whether there is a drafter.
        """
        self.count(round_, index, drafts)
        if any(round_.cut[index : index + 1]):
            self.note_cut(len(self.tokens))
        if round_.logprobs is not None:
            self.logprobs += round_.logprobs[index, : len(round_.tokens[index])].tolist()
        stage, seconds = ("decoder", round_.target) if round_.index else ("prompt", round_.target - round_.vision)
        self.seconds[stage] += seconds / len(round_.rows)
        self.seconds["core"] += round_.core / len(round_.rows)

    def note_cut(self, tokens: int, raisable: bool = True) -> None:
        """Note that the text, or one of its windows, was cut after this number of tokens. The longest window counts."""
        if tokens > self.cut:
            self.cut, self.raisable = tokens, raisable

    def add(self, other: Usage) -> None:
        """Add the counts and seconds of another part of the same input, such as a later window of a recording."""
        for name in ("rounds", "prompts", "later", "drafted", "accepted", "tokens", "logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.note_cut(other.cut, other.raisable)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds

    @property
    def finish_reason(self) -> str:
        """Return "length" if the text was cut at the maximum length, else "stop"."""
        return "length" if self.cut else "stop"

    @property
    def note(self) -> str:
        """Return the note on a text that was cut; "" if it was not."""
        return cut_note(self.cut, self.raisable)

    def limit_confidence(self, sure: float, by_caller: bool) -> float:
        """Return the confidence of the text, at most `CUT_CONFIDENCE` if it was cut at a length that the caller did not
        set.

        Args:
            sure: The confidence of what was written.
            by_caller: Whether the caller set the length, and so knows that the text may be cut.
        """
        return min(sure, CUT_CONFIDENCE) if self.cut and not by_caller else sure

    @property
    def tokens_per_round(self) -> float:
        """Return the mean number of tokens per round, without the passes over prompts; 1 if there were no other
        rounds."""
        later = self.rounds - self.prompts
        return self.later / later if later else 1.0
