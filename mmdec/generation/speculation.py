"""`Speculation`: drafter, rule and draft size of calls of `model.generate`. It checks and prepares each call.

This file also has the decoding options, `DecodingOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mmdec.checks.arguments import (
    check_callable,
    check_choice,
    check_instance,
    check_methods,
    check_nodes,
    check_seed,
)
from mmdec.checks.caller import warn_user
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.budget import DraftSize, make_budget
from mmdec.core.loop import decode_steps
from mmdec.core.sampling import DraftWarp, KeyedSample, Sequences, most_probable, transformers_sample
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import run_steps, watch_rounds
from mmdec.core.verify import (
    RULES,
    Relaxation,
    Rule,
    RuleEntry,
    RuleName,
    SamplingState,
)
from mmdec.drafters.built_in import AUTO
from mmdec.errors import InputError
from mmdec.generation.chat_state import drop_chat_state, in_conversation
from mmdec.generation.decoding_run import DecodingRun, SpeculativeRun
from mmdec.generation.draft_warning import DraftCounts
from mmdec.generation.drafter_choice import DrafterChoice, resolve_drafter
from mmdec.generation.drafter_source import DrafterSource, DraftInput
from mmdec.generation.hf_bridge import (
    OutputRecorder,
    check_config,
    draft_warp,
    function_fallback_reasons,
    pad_token,
    setting,
    stop_conditions,
)
from mmdec.generation.model_lock import reading
from mmdec.generation.stock_run import StockRun
from mmdec.targets.hf_target import GenerateOutput, HfTarget
from mmdec.targets.quantization_check import siblings_change_logits
from mmdec.targets.registry import make_target
from mmdec.types import Drafter, Round

RULE_REMEDIES = {
    "block": 'Use "traversal".',  # an earlier rule, which traversal contains
    "relaxed": "Give a `mmdec.Relaxation`, which says how far.",
}
_statistics = DecodingStatistics()


def default_statistics() -> DecodingStatistics:
    """Return the `DecodingStatistics` of this process, which every call without `statistics=` uses."""
    return _statistics


@final
@dataclass(frozen=True)
class DecodingOptions:
    """The decoding options of `generate`, `stream`, `speculate` and other calls, checked.

    `mmdec.generate` explains each: drafter, acceptance rule, draft size, seed, statistics.
    """

    drafter: DrafterChoice = AUTO
    rule: RuleName | Relaxation | None = None
    num_speculative_tokens: DraftSize = None
    seed: int | None = None
    statistics: DecodingStatistics | None = None
    on_round: Callable[[Round], None] | None = None
    streamer: Any = None

    def __post_init__(self) -> None:
        """Raise InputError if an option is wrong. The drafter is not checked here, but by `Speculation`."""
        if self.rule is not None and self.relaxation is None:
            remedy = RULE_REMEDIES.get(str(self.rule), "None follows `do_sample`.")
            check_choice("rule", self.rule, tuple(RULES), remedy)
        nodes = check_nodes(self.num_speculative_tokens)
        check_callable("on_round", self.on_round, "a function of a round")
        if self.streamer is not None:
            check_methods("streamer", self.streamer, ("put", "end"), "Use transformers' TextStreamer.")
        if self.statistics is not None:
            remedy = "Leave it out for those of the process."
            check_instance("statistics", self.statistics, DecodingStatistics, "an mmdec.DecodingStatistics", remedy)
        object.__setattr__(self, "num_speculative_tokens", 0 if isinstance(nodes, tuple) and not nodes[0] else nodes)
        object.__setattr__(self, "seed", check_seed(self.seed))

    @property
    def relaxation(self) -> Relaxation | None:
        """What the rule "relaxed" accepts; None: it is another rule."""
        return self.rule if isinstance(self.rule, Relaxation) else None

    @property
    def rule_entry(self) -> RuleEntry | None:
        """How to make the rule; None: it follows `do_sample`."""
        if self.relaxation is not None:
            return self.relaxation.entry
        if self.rule is None:
            return None
        entry = RULES.get(str(self.rule))
        if entry is None:  # the options come from another process
            raise InputError(f"`rule` must be registered in this process, too, but {self.rule!r} is not. Register it.")
        return entry

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule keeps the model's output or its distribution: all do but the lossy ones."""
        return self.rule_entry is None or self.rule_entry.lossless

    @property
    def samples(self) -> bool | None:
        """Whether the rule demands sampling (True) or greedy decoding (False); None: it serves both."""
        return None if self.rule_entry is None else self.rule_entry.samples


