"""The doors to the core for transformers' own models: `generate`, `stream`, and `speculate` for `model.generate`.

transformers prepares everything (masks, caches, processors, stopping criteria) and hands over where its own loop would
begin, so that every option of `generate` keeps its meaning. What cannot work is refused before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria

from mmdec.checks.arguments import check_callable, check_methods, check_nodes, check_seed, options_error, show
from mmdec.decode.budget import Nodes, learned
from mmdec.decode.loop import Round, decode
from mmdec.decode.sampling import KeyedSample, Text, most_probable, stock_sample
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import LOSSY, BlockRule, MatchRule, ResidualRule, Rule, RuleName, Stream, TypicalRule
from mmdec.generation.drafter_choice import DraftedBy, DrafterChoice
from mmdec.generation.hf_bridge import Results, check, pad_token, stop
from mmdec.generation.model_lock import read_while, reading
from mmdec.generation.prompt import check_options, prompt_inputs
from mmdec.targets.registry import HfTarget, Output, target_of
from mmdec.types import Drafter, InputError

RULES: tuple[RuleName, ...] = ("greedy", "sampled", "residual", "block", "typical")
_statistics = DecodingStatistics()


def default_statistics() -> DecodingStatistics:
    """What the runs of this process measured that were given no `statistics` of their own."""
    return _statistics


@dataclass(frozen=True)
class Generation:
    """What a run gave."""

    sequences: Tensor  # (B, L) prompts and new tokens, shorter rows padded on the right
    rounds: list[Round]
    lossless: bool  # False for typical acceptance

    @property
    def tokens_per_round(self) -> float:
        """New tokens for each row and round, correction or bonus included; the prompt's pass is not counted."""
        later = self.rounds[1:]
        passes = sum(len(one.rows) for one in later)
        return sum(len(tokens) for one in later for tokens in one.tokens) / passes if passes else 1.0


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DraftedBy = "lookup",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Generation:
    """`model.generate(**inputs, **options)` with drafts: the same output, in fewer passes of the model.

    inputs: token ids (B, P), or a tokenizer's output. drafter: a registered name ("lookup",
    "recycling"), a folder with a drafter's weights, a dotted path "package.module:Class", a smaller model with the same
    vocabulary, an object that follows `mmdec.types.Drafter`, or None. rule: None follows `do_sample`. "greedy" and
    "sampled" give plain decoding's own tokens (sampling at batch 1: those of `generate` under the same
    `torch.manual_seed`; in larger batches, or with a `seed`: those of the same call without a drafter). "residual" and
    "block" give the model's own law and are for drafts that are drawn, as a smaller model's. "typical" is LOSSY.
    num_speculative_tokens: nodes of a draft below the root, in a chain; (nodes, depth) is for a tree; None lets a
    budget learn what pays, 0 is plain decoding. statistics: what such learning begins with and adds to; None is
    `mmdec.default_statistics()`.
    options: whatever `generate` takes. Without an EOS token, rows that other criteria end are padded at once, where
    `generate` writes on in them until the last row has ended.

    Raises InputError for what cannot work: beams, a cache that cannot roll back, a drafter of another vocabulary.
    """
    speculation = Speculation(drafter, rule, num_speculative_tokens, seed, statistics)
    with _reading(model, speculation):
        begun = _begin(model, inputs, speculation, options)
        rounds = list(begun.rounds)
    return Generation(begun.text.padded(begun.pad), rounds, rule not in LOSSY)


