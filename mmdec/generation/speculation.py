"""`generate`, `stream`, and `speculate` (for `model.generate`): the calls for models of transformers.

transformers prepares everything (masks, caches, processors, stopping criteria), then calls mmdec's decoding loop
instead of its own, so every option of `generate` keeps its meaning. Unsupported input raises an error before the first
pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeGuard, cast, overload

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel, StopStringCriteria

from mmdec.checks.arguments import (
    check_callable,
    check_instance,
    check_methods,
    check_whole,
    options_error,
    show,
)
from mmdec.checks.devices import PASSED_ON, check_same_dtype
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.budget import Nodes
from mmdec.core.loop import Round
from mmdec.core.scheduler import Scheduler, SchedulerLimits, Task
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.summary import cut_note, format_result, pluralise, rounds_line
from mmdec.core.verify import RuleName
from mmdec.errors import InputError
from mmdec.generation import register_attention
from mmdec.generation.hf_bridge import StockRun
from mmdec.generation.model_lock import read_while, reading
from mmdec.generation.run import DecodingOptions, DrafterChoice, PreparedRun, Speculation
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.registry import target_of

MAX_BATCH = 8  # rows of a list of prompts that are decoded at the same time, unless the caller says
MAX_SEQUENCES = 1024  # maximum of `num_return_sequences`, the texts per prompt, so that memory is not exhausted
# option that `model.generate` does not pass to a custom loop -> what to use instead, for the error message
REPLACED_OPTIONS = {
    "assistant_model": "Give it as `drafter`.",
    "streamer": "Iterate over `mmdec.stream`, or call `model.generate(custom_generate=mmdec.speculate(streamer=...))`.",
}

register_attention()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`: the texts, and what happened in each round."""

    sequences: Tensor  # (B, L) prompts and new tokens; shorter rows are padded on the right
    rounds: list[Round]  # one for each pass of the model; the first is the pass over the prompts
    lossless: bool  # False for the rule "typical", whose output has another distribution

    @property
    def tokens_per_round(self) -> float:
        """The mean number of new tokens per row and round; the pass over the prompts is not counted."""
        later = self.rounds[1:]
        passes = sum(len(round_.rows) for round_ in later)
        return sum(len(tokens) for round_ in later for tokens in round_.tokens) / passes if passes else 1.0

    @property
    def finish_reasons(self) -> list[str]:
        """For each row why it ended: "length" if it was cut at the maximum length, else "stop"."""
        cut = {row for round_ in self.rounds for row, short in zip(round_.rows, round_.cut, strict=False) if short}
        return ["length" if row in cut else "stop" for row in range(len(self.sequences))]

    @property
    def note(self) -> str:
        """Which rows were cut at the maximum length, and what to do; "" if none was."""
        cut = [row for row, why in enumerate(self.finish_reasons) if why == "length"]
        if not cut:
            return ""
        longest = max(
            sum(len(one.tokens[one.rows.index(row)]) for one in self.rounds if row in one.rows) for row in cut
        )
        return f"{pluralise(len(cut), 'row')} {cut_note(longest)}"

    def __str__(self) -> str:
        """Return three lines: number of tokens, number of rounds, seconds."""
        rows, tokens = len(self.sequences), sum(len(tokens) for round_ in self.rounds for tokens in round_.tokens)
        seconds = {name: sum(getattr(round_, name) for round_ in self.rounds) for name in ("target", "drafter", "core")}
        what = f"{pluralise(rows, 'row')}, {pluralise(tokens, 'new token')}"
        return format_result(what, rounds_line(len(self.rounds), self.tokens_per_round, self.lossless), seconds)


@overload
def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DrafterChoice = "auto",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Generation: ...


