"""`generate`, `stream`, and `speculate` (for `model.generate`): the calls for models of transformers.

transformers prepares everything (masks, caches, processors, stopping criteria), then calls mmdec's decoding loop
instead of its own, so every option of `generate` keeps its meaning. Unsupported input raises an error before the first
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, TypeGuard, cast, final, overload

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria

from mmdec.checks.arguments import (
    check_instance,
    check_methods,
    check_whole,
    options_error,
)
from mmdec.checks.devices import PASSED_ON, check_same_dtype
from mmdec.core.budget import Nodes
from mmdec.core.scheduler import decode_together
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import Steps, pass_stop_iteration, run_alone, watch
from mmdec.core.summary import cut_note, format_result, pluralise, rounds_line
from mmdec.core.verify import Relaxation, RuleName
from mmdec.errors import BatchError, InputError, without_frames
from mmdec.generation import register_attention
from mmdec.generation.decoding_run import DecodingRun
from mmdec.generation.drafter_choice import DrafterChoice, DraftInput
from mmdec.generation.hf_bridge import keeps_state
from mmdec.generation.inputs import (
    MAX_SEQUENCES,
    check_options,
    generate_option_names,
    heal_tokens,
    prompt_inputs,
    tokenizer_options,
)
from mmdec.generation.model_lock import read_while, reading
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.registry import target_of
from mmdec.types import Round

BATCH_SIZE = 8  # rows of a list of prompts that are decoded at the same time, unless the caller says

register_attention()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`: the texts, and what happened in each round."""

    sequences: Tensor  # (B, L) prompts and new tokens; shorter rows are padded on the right
    rounds: list[Round]  # one for each pass of the model; the first is the pass over the prompts
    lossless: bool  # False for the rules "typical" and "relaxed", whose output has another distribution

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
    rule: RuleName | Relaxation | None = None,
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
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[Generation]: ...


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any] | Sequence[Tensor | Mapping[str, Any]],
    drafter: DrafterChoice = "auto",
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> Generation | list[Generation]:
    """Call `model.generate(**inputs, **options)` with speculative decoding: the same output, in fewer passes of the
    model.

    Args:
        model: A loaded language or vision-language model of transformers.
        inputs: Token ids (B, P) int64, or a tokenizer's or processor's output. Or a list of these: the prompts are then
            decoded side by side, whatever their lengths, and the next one begins as soon as another has ended.
        drafter: A registered name ("lookup", "recycling", "jacobi", ...), a folder or hub id of a drafter with weights,
            "<model>/<drafter>" for a shipped one, a dotted path "package.module:Class", a smaller model (of another
            vocabulary only if both models' folders hold tokenizers), an object that implements
            `mmdec.types.Drafter`, or None for plain decoding. "auto" is the first drafter in the model's folder, else
            one shipped for its weights, else "lookup".
        rule: How drafted tokens are accepted. "greedy" and "sampled" give exactly the tokens of plain decoding.
            (Sampling at batch 1 equals `model.generate` under the same `torch.manual_seed`; larger batches, or calls
            with a `seed`, equal the same call without a drafter.) "residual" and "traversal" give the model's own
            distribution and suit drafters that sample, such as a smaller model; "traversal" accepts more tokens.
            "typical" and a `mmdec.Relaxation` are LOSSY: another distribution. None: "greedy" or "sampled", by
            `do_sample`.
        num_speculative_tokens: Draft tokens per round: a number for a chain, (nodes, depth) for a tree, 0 for plain
            decoding. None: chosen in each round from measured times and acceptance.
        seed: Seed of the sampling. None: torch's own generator. Prompt i of a list is sampled with `seed + i`.
        statistics: Measurements of earlier calls, from which draft sizes are chosen; this call adds to them. None:
            `mmdec.default_statistics()`.
        batch_size: Maximum number of rows that are decoded at the same time, for a list of prompts.
        options: Any argument of `model.generate`, and `dtype`, which must be the model's dtype. In a batch, a logits
            processor or stopping criterion of your own makes transformers' loop decode without drafts, with a warning.
            To have drafts, set `mmdec_row_wise = True` on it, if its result for a row depends only on that row and its
            index.

    Returns:
        A `Generation`: the sequences (B, L), and what happened in each round; for a list of prompts, one for each.

    Raises:
        InputError: For beam search, a cache that cannot be rolled back, a drafter that does not fit the model, or a
            wrong argument.
        BatchError: If some prompts of a list are rejected; it holds the results of the others.

    References:
        Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding; for the rules' papers see
        `mmdec.core.verify`.
    """
    decoding = DecodingOptions(drafter, rule, num_speculative_tokens, seed, statistics)
    speculation = Speculation(decoding)
    check_whole("batch_size", batch_size, 1, MAX_SEQUENCES, "It is the number of rows that are decoded at a time.")
    if _are_prompts(inputs):
        with pass_stop_iteration(), _reading(model, speculation):
            return _generate_many(model, inputs, speculation, batch_size, options)
    with pass_stop_iteration(), _reading(model, speculation):
        run = prepare_run(model, cast(Any, inputs), speculation, options)
        rounds = list(run_alone(run.steps))
    return Generation(run.sequences, rounds, decoding.lossless)