@final
class Speculation:
    """The drafter, rule and draft size of calls; `model.generate(custom_generate=...)` calls it to decode.

    It holds the options and the drafters that it has made. A drafter that depends on the target model (a folder with
    weights, a smaller model) is made once for each target, at the first call with it.

    Args:
        options: The options.
        drafters: Gives the drafter for a target model; None: made from `options.drafter`.

    Raises:
        InputError: If `options.drafter` is not a drafter.
    """

    def __init__(self, options: DecodingOptions, drafters: DrafterSource | None = None) -> None:
        self.options = options
        self._drafters = resolve_drafter(options.drafter) if drafters is None else drafters
        self._warned = set[str]()  # the warnings so far, which copies share

    @property
    def networks(self) -> tuple[PreTrainedModel, ...]:
        """Models that the drafter runs, which are locked during a call."""
        return self._drafters.networks

    def __reduce__(self) -> tuple[type[Speculation], tuple[DecodingOptions]]:
        """Copy and pickle only the options: a worker process makes drafters for its own model."""
        return Speculation, (self.options,)

    def with_seed(self, seed: int | None) -> Speculation:
        """Return a copy with the same drafters for another seed, taken modulo 2^64."""
        seed = None if seed is None else seed % 2**64
        if seed == self.options.seed:
            return self
        return self._copy(replace(self.options, seed=seed), self._drafters)

    def with_drafter(self, drafter: Drafter, num_speculative_tokens: DraftSize = None) -> Speculation:
        """Return a copy with another drafter.

        Args:
            drafter: The drafter.
            num_speculative_tokens: The draft size; None: as before.
        """
        size = self.options.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        options = replace(self.options, drafter=drafter, num_speculative_tokens=size)
        return self._copy(options, resolve_drafter(drafter))

    def check_inputs(self, count: int, sound: bool = False) -> None:
        """Raise InputError if the drafter has no drafts for a call with `count` inputs, see `DrafterSource`."""
        self._drafters.check_inputs(count, sound)

    def for_inputs(self, inputs: Sequence[DraftInput]) -> Speculation:
        """Return a copy for these inputs of a call, which are decoded together."""
        drafters = self._drafters.for_inputs(inputs)
        if drafters is self._drafters:
            return self
        return self._copy(self.options, drafters)

    def _copy(self, options: DecodingOptions, drafters: DrafterSource) -> Speculation:
        other = Speculation(options, drafters)
        other._warned = self._warned
        return other

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """Return the drafter for a target model, on the model's device and in its dtype; None for plain decoding."""
        return self._drafters.drafter_for(model)

    def checked_drafter(self, target: HfTarget) -> Drafter | None:
        """Return the drafter for the target's model; raise InputError if it does not fit."""
        drafter = self.drafter_for(target.model)
        if drafter is not None:
            drafter.check(target)
        return drafter

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Tensor | GenerateOutput:
        """Decode. transformers calls this with what `model.generate` has prepared.

        Args:
            model: The target.
            input_ids: (B, P) int64.
            generation_config: The model's configuration, changed by the call's options.
            inputs: Further inputs of the model, and other arguments of a custom loop.

        Returns:
            Sequences (B, L), or transformers' output object if the configuration asks for one.
        """
        with reading(model, *self.networks):
            run = self.prepare_run(make_target(model), input_ids, generation_config, **inputs)
            on_round, streamer = self.options.on_round, self.options.streamer
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for round_ in run_steps(run.steps):
                if on_round is not None:
                    on_round(round_)
                if streamer is not None:
                    for token in round_.tokens[0]:
                        streamer.put(torch.tensor([token]))
            if streamer is not None:
                streamer.end()
            return run.output(generation_config)

    def prepare_run(
        self,
        target: HfTarget,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        synced_gpus: bool | None = None,
        held_back: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> DecodingRun:
        """Check the arguments and prepare decoding. The model is not run yet.

        Args:
            target: The adapter of the model.
            input_ids: (B, P) int64. The other arguments are those that transformers passes to a custom loop.
            held_back: Inputs that go to `Target.prefill` directly, not through `model.generate`.

        Returns:
            The prepared call: a `StockRun` if only transformers' own loop gives the right result, else a
            `SpeculativeRun`.

        Raises:
            InputError: If the model, the drafter, the rule or an option is not supported.
        """
        model: PreTrainedModel = target.model
        batch, inputs = len(input_ids), {**inputs, **(held_back or {})}
        if self.options.streamer is not None and batch > 1:
            raise InputError(f"`streamer` must serve one row, but the batch has {batch}. Use `mmdec.stream`.")
        self.check_inputs(batch // (setting(generation_config, "num_return_sequences") or 1))
        drafter, rule_entry = self.check_call(target, generation_config, synced_gpus)
        if self.options.num_speculative_tokens == 0:
            drafter = None  # drafting is turned off: even telling the drafter about accepted tokens would waste time

        needs_single_tokens = (drafter is not None or batch > 1) and siblings_change_logits(model, target)
        reasons = list[str]()
        # In a batch, processors run row by row: they must read only their row and not count calls. Traversal
        # verification calls copies of them after drafted tokens; criteria only see the accepted text.
        if batch > 1 or (drafter is not None and rule_entry.reads_ahead):
            reasons = function_fallback_reasons(logits_processor, stopping_criteria if batch > 1 else (), batch)
        reasons += target.fallback_reasons(generation_config, {"input_ids": input_ids, **inputs})
        self._warn(reasons)
        if reasons or (needs_single_tokens and batch > 1):
            drop_chat_state(inputs.get(CACHE_ARGUMENT))
            seed = self.options.seed
            return StockRun(model, input_ids, generation_config, logits_processor, stopping_criteria, inputs, seed)
        if needs_single_tokens:
            drafter = None

        inputs = {"input_ids": input_ids, **target.prepare_inputs(input_ids, generation_config, inputs)}
        results = OutputRecorder(target, input_ids, logits_processor, generation_config)
        criteria = stop_conditions(stopping_criteria, generation_config, batch)
        sequences = Sequences(input_ids, criteria, results.processors, results.steps)
        rule = self._rule(rule_entry, generation_config, batch, draft_warp(logits_processor), input_ids.device)
        statistics = default_statistics() if self.options.statistics is None else self.options.statistics
        budget, shape = make_budget(statistics, target, drafter, self.options.num_speculative_tokens)
        pad, fill_cache = pad_token(generation_config), None
        if target.must_fill_cache(inputs, generation_config):
            fill_cache = partial(target.fill_cache, inputs)
            if batch == 1:
                drafter = in_conversation(drafter, target.name, inputs.get(CACHE_ARGUMENT))
        on_round = _round_observer(sequences, pad, None if drafter is None else DraftCounts(drafter, model), fill_cache)
        steps = watch_rounds(decode_steps(target, inputs, sequences, rule, drafter, budget, shape), on_round)
        return SpeculativeRun(steps, batch, sequences, pad, target, inputs, results)

    def check_call(
        self, target: HfTarget, config: GenerationConfig, synced_gpus: bool | None = None
    ) -> tuple[Drafter | None, RuleEntry]:
        """Check what holds for all prompts of a call.

        Args:
            target: The adapter of the model.
            config: The model's configuration, changed by the call's options.
            synced_gpus: The argument of `generate`.

        Returns:
            The drafter, and how to make the rule.

        Raises:
            InputError: If the drafter, the rule or an option is not supported.
        """
        check_config(target, config, synced_gpus)
        groups = None if self.options.relaxation is None else self.options.relaxation.groups
        if groups is not None and groups.vocab_size != target.vocab_size:
            raise InputError(
                f"`groups` must cover the model's {target.vocab_size} tokens, but cover {groups.vocab_size}. Make them "
                "for this model."
            )
        sampled = bool(setting(config, "do_sample"))
        if self.options.samples not in (None, sampled):
            name = "relaxed" if self.options.relaxation is not None else self.options.rule
            raise InputError(
                f"`rule` must fit `do_sample`, but is {name!r} with do_sample={sampled}. Leave `rule` out to follow it."
            )
        entry = self.options.rule_entry or RULES["sampled" if sampled else "greedy"]
        return self.checked_drafter(target), entry

    def _warn(self, reasons: list[str]) -> None:
        """Warn about each of `reasons`, why decoding is without drafts, once for this object."""
        for reason in reasons:
            if reason not in self._warned:
                self._warned.add(reason)
                warn_user(f"falling back to transformers' generate without drafts: {reason}", RuntimeWarning)

    def _rule(
        self, entry: RuleEntry, config: GenerationConfig, batch: int, warp: DraftWarp, device: torch.device
    ) -> Rule:
        if self.options.relaxation is not None:
            entry = self.options.relaxation.to(device).entry
        sampled, seed = bool(setting(config, "do_sample")), self.options.seed
        if sampled and seed is None and (batch > 1 or entry.draws_drafts):
            # The seed is drawn from torch's global generator. So `torch.manual_seed` makes the output repeatable.
            seed = int(torch.randint(2**62, ()))
        if entry.draws_drafts:
            return entry.make(SamplingState(cast(int, seed), warp))
        if not sampled:
            return entry.make(most_probable)
        return entry.make(transformers_sample if seed is None else KeyedSample(seed))


def _round_observer(
    sequences: Sequences, pad: int, counts: DraftCounts | None, fill_cache: Callable[[Tensor], None] | None
) -> Callable[[Round], None]:
    """Return a function to call with each round: it counts drafts, and at the end fills the caller's cache and warns.

    Args:
        pad: Id of the token that pads shorter rows.
        counts: None: there are no drafts.
        fill_cache: Fills the cache as of the finished sequences (B, L); None: the caller does not read it.
    """

    def on_round(round_: Round) -> None:
        if counts is not None:
            counts.add(round_)
        if sequences.live:
            return
        if fill_cache is not None:
            fill_cache(sequences.padded_ids(pad))
        if counts is not None:
            counts.warn()

    return on_round