@overload
def generate(
    model: PreTrainedModel,
    inputs: Sequence[Tensor | Mapping[str, Any]],
    drafter: DrafterChoice = "auto",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    max_batch: int = MAX_BATCH,
    **options: Any,
) -> list[Generation]: ...


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any] | Sequence[Tensor | Mapping[str, Any]],
    drafter: DrafterChoice = "auto",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    max_batch: int = MAX_BATCH,
    **options: Any,
) -> Generation | list[Generation]:
    """Call `model.generate(**inputs, **options)` with speculative decoding: the same output, in fewer passes of the
    model.

    Args:
        model: A loaded language or vision-language model of transformers.
        inputs: Token ids (B, P) int64, or a tokenizer's or processor's output. Or a list of these: the prompts are then
            decoded side by side, whatever their lengths, and the next one begins as soon as another has ended.
        drafter: A registered name ("lookup" or "recycling"), a folder or hub id of a drafter with weights,
            "<model>/<drafter>" for a shipped one, a dotted path "package.module:Class", a smaller model (of another
            vocabulary only if both models' folders hold tokenizers), an object that implements
            `mmdec.types.Drafter`, or None for plain decoding. "auto" is the first drafter in the model's folder, else
            one shipped for its weights, else "lookup".
        rule: How drafted tokens are accepted. "greedy" and "sampled" give exactly the tokens of plain decoding.
            (Sampling at batch 1 equals `model.generate` under the same `torch.manual_seed`; larger batches, or calls
            with a `seed`, equal the same call without a drafter.) "residual" gives the model's own distribution and
            suits drafters that sample, such as a smaller model. "typical" is LOSSY. None: "greedy" or "sampled", by
            `do_sample`.
        num_speculative_tokens: Draft tokens per round: a number for a chain, (nodes, depth) for a tree, 0 for plain
            decoding. None: chosen in each round from measured times and acceptance.
        seed: Seed of the sampling. None: torch's own generator. Prompt i of a list is sampled with `seed + i`.
        statistics: Measurements of earlier calls, from which draft sizes are chosen; this call adds to them. None:
            `mmdec.default_statistics()`.
        max_batch: Maximum number of rows that are decoded at the same time, for a list of prompts.
        options: Any argument of `model.generate`, and `dtype`, which must be the model's dtype. In a batch, a logits
            processor or stopping criterion of your own makes transformers' loop decode without drafts, with a warning.
            To have drafts, set `mmdec_row_wise = True` on it, if its result for a row depends only on that row and its
            index.

    Returns:
        A `Generation`: the sequences (B, L), and what happened in each round; for a list of prompts, one for each.

    Raises:
        InputError: For beam search, a cache that cannot be rolled back, a drafter that does not fit the model, or a
            wrong argument.

    References:
        Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding; for the rules' papers see
        `mmdec.core.verify`.
    """
    decoding = DecodingOptions(drafter, rule, num_speculative_tokens, seed, statistics)
    speculation = Speculation(decoding)
    check_whole("max_batch", max_batch, 1, MAX_SEQUENCES, "It is the number of rows that are decoded at a time.")
    if _are_prompts(inputs):
        with _reading(model, speculation):
            return _generate_many(model, inputs, speculation, max_batch, options)
    with _reading(model, speculation):
        run = prepare(model, cast(Any, inputs), speculation, options)
        rounds = list(run.rounds)
    return Generation(run.sequences, rounds, decoding.lossless)


def _are_prompts(inputs: object) -> TypeGuard[Sequence[Tensor | Mapping[str, Any]]]:
    return isinstance(inputs, (list, tuple)) and all(
        isinstance(prompt, (Tensor, Mapping)) for prompt in cast(Sequence[object], inputs)
    )