def _are_prompts(inputs: object) -> TypeGuard[Sequence[Tensor | Mapping[str, Any]]]:
    """Return whether the inputs are a list of prompts, of which some may be anything else by mistake."""
    if not isinstance(inputs, (list, tuple)):
        return False
    prompts = cast(Sequence[object], inputs)
    return not prompts or any(isinstance(prompt, (Tensor, Mapping)) for prompt in prompts)


def _generate_many(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | Mapping[str, Any]],
    speculation: Speculation,
    batch_size: int,
    options: Mapping[str, Any],
) -> list[Generation]:
    """Decode prompts side by side. Each begins as soon as there is room for its rows."""
    speculation.check_inputs(len(prompts))
    if prompts:  # a mistake in the call concerns no single prompt
        target = _checked_target(model)
        check_options(options, {})
        check_same_dtype(options.get("dtype"), model.dtype)
        speculation.checked_drafter(target, model)
    seed = first_seed(model, speculation, options, draw=len(prompts) > 1)
    results, errors = dict[int, Generation](), dict[int, InputError]()

    def refuse(index: int, error: InputError) -> None:
        errors[index] = without_frames(error)

    @cache
    def call_error() -> str | None:
        """Return the message with which any prompt is refused, even one of one token; None: there is none."""
        try:
            prepare_run(model, torch.zeros((1, 1), dtype=torch.long, device=model.device), speculation, options)
        except InputError as error:
            return str(error)
        return None

    def prepared(queue: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Steps[Generation], int]]:
        for index, prompt in queue:
            own = speculation.for_inputs([DraftInput(index)])
            own = own if seed is None else own.with_seed(seed + index)
            try:
                run = prepare_run(model, prompt, own, options)
            except InputError as error:
                if str(error) == call_error():
                    raise
                refuse(index, error)
                continue
            if run.rows <= batch_size:
                yield index, _generation_steps(run, speculation), run.rows
                continue
            refuse(
                index,
                InputError(
                    f"`batch_size` must be at least {run.rows}, the rows of `inputs[{index}]`, but is {batch_size}. "
                    "Raise it, or give fewer rows in one prompt."
                ),
            )

    numbered = list(enumerate(prompts))
    # a function that keeps a state reads one prompt after another
    for queue in ([one] for one in numbered) if keeps_state(options) else [numbered]:
        results |= decode_together(prepared(queue), batch_size, on_refusal=refuse)
    if errors:
        errors = dict(sorted(errors.items()))
        raise BatchError([results.get(index) for index in range(len(prompts))], errors, "prompts")
    return [results[index] for index in range(len(prompts))]


def _generation_steps(run: DecodingRun, speculation: Speculation) -> Steps[Generation]:
    """Relay the steps of a prepared call. Returns its `Generation`."""
    rounds = list[Round]()
    yield from watch(run.steps, rounds.append)
    return Generation(run.sequences, rounds, speculation.options.lossless)


def first_seed(
    model: PreTrainedModel, speculation: Speculation, options: Mapping[str, Any], draw: bool = True
) -> int | None:
    """Return the seed of the first input of a list; input i has this seed plus i. None: nothing is sampled with a seed.

    So the text of an input does not depend on which others are decoded at the same time.

    Args:
        model: A loaded model of transformers.
        speculation: The decoding loop of the call.
        options: Arguments of `model.generate`.
        draw: Whether to draw a seed from torch's generator if the call has none. `torch.manual_seed` then makes the
            texts repeatable.
    """
    seed, by_rule = speculation.options.seed, speculation.options.samples
    given: Any = options.get("generation_config")
    # in this order, as transformers merges them; None is "not set"
    configs: list[Any] = [given, model.generation_config]
    choices = [options.get("do_sample"), by_rule, *(config.do_sample for config in configs if config is not None)]
    if not next((choice for choice in choices if choice is not None), False):
        return None
    return int(torch.randint(2**31, ())) if seed is None and draw else seed


