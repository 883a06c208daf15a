"""`Speculation`: the decoding loop that replaces the loop of `model.generate`. It checks and prepares each call.

This file also has the decoding options (`DecodingOptions`), makes drafters from what callers give (a name, a folder, a
model or an object), and stores a drafter's state for the next turn of a chat, which uses the same cache.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, final
from weakref import WeakKeyDictionary

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
    did_you_mean,
    show,
)
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.budget import Nodes, make_budget
from mmdec.core.loop import decode_steps
from mmdec.core.sampling import KeyedSample, Sequences, most_probable, transformers_sample
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import DecodingSteps, Round, run_alone, watch
from mmdec.core.verify import LOSSY_RULES, MatchRule, ResidualRule, Rule, RuleName, SamplingState, TypicalRule
from mmdec.drafters.ctc.drafter import Ctc, CtcByLanguage
from mmdec.drafters.lookup import Lookup
from mmdec.drafters.other_vocabulary import OtherVocabulary
from mmdec.drafters.recycling import Recycling
from mmdec.drafters.registry import (
    AUTO,
    check_drafter,
    drafter_entry,
    drafter_names,
    is_dotted,
    loader_names,
    make_drafter,
)
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import auto_drafter, warn_once
from mmdec.generation.hf_bridge import (
    OutputRecorder,
    StockRun,
    check_config,
    fallback_reasons,
    pad_token,
    setting,
    stop_conditions,
)
from mmdec.generation.model_lock import reading
from mmdec.hub.find import drafter_by_name
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.load_small_model import small_drafter, small_target
from mmdec.targets.hf_target import HfTarget, Output
from mmdec.targets.quantization_check import siblings_change_logits
from mmdec.targets.registry import target_of
from mmdec.types import Context, Draft, Drafter, Plan, Scores, Verdict

RULES: tuple[RuleName, ...] = ("greedy", "sampled", "residual", "typical")
DrafterChoice = Drafter | PreTrainedModel | str | os.PathLike[str] | None
MIN_WARNING_ROUNDS = 20  # a call of at least this many rounds warns if its drafts brought nothing
# Drafters that find nothing in some texts, without any fault: they are noted after this many rounds with drafts.
SELECTIVE, SELECTIVE_ROUNDS = (Lookup, Recycling, Ctc, CtcByLanguage), 10
# accepted tokens a row and round below which a half-precision dtype on a CPU is named as the cause
LOW_ACCEPTANCE = 0.1
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
    rule: RuleName | None = None
    num_speculative_tokens: Nodes = None
    seed: int | None = None
    statistics: DecodingStatistics | None = None
    on_round: Callable[[Round], None] | None = None
    streamer: Any = None

    def __post_init__(self) -> None:
        """Raise InputError if an option is wrong. The drafter is not checked here, but by `Speculation`."""
        if self.rule is not None:
            given: Any = self.rule
            gone = isinstance(given, str) and given == "block"
            remedy = 'Use "residual".' if gone else "None follows `do_sample`."
            check_choice("rule", self.rule, RULES, remedy)
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
    def lossless(self) -> bool:
        """Whether the acceptance rule keeps the model's output or its distribution; False only for "typical"."""
        return self.rule not in LOSSY_RULES


@dataclass(frozen=True)
class PreparedRun:
    """A checked and prepared `generate` call. Iterating over `rounds` decodes; a scheduler runs `steps` instead."""

    text: Sequences  # the rows' prompts, new tokens and stopping criteria
    steps: DecodingSteps
    pad: int  # id of the token that pads shorter rows
    target: HfTarget
    inputs: Mapping[str, Any]  # the model's inputs by name
    results: OutputRecorder

    @property
    def rounds(self) -> Iterator[Round]:
        """The rounds, which are decoded while they are iterated."""
        return run_alone(self.steps)

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return len(self.text.tokens)

    @property
    def sequences(self) -> Tensor:
        """The prompts with their new tokens (B, L); complete once all rounds were iterated."""
        return self.text.padded_ids(self.pad)

    def output(self, config: GenerationConfig) -> Tensor | Output:
        """Return what `model.generate` returns: sequences (B, L), or an output object if `config` asks for one.

        Call it once all rounds were iterated.
        """
        sequences = self.sequences
        if not setting(config, "return_dict_in_generate"):
            return sequences
        lengths = [len(tokens) for tokens in self.text.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)