def _generate_many(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | Mapping[str, Any]],
    speculation: Speculation,
    max_batch: int,
    options: Mapping[str, Any],
) -> list[Generation]:
    """Decode prompts side by side. Each begins as soon as there is room for its rows."""
    seed = speculation.options.seed
    config: Any = cast(Any, options.get("generation_config") or model.generation_config)
    sampled = speculation.options.rule in ("sampled", "residual") or bool(config.do_sample)
    if seed is None and options.get("do_sample", sampled):
        seed = int(torch.randint(2**31, ()))  # `torch.manual_seed` makes the output repeatable
    scheduler = Scheduler(SchedulerLimits(rows=max_batch))
    results = dict[int, Generation]()
    running = dict[Task, tuple[int, PreparedRun, list[Round]]]()

    def step() -> bool:
        more = scheduler.step()
        for task in [task for task in running if task.done]:
            index, run, rounds = running.pop(task)
            if task.error is not None:
                raise task.error
            results[index] = Generation(run.sequences, rounds, speculation.options.lossless)
        return more

    try:
        for index, prompt in enumerate(prompts):
            run = prepare(model, prompt, speculation.with_seed(None if seed is None else seed + index), options)
            if isinstance(run, StockRun):  # transformers' own loop, which cannot be interrupted
                rounds = list(run.rounds)
                results[index] = Generation(run.sequences, rounds, speculation.options.lossless)
                continue
            while scheduler.running and scheduler.rows + run.rows > max_batch:
                step()
            rounds = list[Round]()
            running[scheduler.add(run.steps, run.rows, on_round=rounds.append)] = index, run, rounds
            step()
        while step():
            pass
    finally:
        for task in running:
            scheduler.cancel(task)
    return [results[index] for index in range(len(prompts))]