def stream(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DrafterChoice = "auto",
    rule: RuleName | Relaxation | None = None,
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
        tokenizer: Decodes each round's tokens into `Round.text`. Default None: no text.
        statistics: Measurements of earlier calls.
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
        run = prepare_run(model, inputs, speculation, options)
    rounds, tokenizer = read_while((model, *speculation.networks), run_alone(run.steps)), options.get("tokenizer")
    return rounds if tokenizer is None else _with_text(rounds, tokenizer, run.rows)


def speculate(
    drafter: DrafterChoice = "auto",
    rule: RuleName | Relaxation | None = None,
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
    prefill_inputs: Mapping[str, Any]  # model inputs that go to `Target.prefill` directly, not through `model.generate`

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> DecodingRun:
        inputs = {**inputs, **self.prefill_inputs}
        return self.speculation.begin(self.target, model, input_ids, generation_config, **inputs)


def _reading(model: object, speculation: Speculation) -> AbstractContextManager[object]:
    """Return a context manager that holds the read locks of the model and of the smaller models that draft for it.

    If `model` is not a model, it gets no lock; a later check raises the error.
    """
    return reading(*((model, *speculation.networks) if isinstance(model, PreTrainedModel) else ()))


def prepare_run(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: Mapping[str, Any]
) -> DecodingRun:
    """Check a call of `generate`, and let transformers prepare it. The model is not run yet.

    Args:
        model: A loaded model of transformers.
        inputs: Token ids (B, P), or a tokenizer's or processor's output.
        speculation: The decoding loop.
        options: Arguments of `model.generate`.

    Raises:
        InputError: If an argument is wrong.
    """
    target = _checked_target(model)
    named = prompt_inputs(model, inputs)
    # In error messages, name the options if there are any: model inputs are rarely the cause.
    names = {*options} - {"tokenizer"} or {*named} - {"input_ids"}
    check_options(options, named)
    options = dict(options)
    check_same_dtype(options.pop("dtype", None), model.dtype)
    samples = speculation.options.samples
    if samples is not None:
        options.setdefault("do_sample", samples)
    try:
        strings, heals = tokenizer_options(options, model)
        tokenizer = options.pop("tokenizer", None)
        if strings is not None:
            ends = StopStringCriteria(tokenizer, strings)
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), ends]
        if heals:
            named["input_ids"] = heal_tokens(named["input_ids"], named.get("attention_mask"), model, tokenizer)
        prepare: Any = model.generate  # typed as `Any`, because type checkers take attributes of modules for tensors
        prepared, held_back = target.split_inputs({**options, **named})
        run = prepare(**prepared, custom_generate=_Preparation(speculation, target, held_back))
        if held_back and run.needs_all_inputs:
            run = prepare(**options, **named, custom_generate=_Preparation(speculation, target, {}))
    except PASSED_ON:
        raise
    except Exception as error:  # from transformers' preparation, which may raise anything
        raise options_error(names, error, {*generate_option_names(model), *signature(generate).parameters}) from error
    return cast(DecodingRun, run)


def _checked_target(model: PreTrainedModel) -> HfTarget:
    """Return the adapter of the argument `model`; raise InputError if it is no language model."""
    remedy = "Load it first; of a PeftModel give `get_base_model()`."
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", remedy)
    target = target_of(model)
    if not target.decodes_once:
        raise InputError(
            f"`model` must be a language model, but is {type(model).__name__}, whose `generate` may run the decoding "
            "loop several times. Call `model.generate(inputs, custom_generate=mmdec.speculate(drafter))`."
        )
    return target


def _with_text(rounds: Iterator[Round], tokenizer: Any, rows: int) -> Iterator[Round]:
    add_text = RoundText(tokenizer, rows)
    for round_ in rounds:
        yield add_text(round_)


@final
class RoundText:
    """Adds to each round of a decoding the text of its tokens. A character of several tokens comes with its last token.

    Args:
        tokenizer: Decodes the tokens.
        rows: Number of batch rows.
    """

    def __init__(self, tokenizer: Any, rows: int = 1) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._texts = [""] * rows

    def __call__(self, round_: Round) -> Round:
        """Return the next round with its text."""
        pieces = list[str]()
        for row, new, done in zip(round_.rows, round_.tokens, round_.done, strict=True):
            self._tokens[row] += new
            text: str = self._tokenizer.decode(self._tokens[row], skip_special_tokens=True)
            if text.endswith("\ufffd") and not done:
                text = self._texts[row]
            pieces.append(text[len(self._texts[row]) :])
            self._texts[row] = text
        return replace(round_, text=pieces)
