"""`Speculation`: checks and prepares one run of the decoding loop, which replaces the loop of `generate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

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
from mmdec.decode.budget import Nodes, learned
from mmdec.decode.loop import Round, decode
from mmdec.decode.sampling import KeyedSample, Sequences, most_probable, stock_sample
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import BlockRule, MatchRule, ResidualRule, Rule, RuleName, Stream, TypicalRule
from mmdec.generation.conversation import ConversationTurn, forget
from mmdec.generation.drafter_choice import DraftedBy, DrafterChoice
from mmdec.generation.hf_bridge import Results, check, pad_token, setting, stock_alone, stop
from mmdec.generation.model_lock import reading
from mmdec.generation.stock_loop import StockRun
from mmdec.targets.hf_target import HfTarget, Output
from mmdec.targets.registry import target_of
from mmdec.targets.siblings import siblings_matter
from mmdec.types import Drafter, InputError

RULES: tuple[RuleName, ...] = ("greedy", "sampled", "residual", "block", "typical")
_statistics = DecodingStatistics()


def default_statistics() -> DecodingStatistics:
    """The process-wide `DecodingStatistics`: used by every call without `statistics=`."""
    return _statistics


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and prepared. Iterating `rounds` executes it."""

    text: Sequences
    rounds: Iterator[Round]
    pad: int
    target: HfTarget
    inputs: Mapping[str, Any]
    results: Results
    turn: ConversationTurn | None  # the drafter, wrapped for this run

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.text.tokens)

    @property
    def sequences(self) -> Tensor:
        """Prompts and new tokens (B, L); complete once all rounds are done."""
        return self.text.padded(self.pad)

    def output(self, config: GenerationConfig) -> Tensor | Output:
        """What `generate` returns, once all rounds are done: sequences (B, L), or transformers' output object.

        config: decides between the two by `return_dict_in_generate`.
        """
        sequences = self.sequences
        if not setting(config, "return_dict_in_generate"):
            return sequences
        lengths = [len(tokens) for tokens in self.text.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)


