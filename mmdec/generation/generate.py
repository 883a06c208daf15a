"""`generate`, `stream`, and `speculate` (for `model.generate`): the calls for models of transformers.

transformers' `generate` prepares everything (masks, caches, processors, stopping criteria), so every option keeps its
meaning. `generate` and `stream` take over what it has prepared and decode; `speculate` decodes inside it. Unsupported
input raises an error before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeGuard, cast, final, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria

from mmdec.checks.arguments import (
    check_instance,
    check_methods,
    check_whole,
)
from mmdec.checks.devices import check_same_dtype
from mmdec.core.budget import DraftSize
from mmdec.core.growing_text import GrowingText
from mmdec.core.scheduler import decode_together
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import Steps, pass_stop_iteration, run_steps, watch_rounds
from mmdec.core.summary import cut_note, format_result, pluralise, rounds_line
from mmdec.core.verify import Relaxation, RuleName
from mmdec.drafters.built_in import AUTO
from mmdec.errors import BatchError, InputError, without_frames
from mmdec.generation import register_attention
from mmdec.generation.decoding_run import DecodingRun
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.generation.drafter_source import DraftInput
from mmdec.generation.hf_bridge import keeps_state, return_prepared, try_late_checks
from mmdec.generation.inputs import (
    MAX_SEQUENCES,
    check_named_inputs,
    check_options,
    heal_tokens,
    options_errors,
    prompt_inputs,
    tokenizer_options,
)
from mmdec.generation.model_lock import read_while, reading
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.registry import make_target
from mmdec.types import Round

# arguments that `model.generate` reads from its **kwargs, so that its signature lacks them
ARGUMENTS_IN_KWARGS = ("past_key_values", "trust_remote_code")
BATCH_SIZE = 8  # rows of a list of prompts that are decoded at the same time, unless the caller says

register_attention()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`: the texts, and what happened in each round."""

    sequences: Tensor  # (B, L) prompts and new tokens; shorter rows are padded on the right
    rounds: list[Round]  # one for each pass of the model; the first is the pass over the prompts
    lossless: bool  # False for rules whose output has another distribution: "typical", relaxed and some registered ones

    @property
    def tokens_per_round(self) -> float:
        """The mean number of new tokens per row and round; the pass over the prompts is not counted."""
        later = self.rounds[1:]
        passes = sum(len(round_.rows) for round_ in later)
        return sum(len(tokens) for round_ in later for tokens in round_.tokens) / passes if passes else 1.0

    @property
    def finish_reasons(self) -> list[str]:
        """For each row why it ended: "length" if it was cut at the maximum length, else "stop"."""
        cut = {row for round_ in self.rounds for row, short in zip(round_.rows, round_.is_cut, strict=False) if short}
        return ["length" if row in cut else "stop" for row in range(len(self.sequences))]

    @property
    def note(self) -> str:
        """Which rows were cut at the maximum length, and what to do; "" if none was."""
        cut = [row for row, why in enumerate(self.finish_reasons) if why == "length"]
        if not cut:
            return ""
        longest = max(
            sum(len(record.tokens[record.rows.index(row)]) for record in self.rounds if row in record.rows)
            for row in cut
        )
        return f"{pluralise(len(cut), 'row')} {cut_note(longest)}"

    def __str__(self) -> str:
        """Return three lines: number of tokens, number of rounds, seconds."""
        rows, tokens = len(self.sequences), sum(len(tokens) for round_ in self.rounds for tokens in round_.tokens)
        seconds = {
            "target": sum(round_.target_seconds for round_ in self.rounds),
            "drafter": sum(round_.drafter_seconds for round_ in self.rounds),
            "core": sum(round_.core_seconds for round_ in self.rounds),
        }
        size = f"{pluralise(rows, 'row')}, {pluralise(tokens, 'new token')}"
        return format_result(size, rounds_line(len(self.rounds), self.tokens_per_round, self.lossless), seconds)


@overload
def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DrafterChoice = AUTO,
    *,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Generation: ...