def stream(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DrafterChoice = "auto",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    tokenizer: Any = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Iterator[Round]:
    """Decode as `generate` does, round by round.

    `generate` explains the arguments in full.

    Args:
        model: A loaded model of transformers.
        inputs: Token ids (B, P), or a tokenizer's or processor's output.
        drafter: Proposes tokens: a name, a folder with weights, a smaller model, a `Drafter`, or None for plain
            decoding. Default "auto": a drafter that was trained for the model, else "lookup".
        rule: How drafted tokens are accepted.
        num_speculative_tokens: Draft size; None: chosen in each round.
        seed: Seed of the sampling.
        statistics: Measurements of earlier calls.
        tokenizer: Decodes each round's tokens into `Round.text`. Default None: no text.
        options: Any argument of `model.generate`.

    Returns:
        An iterator of `Round`, which holds each batch row's new tokens.

    Raises:
        InputError: For what `generate` refuses, and for a tokenizer without `decode`.
    """
    if tokenizer is not None:
        check_methods("tokenizer", tokenizer, ("decode",), "Pass the model's tokenizer.")
        options = {"tokenizer": tokenizer, **options}
    decoding = DecodingOptions(drafter, rule, num_speculative_tokens, seed, statistics)
    return rounds_of(model, inputs, Speculation(decoding), options)


def rounds_of(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: Mapping[str, Any]
) -> Iterator[Round]:
    """Yield the rounds of a `generate` call as they finish.

    Args:
        speculation: The decoding loop.
        options: Arguments of `model.generate`; if a `tokenizer` is among them, each round has its text.
    """
    with _reading(model, speculation):
        run = prepare(model, inputs, speculation, options)
    rounds, tokenizer = read_while((model, *speculation.networks), run.rounds), options.get("tokenizer")
    return rounds if tokenizer is None else _with_text(rounds, tokenizer, run.rows)


def speculate(
    drafter: DrafterChoice = "auto",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    streamer: Any = None,
    statistics: DecodingStatistics | None = None,
) -> Speculation:
    """Make a decoding loop for `model.generate(..., custom_generate=mmdec.speculate("lookup"))`.

    Many calls may share the object. transformers does not pass its arguments `streamer`, `assistant_model` and
    `tokenizer` to a custom loop. So give `streamer` and `drafter` here, and pass a `StopStringCriteria` instead of
    `stop_strings`. For `token_healing` call `mmdec.generate`.

    Args:
        drafter: Proposes tokens: a name, a folder with weights, a smaller model, a `Drafter`, or None for plain
            decoding. Default "auto": a drafter that was trained for the model, else "lookup".
        rule: How drafted tokens are accepted.
        num_speculative_tokens: Draft size; None: chosen in each round.
        seed: Seed of the sampling.
        statistics: Measurements of earlier calls. `generate` explains all these arguments in full.
        on_round: Called with each `Round` when it is finished. Default None.
        streamer: An object such as transformers' `TextStreamer`, which gets each new token; for batch size 1. Default
            None.

    Returns:
        A `Speculation`.

    Raises:
        InputError: If an argument is wrong.
    """
    options = DecodingOptions(drafter, rule, num_speculative_tokens, seed, statistics, on_round, streamer)
    return Speculation(options)


@dataclass(frozen=True)
class _Preparation:
    """A custom loop for `model.generate` that prepares decoding and returns the prepared call instead of decoding.

    So rounds can be iterated outside of `model.generate`.
    """

    speculation: Speculation
    target: HfTarget
    held: Mapping[str, Any]  # model inputs that go to `Target.prefill` directly, not through `model.generate`

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> PreparedRun | StockRun:
        return self.speculation.begin(self.target, model, input_ids, generation_config, **{**inputs, **self.held})


def _reading(model: object, speculation: Speculation) -> AbstractContextManager[object]:
    """Return a context manager that holds the read locks of the model and of the smaller models that draft for it.

    If `model` is not a model, it gets no lock; a later check raises the error.
    """
    return reading(*((model, *speculation.networks) if isinstance(model, PreTrainedModel) else ()))


def prepare(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: Mapping[str, Any]
) -> PreparedRun | StockRun:
    """Check and prepare a `generate` call. The caller holds the models' locks, and decodes by `rounds` or `steps`.

    Args:
        model: A loaded model of transformers.
        inputs: Token ids (B, P), or a tokenizer's or processor's output.
        speculation: The decoding loop.
        options: Arguments of `model.generate`.

    Raises:
        InputError: For what `generate` refuses.
    """
    remedy = "Load it first; of a PeftModel give `get_base_model()`."
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", remedy)
    target = target_of(model)
    if not target.decodes_once:
        raise InputError(
            f"`model` must be a language model, but is {type(model).__name__}, whose `generate` may run the decoding "
            "loop several times. Call `model.generate(inputs, custom_generate=mmdec.speculate(drafter))`."
        )
    named = prompt_inputs(model, inputs)
    # In error messages, name the options if there are any: model inputs are rarely the cause.
    names = {*options} - {"tokenizer"} or {*named} - {"input_ids"}
    check_options(options, named)
    options = dict(options)
    check_same_dtype(options.pop("dtype", None), model.dtype)
    rule = speculation.options.rule
    if rule is not None and rule != "typical":
        options.setdefault("do_sample", rule != "greedy")
    try:
        strings, heals = tokenizer_options(options, model)
        tokenizer = options.pop("tokenizer", None)
        if strings is not None:
            ends = StopStringCriteria(tokenizer, strings)
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), ends]
        if heals:
            named["input_ids"] = heal_tokens(named["input_ids"], named.get("attention_mask"), model, tokenizer)
        call: Any = model.generate  # typed as `Any`, because type checkers take attributes of modules for tensors
        prepared, held_back = target.split_inputs({**options, **named})
        run = call(**prepared, custom_generate=_Preparation(speculation, target, held_back))
        # transformers' own loop needs all inputs, so they must go through `generate`
        if held_back and isinstance(run, StockRun):
            run = call(**options, **named, custom_generate=_Preparation(speculation, target, {}))
    except PASSED_ON:
        raise
    except Exception as error:  # from transformers' preparation, which may raise anything
        raise options_error(names, error, {*option_names(model), *signature(generate).parameters}) from error
    return cast(PreparedRun | StockRun, run)


def _with_text(rounds: Iterator[Round], tokenizer: Any, rows: int) -> Iterator[Round]:
    """Add to each round the text of its tokens.

    A character of several tokens comes with its last token.

    Args:
        rows: Number of batch rows.
    """
    tokens: list[list[int]] = [[] for _ in range(rows)]
    texts = [""] * rows
    for round_ in rounds:
        pieces: list[str] = []
        for row, new, done in zip(round_.rows, round_.tokens, round_.done, strict=True):
            tokens[row] += new
            text: str = tokenizer.decode(tokens[row], skip_special_tokens=True)
            if text.endswith("\ufffd") and not done:
                text = texts[row]
            pieces.append(text[len(texts[row]) :])
            texts[row] = text
        yield replace(round_, text=pieces)