class Speculation:
    """The custom loop that `mmdec.speculate` returns and `generate(custom_generate=...)` calls."""

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
        if rule is not None:
            check_choice("rule", rule, RULES, "None follows `do_sample`.")
        nodes = check_nodes(num_speculative_tokens)
        check_callable("on_round", on_round, "a function of a round")
        if streamer is not None:
            check_methods("streamer", streamer, ("put", "end"), "Use transformers' TextStreamer.")
        if statistics is not None:
            remedy = "Leave it out for those of the process."
            check_instance("statistics", statistics, DecodingStatistics, "an mmdec.DecodingStatistics", remedy)
        self.rule: RuleName | None = rule
        self.choice, self.seed = DrafterChoice(drafter), check_seed(seed)
        self.statistics = default_statistics() if statistics is None else statistics
        self.nodes: Nodes = 0 if isinstance(nodes, tuple) and not nodes[0] else nodes
        self.on_round, self.streamer = on_round, streamer
        self._told = set[str]()  # warnings already given

    @property
    def networks(self) -> tuple[PreTrainedModel, ...]:
        """The models that the drafter itself runs."""
        return self.choice.networks

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """Make or load the drafter for a target model. None means plain decoding."""
        return self.choice.for_model(model)

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Tensor | Output:
        """Decode. transformers calls this with what `generate` prepared.

        model: the target. input_ids: (B, P) int64. generation_config: the merged configuration. inputs: further model
            inputs.
        Returns: sequences (B, L), or transformers' output object if the configuration asks for one.
        """
        with reading(model, *self.networks):
            run = self.begin(target_of(model), model, input_ids, generation_config, **inputs)
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            for round_ in run.rounds:
                if self.on_round is not None:
                    self.on_round(round_)
                if self.streamer is not None:
                    for token in round_.tokens[0]:
                        self.streamer.put(torch.tensor([token]))
            if self.streamer is not None:
                self.streamer.end()
            return run.output(generation_config)

    def begin(
        self,
        target: HfTarget,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        synced_gpus: bool | None = None,
        **inputs: Any,
    ) -> PreparedRun | StockRun:
        """Check the arguments and prepare the run, without any pass of the model.

        target: the adapter of `model`. input_ids: (B, P) int64. Others: as transformers passes them to a custom loop.
        Returns: a `PreparedRun`, or a `StockRun` if transformers' own loop must decode.
        Raises: InputError if the model, the drafter, the rule or an option is not supported.
        """
        if self.streamer is not None and len(input_ids) > 1:
            raise InputError(f"`streamer` must serve one row, but the batch has {len(input_ids)}. Use `mmdec.stream`.")
        check(target, generation_config, synced_gpus)
        drafter = self.drafter_for(model)
        if drafter is not None:
            drafter.check(target)
        name, batch = self._rule_name(generation_config), len(input_ids)
        if self.nodes == 0:
            drafter = None  # plain decoding: the drafter's updates would be wasted
        together = (drafter is not None or batch > 1) and siblings_matter(model, target)
        # these call processors before it is known whether the node is accepted
        asked = batch > 1 or (drafter is not None and name == "block")
        faults = stock_alone(logits_processor, stopping_criteria, batch) if asked else []
        self._warn(faults)
        if faults or (together and batch > 1):
            forget(inputs.get("past_key_values"))
            return StockRun(model, input_ids, generation_config, logits_processor, stopping_criteria, inputs, self.seed)
        if together:
            drafter = None
        inputs = {"input_ids": input_ids, **target.prepare_inputs(input_ids, generation_config, inputs)}
        results = Results(target, input_ids, logits_processor, generation_config)
        criteria = stop(stopping_criteria, generation_config, batch)
        text = Sequences(input_ids, criteria, results.processors, results.steps)
        rule = self._rule(name, generation_config, batch)
        budget, shape = learned(self.statistics, target, drafter, self.nodes)
        keeps = target.keeps_cache(inputs, generation_config)
        cache = inputs.get("past_key_values") if keeps and len(input_ids) == 1 else None
        turn = None if drafter is None else ConversationTurn(drafter, target.name, cache)
        if turn is None:
            forget(cache)
        rounds = decode(target, inputs, text, rule, turn, budget, shape)
        pad = pad_token(generation_config)
        if keeps:
            rounds = _extending(rounds, target, inputs, text, pad)
        return PreparedRun(text, rounds, pad, target, inputs, results, turn)

    def _warn(self, faults: list[str]) -> None:
        """Warn about each fault once in the lifetime of this object."""
        for fault in faults:
            if fault not in self._told:
                self._told.add(fault)
                warnings.warn(
                    f"{fault}: transformers' own loop decodes, without drafts; the text is `generate`'s own",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _rule_name(self, config: GenerationConfig) -> RuleName:
        sampled = bool(setting(config, "do_sample"))
        name: RuleName = self.rule or ("sampled" if sampled else "greedy")
        if name != "typical" and sampled != (name != "greedy"):
            raise InputError(
                f"`rule` must fit `do_sample`, but is {name!r} with do_sample={sampled}. Leave `rule` out to follow it."
            )
        return name

    def _rule(self, name: RuleName, config: GenerationConfig, batch: int) -> Rule:
        sampled, seed = bool(setting(config, "do_sample")), self.seed
        if sampled and seed is None and (batch > 1 or name in ("residual", "block")):
            # torch's own generator, so that `torch.manual_seed` makes the run repeatable
            seed = int(torch.randint(2**62, ()))
        if name in ("residual", "block"):
            stream = Stream(cast(int, seed), float(setting(config, "temperature") or 1.0))
            return ResidualRule(stream) if name == "residual" else BlockRule(stream)
        choice = most_probable if not sampled else stock_sample if seed is None else KeyedSample(seed)
        return TypicalRule(choice) if name == "typical" else MatchRule(choice, name)


def _extending(
    rounds: Iterator[Round], target: HfTarget, inputs: Mapping[str, Any], text: Sequences, pad: int
) -> Iterator[Round]:
    """Yield the same rounds; at the last, extend the caller's cache to what `generate` would leave in it."""
    for round_ in rounds:
        if not text.live:
            target.extend(inputs, text.padded(pad))
        yield round_