@overload
def generate(
    model: PreTrainedModel,
    inputs: Sequence[Tensor | Mapping[str, Any]],
    drafter: DrafterChoice = AUTO,
    *,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[Generation]: ...


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any] | Sequence[Tensor | Mapping[str, Any]],
    drafter: DrafterChoice = AUTO,
    *,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> Generation | list[Generation]:
    """Generate the output of `model.generate(**inputs, **options)` by speculative decoding, in fewer passes.

    Args:
        model: A loaded language or vision-language model of transformers.
        inputs: Token ids (B, P) int64, or a tokenizer's or processor's output. Or a list of these: the prompts are then
            decoded side by side, whatever their lengths, and the next one begins as soon as another has ended.
        drafter: A registered name ("lookup", "recycling", "jacobi", ...), a folder or Hugging Face id of a drafter with
            weights, "<model>/<drafter>" for a shipped one, a dotted path "package.module:Class", a smaller model (of
            another vocabulary only if both models' folders hold tokenizers), an object that implements
            `mmdec.types.Drafter`, or None for plain decoding. "auto" is the first drafter in the model's folder, else
            one shipped for its weights, else "lookup".
        rule: How drafted tokens are accepted. "greedy" and "sampled" give exactly the tokens of plain decoding.
            (Sampling at batch 1 equals `model.generate` under the same `torch.manual_seed`; larger batches, or calls
            with a `seed`, equal the same call without a drafter.) "residual" and "traversal" give the model's own
            distribution and suit drafters that sample, such as a smaller model; "traversal" accepts more tokens.
            "typical" and a `mmdec.Relaxation` are LOSSY: another distribution. Or a name given to
            `mmdec.register_rule`. None: "greedy" or "sampled", by `do_sample`.
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
    speculation = Speculation(DecodingOptions(drafter, rule, num_speculative_tokens, seed, statistics))
    check_whole("batch_size", batch_size, 1, MAX_SEQUENCES, "It is the number of rows that are decoded at a time.")
    check_loaded_model(model)
    with pass_stop_iteration(), reading(model, *speculation.networks):
        call = GenerateCall.from_options(model, speculation, options)
        if _are_prompts(inputs):
            return _generate_many(call, inputs, batch_size)
        run = call.prepare(cast(Any, inputs))
        rounds = list(run_steps(run.steps))
    return Generation(run.sequences, rounds, speculation.options.lossless)


def _are_prompts(inputs: object) -> TypeGuard[Sequence[Tensor | Mapping[str, Any]]]:
    """Return whether the inputs are a list of prompts, of which some may be anything else by mistake."""
    if not isinstance(inputs, (list, tuple)):
        return False
    prompts = cast(Sequence[object], inputs)
    return not prompts or any(isinstance(prompt, (Tensor, Mapping)) for prompt in prompts)


def _generate_many(
    call: GenerateCall, prompts: Sequence[Tensor | Mapping[str, Any]], batch_size: int
) -> list[Generation]:
    """Decode prompts side by side. Each begins as soon as there is room for its rows."""
    speculation = call.speculation
    speculation.check_inputs(len(prompts))
    call.check_settings()
    seed = first_seed(call.target.model, speculation, call.caller_options, draw=len(prompts) > 1)
    results, errors = dict[int, Generation](), dict[int, InputError]()

    def refuse(index: int, error: InputError) -> None:
        errors[index] = without_frames(error)

    def prepared(queue: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Steps[Generation], int]]:
        for index, prompt in queue:
            prompt_speculation = speculation.for_inputs([DraftInput(index)])
            prompt_speculation = prompt_speculation if seed is None else prompt_speculation.with_seed(seed + index)
            try:
                run = call.prepare(prompt, prompt_speculation)
                if run.rows > batch_size:
                    raise InputError(
                        f"`batch_size` must be at least {run.rows}, the rows of `inputs[{index}]`, but is "
                        f"{batch_size}. Raise it, or give fewer rows in one prompt."
                    )
            except InputError as error:
                refuse(index, error)
            else:
                yield index, _generation_steps(run, speculation), run.rows

    numbered = list(enumerate(prompts))
    # a function that keeps a state reads one prompt after another
    for queue in ([item] for item in numbered) if keeps_state(call.caller_options) else [numbered]:
        results |= decode_together(prepared(queue), batch_size, on_refusal=refuse)
    if errors:
        errors = dict(sorted(errors.items()))
        raise BatchError([results.get(index) for index in range(len(prompts))], errors, "prompts")
    return [results[index] for index in range(len(prompts))]


def _generation_steps(run: DecodingRun, speculation: Speculation) -> Steps[Generation]:
    """Relay the steps of a prepared call.

    Returns:
        Its `Generation`.
    """
    rounds = list[Round]()
    yield from watch_rounds(run.steps, rounds.append)
    return Generation(run.sequences, rounds, speculation.options.lossless)


def first_seed(
    model: PreTrainedModel, speculation: Speculation, options: Mapping[str, Any], draw: bool = True
) -> int | None:
    """Return the seed of the first input of a list; input i has this seed plus i. None: nothing is sampled with a seed.

    So the text of an input does not depend on which others are decoded at the same time.

    Args:
        model: A loaded model of transformers.
        speculation: Has the rule and the seed of the call.
        options: Arguments of `model.generate`.
        draw: Whether to draw a seed from torch's generator if the call has none. `torch.manual_seed` then makes the
            texts repeatable.
    """
    seed, by_rule = speculation.options.seed, speculation.options.samples
    config: Any = options.get("generation_config")
    # in this order, as transformers merges them; None is "not set"
    configs: list[Any] = [config, model.generation_config]
    choices = [options.get("do_sample"), by_rule, *(config.do_sample for config in configs if config is not None)]
    if not next((choice for choice in choices if choice is not None), False):
        return None
    return int(torch.randint(2**31, ())) if seed is None and draw else seed


def stream(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DrafterChoice = AUTO,
    *,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    tokenizer: Any = None,
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
    return generate_rounds(model, inputs, Speculation(decoding), options)


def generate_rounds(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: Mapping[str, Any]
) -> Iterator[Round]:
    """Yield the rounds of a `generate` call as they finish.

    Args:
        speculation: The drafter, rule and draft size.
        options: Arguments of `model.generate`; if a `tokenizer` is among them, each round has its text.
    """
    check_loaded_model(model)
    with reading(model, *speculation.networks):
        call = GenerateCall.from_options(model, speculation, options)
        run = call.prepare(inputs)
    rounds = read_while((model, *speculation.networks), run_steps(run.steps))
    if call.tokenizer is None:
        return rounds
    add_text = RoundText(call.tokenizer, run.rows)
    return (add_text(round_) for round_ in rounds)


def speculate(
    drafter: DrafterChoice = AUTO,
    *,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    on_round: Callable[[Round], None] | None = None,
    streamer: Any = None,
) -> Speculation:
    """Choose drafter, rule and draft size for `model.generate(..., custom_generate=mmdec.speculate("lookup"))`.

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