def prompt_inputs(model: PreTrainedModel, inputs: object) -> dict[str, Any]:
    """Return the model's inputs by name, checked.

    Args:
        inputs: Token ids (B, P), or a tokenizer's or processor's output.

    Raises:
        InputError: If the model cannot read them.
    """
    if not isinstance(inputs, (Tensor, Mapping)):
        raise InputError(
            f"`inputs` must be token ids (B, P) or a tokenizer's output, but is {show(inputs)}. Call "
            'tokenizer(text, return_tensors="pt").'
        )
    main = "input_ids"  # name of the input that the model reads: token ids; for a speech model, sound features
    if model.config.is_encoder_decoder:
        main = str(model.main_input_name)
    named: dict[object, Any] = {main: inputs}
    if not isinstance(inputs, Tensor):
        named = dict(cast(Mapping[object, Any], inputs))
    if main not in named or not all(isinstance(name, str) for name in named):
        names = ", ".join(show(name) for name in list(named)[:9]) or "nothing"
        raise InputError(f"`inputs` must hold `{main}`, but holds {names}. Give ids or a tokenizer's output.")
    if named.get("decoder_input_ids") is not None:
        _check_ids(model, "decoder_input_ids", named["decoder_input_ids"])
    if main != "input_ids":
        sound = named[main]
        if not isinstance(sound, Tensor) or not sound.is_floating_point() or sound.ndim < 2 or 0 in sound.shape:
            fault = f"is {sound.dtype} {tuple(sound.shape)}" if isinstance(sound, Tensor) else f"is {show(sound)}"
            raise InputError(f"`{main}` must hold the sound of a batch, but {fault}. Pass the processor's own output.")
        return cast(dict[str, Any], named)
    _check_ids(model, "input_ids", named["input_ids"])
    return cast(dict[str, Any], named)


def _check_ids(model: PreTrainedModel, name: str, ids: object) -> None:
    """Raise InputError for token ids that the model cannot read.

    Args:
        name: The argument's name, for the error message.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        fault = f"holds {ids.dtype}" if isinstance(ids, Tensor) else f"is {show(ids)}"
        raise InputError(
            f'`{name}` must be a tensor of whole numbers, but {fault}. Pass return_tensors="pt" to the tokenizer.'
        )
    if ids.ndim != 2 or 0 in ids.shape:
        shape = tuple(ids.shape)
        raise InputError(f"`{name}` must be (B, P) with at least one token a row, but is {shape}. Add a BOS token.")
    if ids.device.type != model.device.type:
        raise InputError(f"`{name}` must be on the model's {model.device}, but is on {ids.device}. Move it there.")
    tokens = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    low, high = (int(end) for end in ids.aminmax())
    if not 0 <= low <= high < tokens:
        raise InputError(
            f"`{name}` must be between 0 and {tokens - 1}, the model's tokens, but ranges from {low} to {high}. Use "
            "the model's own tokenizer."
        )


def check_options(options: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Raise InputError for options of `model.generate` that would fail or exhaust the memory before decoding begins.

    Args:
        named: The model's inputs by name.
    """
    if "custom_generate" in options:
        raise InputError(
            f"`custom_generate` must be left out, but is {show(options['custom_generate'])}. Call `model.generate` "
            "to use another loop than mmdec's."
        )
    if options.get("cache_implementation") == "paged":
        raise InputError(
            "`cache_implementation` must be left out, but is 'paged', with which transformers runs a decoding loop of "
            "its own. Call `model.generate_batch` for it."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if options.get(name):
            raise InputError(
                f"`{name}` must be left out, because a `Generation` holds only sequences and rounds. Pass it to "
                "`model.generate(..., custom_generate=mmdec.speculate(drafter))`."
            )
    for name, remedy in REPLACED_OPTIONS.items():
        if options.get(name) is not None:
            raise InputError(f"`{name}` must be left out, but is {show(options[name])}. {remedy}")
    if twice := sorted(options.keys() & named.keys()):
        raise InputError(f"`{twice[0]}` must not be both in `inputs` and among the options. Drop one of them.")
    for name in ("num_beams", "num_return_sequences"):  # options that multiply the number of rows
        if options.get(name) is not None:
            most = 1 if name == "num_beams" else MAX_SEQUENCES
            check_whole(name, options[name], 1, most, "Beams need `model.generate`'s own loop.")
    for name in ("attention_mask", "position_ids"):
        value = {**named, **options}.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"`{name}` must be a tensor, but is {show(value)}. Pass the tokenizer's own.")
        if name == "attention_mask" and value is not None and not bool(((value == 0) | (value == 1)).all()):
            raise InputError("`attention_mask` must hold 0 and 1, but holds other numbers. Pass the tokenizer's own.")
    check_callable("prefix_allowed_tokens_fn", options.get("prefix_allowed_tokens_fn"), "a function of a row and ids")
    cache = {**named, **options}.get(CACHE_ARGUMENT)
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"`{CACHE_ARGUMENT}` must be a DynamicCache, but is {show(cache)}. Leave it out.")
    for name in ("logits_processor", "stopping_criteria"):
        listed: object = options.get(name)
        if listed is not None and not (isinstance(listed, list) and all(map(callable, cast(list[object], listed)))):
            raise InputError(
                f"`{name}` must be a list of functions, but is {show(cast(object, listed))}. Put it into a list."
            )