def stream(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: DraftedBy = "lookup",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    tokenizer: Any = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Iterator[Round]:
    """The rounds of `generate` as they come: each row's new tokens, and with a tokenizer their text.

    Close the iterator, or drop it, to cancel: nothing runs between two rounds. From its first round to its end it reads
    the model, which nobody can change meanwhile.
    """
    if tokenizer is not None:
        check_methods("tokenizer", tokenizer, ("decode",), "Pass the model's tokenizer.")
        options = {"tokenizer": tokenizer, **options}
    speculation = Speculation(drafter, rule, num_speculative_tokens, seed, statistics)
    with _reading(model, speculation):
        begun = _begin(model, inputs, speculation, options)
    rounds = read_while((model, *speculation.networks), begun.rounds)
    return rounds if tokenizer is None else _spoken(rounds, tokenizer, len(begun.text.tokens))


def speculate(
    drafter: DraftedBy = "lookup",
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    streamer: Any = None,
    statistics: DecodingStatistics | None = None,
) -> Speculation:
    """For `model.generate(..., custom_generate=mmdec.speculate("lookup"))`; arguments as for `mmdec.generate`.

    The object holds no run and may serve many. `on_round` sees every round; `streamer` gets every token (transformers
    does not pass its own on to a custom loop, nor the tokenizer that `stop_strings` needs: give those to
    `mmdec.generate`, or pass a `StopStringCriteria`).
    """
    return Speculation(drafter, rule, num_speculative_tokens, seed, statistics, on_round, streamer)


@dataclass(frozen=True)
class _Begun:
    """A run that is ready to go."""

    text: Text
    rounds: Iterator[Round]
    pad: int
    target: HfTarget
    inputs: Mapping[str, Any]
    results: Results

    def output(self, config: GenerationConfig) -> Tensor | Output:
        """What `generate` returns, when all rounds are over: sequences (B, L), or transformers' output object."""
        sequences = self.text.padded(self.pad)
        if not config.return_dict_in_generate:
            return sequences
        lengths = [len(tokens) for tokens in self.text.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)


class Speculation:
    """What `generate(custom_generate=...)` calls in place of its own loop."""

    def __init__(
        self,
        drafter: DraftedBy,
        rule: RuleName | None,
        num_speculative_tokens: Nodes,
        seed: int | None,
        statistics: DecodingStatistics | None = None,
        on_round: Callable[[Round], None] | None = None,
        streamer: Any = None,
    ) -> None:
        if rule is not None and not (isinstance(rule, str) and rule in RULES):
            raise InputError(
                f"`rule` must be one of {', '.join(RULES)}, but is {show(rule)}. None follows `do_sample`."
            )
        nodes = check_nodes(num_speculative_tokens)
        check_callable("on_round", on_round, "a function of a round")
        if streamer is not None:
            check_methods("streamer", streamer, ("put", "end"), "Use transformers' TextStreamer.")
        self.rule: RuleName | None = rule
        if not isinstance(statistics, DecodingStatistics | None):
            raise InputError(
                f"`statistics` must be an mmdec.DecodingStatistics, but is {show(statistics)}. Leave it out for those "
                "of the process."
            )
        self.choice, self.seed = DrafterChoice(drafter), check_seed(seed)
        self.statistics = default_statistics() if statistics is None else statistics
        self.nodes: Nodes = 0 if isinstance(nodes, tuple) and not nodes[0] else nodes
        self.on_round, self.streamer = on_round, streamer

    @property
    def networks(self) -> tuple[PreTrainedModel, ...]:
        """The drafter's own models."""
        return self.choice.networks

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """The drafter of runs with this model; None for plain decoding."""
        return self.choice.for_model(model)

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Tensor | Output:
        """The sequences (B, L), or transformers' output object where the configuration asks for one."""
        with reading(model, *self.networks):
            begun = self.begin(model, input_ids, generation_config, **inputs)
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            for one in begun.rounds:
                if self.on_round is not None:
                    self.on_round(one)
                if self.streamer is not None:
                    for token in one.tokens[0]:
                        self.streamer.put(torch.tensor([token]))
            if self.streamer is not None:
                self.streamer.end()
            return begun.output(generation_config)

    def begin(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        synced_gpus: bool | None = None,
        **inputs: Any,
    ) -> _Begun:
        """Everything checked and put together, nothing run yet."""
        if self.streamer is not None and len(input_ids) > 1:
            raise InputError(f"`streamer` must serve one row, but the batch has {len(input_ids)}. Use `mmdec.stream`.")
        target = target_of(model)
        check(target, generation_config, synced_gpus)
        inputs = {"input_ids": input_ids, **target.prepare_inputs(input_ids, generation_config, inputs)}
        drafter = self.drafter_for(model)
        if drafter is not None:
            drafter.check(target)
        results = Results(target, input_ids, logits_processor, generation_config)
        text = Text(input_ids, stop(stopping_criteria, generation_config), results.processors)
        rule = self._rule(generation_config, len(input_ids))
        budget, shape = learned(self.statistics, target, drafter, self.nodes)
        if self.nodes == 0:
            drafter = None  # it would learn in vain
        rounds = decode(target, inputs, text, rule, drafter, budget, shape)
        pad = pad_token(generation_config)
        if target.keeps_cache(inputs, generation_config):
            rounds = _extending(rounds, target, inputs, text, pad)
        return _Begun(text, rounds, pad, target, inputs, results)

    def _rule(self, config: GenerationConfig, batch: int) -> Rule:
        sampled = bool(config.do_sample)
        name: RuleName = self.rule or ("sampled" if sampled else "greedy")
        if name != "typical" and sampled != (name != "greedy"):
            raise InputError(
                f"`rule` must fit `do_sample`, but is {name!r} with do_sample={sampled}. Leave `rule` out to follow it."
            )
        seed = self.seed
        if sampled and seed is None and (batch > 1 or name in ("residual", "block")):
            seed = int(torch.randint(2**62, ()))  # from torch's own generator: `torch.manual_seed` repeats the run
        if name in ("residual", "block"):
            stream = Stream(cast(int, seed), float(config.temperature or 1.0))
            return ResidualRule(stream) if name == "residual" else BlockRule(stream)
        choice = most_probable if not sampled else stock_sample if seed is None else KeyedSample(seed)
        return TypicalRule(choice) if name == "typical" else MatchRule(choice, name)


@dataclass(frozen=True)
class _Beginning:
    """Takes what `generate` has prepared, and hands the run out instead of finishing it."""

    speculation: Speculation

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> _Begun:
        return self.speculation.begin(model, input_ids, generation_config, **inputs)


def _reading(model: PreTrainedModel, speculation: Speculation) -> AbstractContextManager[object]:
    """Hold the model and the drafter's networks for reading; what is no model is for `_begin` to refuse."""
    return reading(*((model, *speculation.networks) if isinstance(model, PreTrainedModel) else ()))


def _begin(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: dict[str, Any]
) -> _Begun:
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"`model` must be a loaded model of transformers, but is {show(model)}. Load it with "
            "AutoModelForCausalLM.from_pretrained."
        )
    if not target_of(model).one_run:
        raise InputError(
            f"`model` must be a language model, but is {type(model).__name__}, whose `generate` may run the decoding "
            "loop several times. Call `model.generate(inputs, custom_generate=mmdec.speculate(drafter))`."
        )
    named = prompt_inputs(model, inputs)
    given = {*options, *named} - {"input_ids", "tokenizer"}
    check_options(options, named)
    options = dict(options)
    if speculation.rule is not None and speculation.rule != "typical":
        options.setdefault("do_sample", speculation.rule != "greedy")
    tokenizer, strings = options.pop("tokenizer", None), options.pop("stop_strings", None)
    if strings is not None and tokenizer is None:
        raise InputError("`tokenizer` must be given with `stop_strings`, but is None. Pass the model's tokenizer.")
    try:
        if strings is not None:
            options["stopping_criteria"] = [
                *(options.get("stopping_criteria") or ()),
                StopStringCriteria(tokenizer, strings),
            ]
        begun = model.generate(**named, **options, custom_generate=_Beginning(speculation))  # type: ignore[arg-type]
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # nothing has run yet: what transformers prepares fails as it likes
        raise options_error(given, error) from error
    return cast(_Begun, begun)


def _extending(
    rounds: Iterator[Round], target: HfTarget, inputs: Mapping[str, Any], text: Text, pad: int
) -> Iterator[Round]:
    """The same; after the last the caller's cache holds all that it would hold after `generate`."""
    for one in rounds:
        if not text.live:
            target.extend(inputs, text.padded(pad))
        yield one


def _spoken(rounds: Iterator[Round], tokenizer: Any, rows: int) -> Iterator[Round]:
    """Add text: what the tokens so far say beyond what was said; an unfinished character waits for its next token."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    said = [""] * rows
    for one in rounds:
        pieces = []
        for row, new, done in zip(one.rows, one.tokens, one.done, strict=True):
            tokens[row] += new
            whole: str = tokenizer.decode(tokens[row], skip_special_tokens=True)
            if whole.endswith("\ufffd") and not done:
                whole = said[row]
            pieces.append(whole[len(said[row]) :])
            said[row] = whole
        yield replace(one, text=pieces)