@final
@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate`, `stream` or a task. Its options are checked once; then it prepares prompts."""

    target: HfTarget
    speculation: Speculation  # the drafter, rule and draft size
    caller_options: Mapping[str, Any]  # the caller's options of `model.generate`
    prepared_options: Mapping[str, Any]  # those that `model.generate` gets
    tokenizer: Any  # of the options; None: there is none
    heals: bool  # whether prompts are prepared by `token_healing`

    @classmethod
    def from_options(cls, model: PreTrainedModel, speculation: Speculation, options: Mapping[str, Any]) -> GenerateCall:
        """Check a call as far as mmdec knows its options. What only transformers refuses shows in `prepare`.

        Args:
            model: A loaded model of transformers.
            speculation: The drafter, rule and draft size.
            options: Arguments of `model.generate`, and `dtype`.

        Raises:
            InputError: If an argument is wrong.
        """
        target = make_target(model)
        if not target.decodes_once:
            raise InputError(
                f"`model` must be a language model, but is {type(model).__name__}, whose `generate` may run the "
                "decoding loop several times. Call `model.generate(inputs, custom_generate=mmdec.speculate(drafter))`."
            )
        check_options(options)
        prepared_options = dict(options)
        check_same_dtype(prepared_options.pop("dtype", None), model.dtype)
        if speculation.options.samples is not None:
            prepared_options.setdefault("do_sample", speculation.options.samples)
        with _errors(model, options):
            strings, heals = tokenizer_options(prepared_options, model)
            tokenizer = prepared_options.pop("tokenizer", None)
            if strings is not None:
                ends = StopStringCriteria(tokenizer, strings)
                prepared_options["stopping_criteria"] = [*(prepared_options.get("stopping_criteria") or ()), ends]
        return cls(target, speculation, options, prepared_options, tokenizer, heals)

    def check_settings(self) -> None:
        """Raise InputError for what would be refused with every prompt: unknown options, wrong values, a wrong drafter.

        Preparing a prompt finds these, too. Before a list of prompts, they must not be taken for faults of one prompt.
        """
        model = self.target.model
        arguments = {*signature(model.generate).parameters, *ARGUMENTS_IN_KWARGS} - {"generation_config"}
        settings = {name: value for name, value in self.prepared_options.items() if name not in arguments}
        with _errors(model, self.caller_options):
            config, inputs = model._prepare_generation_config(settings.pop("generation_config", None), **settings)
            model._validate_model_kwargs(inputs)
            model._prepare_special_tokens(config, device=model.device)
            prompt = torch.ones((1, 1), dtype=torch.long, device=model.device)
            processors = model._get_logits_processor(config, 1, prompt, device=model.device)
            try_late_checks(model, prompt, processors)
        self.speculation.check_call(self.target, config)

    def prepare(self, inputs: Tensor | Mapping[str, Any], speculation: Speculation | None = None) -> DecodingRun:
        """Let transformers prepare a prompt. The model is not run yet.

        Args:
            inputs: Token ids (B, P), or a tokenizer's or processor's output.
            speculation: The drafter, rule and draft size for this prompt; None: those of the call.

        Raises:
            InputError: If the prompt is wrong, or an option that only transformers knows.
        """
        model = self.target.model
        named = prompt_inputs(model, inputs)
        check_named_inputs(named, self.caller_options)
        # In error messages, name the options if there are any: model inputs are rarely the cause.
        with _errors(model, {*self.caller_options} - {"tokenizer"} or {*named} - {"input_ids"}):
            if self.heals:
                ids, mask = named["input_ids"], named.get("attention_mask")
                named["input_ids"] = heal_tokens(ids, mask, model, self.tokenizer)
            everything = {**self.prepared_options, **named}
            prepared, held_back = self.target.split_inputs(everything)
            ids, config, arguments = model.generate(**prepared, custom_generate=return_prepared)
        prepare_run = (speculation or self.speculation).prepare_run
        run = prepare_run(self.target, ids, config, held_back=held_back, **arguments)
        if held_back and run.needs_all_inputs:
            ids, config, arguments = model.generate(**everything, custom_generate=return_prepared)
            run = prepare_run(self.target, ids, config, **arguments)
        return run


def check_loaded_model(model: object) -> None:
    """Raise InputError unless the argument `model` is a loaded model of transformers."""
    remedy = "Load it first; of a PeftModel give `get_base_model()`."
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", remedy)


def _errors(model: PreTrainedModel, passed: Collection[str]) -> AbstractContextManager[None]:
    """Return a context manager that names these options in what transformers raises for them."""
    return options_errors(model, {*passed} - {"tokenizer"}, signature(generate).parameters)


@final
class RoundText:
    """Adds to each round of a decoding the text of its tokens.

    Args:
        tokenizer: Decodes the tokens.
        rows: Number of batch rows.
    """

    def __init__(self, tokenizer: Any, rows: int = 1) -> None:
        self._texts = [GrowingText(tokenizer) for _ in range(rows)]

    def __call__(self, round_: Round) -> Round:
        """Return the next round with its text."""
        added = zip(round_.rows, round_.tokens, round_.done, strict=True)
        return replace(round_, text=[self._texts[row].add(tokens, done) for row, tokens, done in added])