def tokenizer_options(options: dict[str, Any], model: PreTrainedModel) -> tuple[Any, bool]:
    """Remove the options that need a tokenizer, because `model.generate` does not pass its tokenizer to a custom loop.

    Returns:
        `stop_strings`, the strings at which a text ends, or None; and whether to apply `token_healing`.
    """
    values: dict[str, Any] = {}
    for name in ("stop_strings", "token_healing"):
        if setting := getattr(model.generation_config, name, None):  # the model's setting, unless the call has one
            raise InputError(
                f"`model.generation_config.{name}` must be None, but is {show(setting)}. Set it to None, and pass "
                f"`{name}` with `tokenizer`."
            )
        value, config = options.pop(name, None), options.get("generation_config")
        if value is None and getattr(config, name, None) is not None:
            value = getattr(config, name)
            options["generation_config"] = config = copy.deepcopy(config)
            setattr(config, name, None)
        values[name] = value
        if value not in (None, False) and options.get("tokenizer") is None:
            raise InputError(f"`tokenizer` must be given with `{name}`, but is None. Pass the model's tokenizer.")
    return values["stop_strings"], bool(values["token_healing"])


def heal_tokens(ids: Tensor, mask: Tensor | None, model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """Return the token ids (B, P) after transformers' token healing, which replaces the end of each prompt.

    Raises:
        InputError: If the number of tokens changes, because the mask (B, P) would no longer fit.
    """
    healed = cast(Any, model).heal_tokens(ids, tokenizer)
    if healed.shape != ids.shape or mask is None:
        problem = (
            f"have {healed.shape[1]} columns for {ids.shape[1]}" if mask is not None else "come without their mask"
        )
        raise InputError(
            f"`token_healing` must be given with `attention_mask` and prompts that keep their length, but they "
            f"{problem}. Pass the tokenizer's own output for texts without spaces at their ends."
        )
    return healed


def option_names(model: PreTrainedModel) -> set[str]:
    """Return the names of all arguments of `model.generate`: its own, generation settings, and the model's inputs."""
    functions: tuple[Any, ...] = (model.generate, model.prepare_inputs_for_generation, model.forward)
    parameters = {name for function in functions for name in signature(function).parameters}
    return {name for name in {*parameters, *vars(GenerationConfig())} if not name.startswith("_")}