@final
class Speculation:
    """The custom decoding loop that `mmdec.speculate` returns, for `model.generate(custom_generate=...)`.

    It holds the options and the drafters that it has made. A drafter that depends on the target model (a folder with
    weights, a smaller model) is made once for each target, when the loop is first called with it.

    Raises:
        InputError: If `options.drafter` is not a drafter.
    """

    def __init__(self, options: DecodingOptions) -> None:
        self.options, choice = options, options.drafter
        self.networks = (choice,) if isinstance(choice, PreTrainedModel) else ()  # models that the drafter runs
        self._auto = isinstance(choice, str) and choice == AUTO
        entry = drafter_entry(choice) if isinstance(choice, str) else None
        # makes the drafter from the target model; None for other drafters
        self._of_model = None if entry is None else entry.of_model
        self._folder = _folder(choice) if isinstance(choice, (str, os.PathLike)) and not self._auto else None
        waits = self._folder is not None or self._auto or self._of_model is not None
        self._drafter = None if waits else _drafter(choice)
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Drafter]]
        self._loaded = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._warned = set[str]()  # the warnings so far

    def __reduce__(self) -> tuple[type[Speculation], tuple[DecodingOptions]]:
        """Copy and pickle only the options: a worker process makes drafters for its own model."""
        return Speculation, (self.options,)

    def with_seed(self, seed: int | None) -> Speculation:
        """Return the same loop, with the same drafters, for another seed."""
        if seed == self.options.seed:
            return self
        other = object.__new__(Speculation)
        other.__dict__ = {**vars(self), "options": replace(self.options, seed=seed)}
        return other

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """Return the drafter for a target model, on the model's device and in its dtype; None for plain decoding."""
        if self._folder is None and not self._auto and self._of_model is None and not self.networks:
            return self._drafter
        with self._lock:
            device, dtype, drafter = self._loaded.get(model, (None, None, None))
            if drafter is None or (device, dtype) != (model.device, model.dtype):
                drafter = small_drafter(self.networks[0], model) if self.networks else self._load(model)
                self._loaded[model] = model.device, model.dtype, drafter
            return drafter

    def _load(self, model: PreTrainedModel) -> Drafter:
        if self._of_model is not None:
            return self._of_model(model)
        return auto_drafter(model) if self._folder is None else load_drafter(self._folder, model, "drafter")

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> Tensor | Output:
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
            run = self.begin(target_of(model), model, input_ids, generation_config, **inputs)
            on_round, streamer = self.options.on_round, self.options.streamer
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for round_ in run.rounds:
                if on_round is not None:
                    on_round(round_)
                if streamer is not None:
                    for token in round_.tokens[0]:
                        streamer.put(torch.tensor([token]))
            if streamer is not None:
                streamer.end()
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
        """Check the arguments and prepare decoding.

        The model is not run yet.

        Args:
            target: The adapter of `model`.
            input_ids: (B, P) int64. The other arguments are those that transformers passes to a custom loop.

        Returns:
            A `PreparedRun`; a `StockRun` if only transformers' own loop gives the right result.

        Raises:
            InputError: If the model, the drafter, the rule or an option is not supported.
        """
        if self.options.streamer is not None and len(input_ids) > 1:
            raise InputError(f"`streamer` must serve one row, but the batch has {len(input_ids)}. Use `mmdec.stream`.")
        check_config(target, generation_config, synced_gpus)
        drafter = self.drafter_for(model)
        if drafter is not None:
            drafter.check(target)
        name, batch, options = self._rule_name(generation_config), len(input_ids), self.options
        if options.num_speculative_tokens == 0:
            drafter = None  # drafting is turned off: even telling the drafter about accepted tokens would waste time
        together = (drafter is not None or batch > 1) and siblings_change_logits(model, target)
        # in a batch, processors run row by row: they must read only their row and not count calls
        faults = fallback_reasons(logits_processor, stopping_criteria, batch) if batch > 1 else []
        faults += target.fallback_reasons(generation_config, {"input_ids": input_ids, **inputs})
        self._warn(faults)
        if faults or (together and batch > 1):
            drop_chat_state(inputs.get(CACHE_ARGUMENT))
            loop = (logits_processor, stopping_criteria, inputs, options.seed)
            return StockRun(model, input_ids, generation_config, *loop)
        if together:
            drafter = None
        inputs = {"input_ids": input_ids, **target.prepare_inputs(input_ids, generation_config, inputs)}
        results = OutputRecorder(target, input_ids, logits_processor, generation_config)
        criteria = stop_conditions(stopping_criteria, generation_config, batch)
        text = Sequences(input_ids, criteria, results.processors, results.steps)
        rule = self._rule(name, generation_config, batch)
        statistics = default_statistics() if options.statistics is None else options.statistics
        budget, shape = make_budget(statistics, target, drafter, options.num_speculative_tokens)
        keeps = target.keeps_cache(inputs, generation_config)
        cache = inputs.get(CACHE_ARGUMENT) if keeps and len(input_ids) == 1 else None
        if cache is not None and drafter is not None and drafter.needs.keeps_state_between_turns:
            drafter = ConversationTurn(drafter, target.name, cache)
        else:
            drop_chat_state(cache)
        steps = decode_steps(target, inputs, text, rule, drafter, budget, shape)
        if drafter is not None:
            draft_counts = DraftCounts()
            steps = watch(steps, draft_counts.add, partial(_warn_of_useless_drafts, draft_counts, drafter, model))
        pad = pad_token(generation_config)
        if keeps:
            steps = watch(steps, partial(_extend_cache, target, inputs, text, pad))
        return PreparedRun(text, steps, pad, target, inputs, results)

    def _warn(self, faults: list[str]) -> None:
        """Warn about each of `faults`, the reasons why decoding is without drafts, once for this object."""
        for fault in faults:
            if fault not in self._warned:
                self._warned.add(fault)
                warnings.warn(
                    f"{fault}: transformers' own loop decodes, without drafts; the text is `generate`'s own",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _rule_name(self, config: GenerationConfig) -> RuleName:
        sampled = bool(setting(config, "do_sample"))
        name: RuleName = self.options.rule or ("sampled" if sampled else "greedy")
        if name != "typical" and sampled != (name != "greedy"):
            raise InputError(
                f"`rule` must fit `do_sample`, but is {name!r} with do_sample={sampled}. Leave `rule` out to follow it."
            )
        return name

    def _rule(self, name: RuleName, config: GenerationConfig, batch: int) -> Rule:
        sampled, seed = bool(setting(config, "do_sample")), self.options.seed
        if sampled and seed is None and (batch > 1 or name == "residual"):
            # The seed is drawn from torch's global generator. So `torch.manual_seed` makes the output repeatable.
            seed = int(torch.randint(2**62, ()))
        if name == "residual":
            return ResidualRule(SamplingState(cast(int, seed), float(setting(config, "temperature") or 1.0)))
        choice = most_probable
        if sampled:
            choice = transformers_sample if seed is None else KeyedSample(seed)
        return TypicalRule(choice) if name == "typical" else MatchRule(choice, name)


@dataclass
class DraftCounts:
    """Counts what the drafts of one call brought."""

    rounds: int = 0  # rounds after the pass over the prompt
    rounds_with_drafts: int = 0
    rows: int = 0  # rows of all these rounds
    drafted: int = 0
    accepted: int = 0

    def add(self, round_: Round) -> None:
        if round_.index:
            self.rounds += 1
            self.rounds_with_drafts += any(round_.drafted)
            self.rows += len(round_.rows)
            self.drafted += sum(round_.drafted)
            self.accepted += sum(round_.accepted)


def _warn_of_useless_drafts(counts: DraftCounts, drafter: Drafter, model: PreTrainedModel) -> None:
    """Warn about drafts that brought nothing, once for each model and reason."""
    count, with_drafts, drafted, accepted = counts.rounds, counts.rounds_with_drafts, counts.drafted, counts.accepted
    halved = model.device.type == "cpu" and model.dtype in (torch.float16, torch.bfloat16)
    if count < MIN_WARNING_ROUNDS or accepted > (LOW_ACCEPTANCE * counts.rows if halved else 0):
        return
    if isinstance(drafter, SELECTIVE) and with_drafts < SELECTIVE_ROUNDS and not halved:
        return
    dtype = str(model.dtype).removeprefix("torch.")
    if halved:
        reason = (
            f"in {dtype} most CPUs take as long for a pass over several tokens as for as many passes over one, so that "
            'drafts cannot pay: load the model with dtype="float32"'
        )
    elif not drafted:
        reason = "it proposed nothing: the text may hold nothing that it can continue"
    elif isinstance(drafter, OtherVocabulary):
        reason = "it has another vocabulary, and its text, in the model's tokens, was never the model's own"
    else:
        reason = "it may have been made for another model, or for other texts"
    message = f"drafter '{drafter.name}' brought {accepted} tokens in {count} rounds, of {drafted} drafted: {reason}"
    warn_once(model, message, f"{drafter.name}: {reason}", stacklevel=3)


def _extend_cache(target: HfTarget, inputs: Mapping[str, Any], text: Sequences, pad: int, round_: Round) -> None:
    """Fill the caller's key-value cache as `model.generate` would, if `round_` was the last one."""
    if not text.live:
        target.extend(inputs, text.padded_ids(pad))


def _folder(choice: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a drafter with weights.

    Args:
        choice: The drafter as the caller gave it: a path, a hub id or "<model>/<drafter>". For a registered name or a
            dotted path, the result is None.

    Raises:
        InputError: For any other text.
    """
    if isinstance(choice, str) and (drafter_entry(choice) is not None or is_dotted(choice)):
        return None
    folder = drafter_by_name(choice, "drafter")
    if folder is not None:
        return folder
    try:
        path = Path(choice)
        if path.is_dir():
            return path
    except (TypeError, ValueError, OSError):  # raised for bytes, a null character, or a name that is too long
        pass
    raise InputError(
        f"`drafter` must be one of {', '.join(drafter_names())}, a drafter's folder or hub id, a dotted path such "
        f"as package.module:Class, a model or a Drafter, but is {show(choice)}. Choose one."
        f"{did_you_mean(choice, [*drafter_names(), *loader_names()])} Names of drafters with weights: "
        f"{', '.join(loader_names())}."
    )


def _drafter(choice: DrafterChoice) -> Drafter | None:
    if choice is None:
        return None
    if isinstance(choice, PreTrainedModel):
        small_target(choice)  # raises InputError if mmdec cannot use this model; the drafter is made later
        return None
    drafter = make_drafter(choice) if isinstance(choice, str) else choice
    check_drafter(drafter)
    return drafter  # type: ignore[return-value] # `check_drafter` has checked its type


# cache object of a chat -> (target's name, drafter's name, drafter's state after the last turn). The state is not an
# attribute of the cache object, because a copy of the cache would copy it, too.
_chat_states: WeakKeyDictionary[Any, tuple[str, str, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def drop_chat_state(cache: Any) -> None:
    """Drop the drafter's state that is stored for a chat's cache.

    Called if the state does not cover all of the cache's text.
    """
    if cache is not None:
        with _lock:
            _chat_states.pop(cache, None)


@final
class ConversationTurn(ForwardingDrafter):
    """Wraps a drafter for one turn of a chat, which begins with the drafter's state of the previous turn.

    The new state is stored for the next turn. A drafter that reads hidden states needs those of every token in the
    target's cache. A new turn computes only the hidden states of its new tokens; the drafter's old state has the
    others. The state is stored under the cache object and dropped with it. The state is not used for a copy of the
    cache, or after another model or drafter has written to the cache. The drafter itself checks that the state has as
    many tokens as the cache. The output is the same with and without the state.

    Args:
        drafter: The drafter to wrap.
        target: The name of the target model's weights.
        cache: The caller's cache, with one batch row, which is filled while decoding.
    """

    def __init__(self, drafter: Drafter, target: str, cache: Any) -> None:
        super().__init__(drafter)
        self._target, self._cache = target, cache

    def start(self, context: Context) -> Any:
        """Start the drafter with its state of the previous turn, if there is one; store and return the new state."""
        with _lock:
            stored = _chat_states.pop(self._cache, None)  # `pop`, so that two calls never share it
        if stored is not None and stored[:2] == (self._target, self.name):
            context = replace(context, previous_state=stored[2])
        state = super().start(context)
        with _lock:
            _chat_states[self._cache] = self._target, self.name, state
        return state

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        with self._forget_on_error():
            return super().propose(state, roots, plan)

    def update(self, state: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        with self._forget_on_error():
            super().update(state, draft, scores, verdict)

    def select(self, state: Any, live: Tensor) -> None:
        with self._forget_on_error():
            super().select(state, live)

    @contextmanager
    def _forget_on_error(self) -> Generator[None]:
        """Context manager: if its block raises, drop the drafter's stored state, because it may be incomplete."""
        try:
            yield
        except Exception:
            drop_chat_state(self._cache)
            raise
