"""`Speculation`: checks and prepares one run of the decoding loop, which replaces the loop of `generate`.

It also handles the inputs of a run: the options (`DecodingOptions`), the caller's drafter in each accepted form, and a
drafter's memory of earlier turns over the same cache.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from mmdec.decode.budget import Nodes, learned
from mmdec.decode.guard import ForwardingDrafter
from mmdec.decode.loop import Round, decode
from mmdec.decode.sampling import KeyedSample, Sequences, most_probable, stock_sample
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import LOSSY, BlockRule, MatchRule, ResidualRule, Rule, RuleName, Stream, TypicalRule
from mmdec.drafters.registry import (
    AUTO,
    check_drafter,
    drafter_entry,
    drafter_names,
    import_dotted,
    is_dotted,
    loader_names,
    named_drafter,
)
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.generation.hf_bridge import Results, StockRun, check, pad_token, setting, stock_alone, stop
from mmdec.generation.model_lock import reading
from mmdec.hub.drafters import load_drafter
from mmdec.hub.find import drafter_by_name
from mmdec.hub.small_model import small_drafter, small_target
from mmdec.targets.hf_target import HfTarget, Output
from mmdec.targets.registry import target_of
from mmdec.targets.siblings import siblings_matter
from mmdec.types import CACHE, Context, Draft, Drafter, InputError, Plan, Scores, Verdict

RULES: tuple[RuleName, ...] = ("greedy", "sampled", "residual", "block", "typical")
DraftedBy = Drafter | PreTrainedModel | str | os.PathLike[str] | None
_statistics = DecodingStatistics()


def default_statistics() -> DecodingStatistics:
    """Return the process-wide `DecodingStatistics`: used by every call without `statistics=`."""
    return _statistics


@final
@dataclass(frozen=True)
class DecodingOptions:
    """The decoding options that all calls share, checked. `mmdec.generate` explains each."""

    drafter: DraftedBy = AUTO
    rule: RuleName | None = None
    num_speculative_tokens: Nodes = None
    seed: int | None = None
    statistics: DecodingStatistics | None = None
    on_round: Callable[[Round], None] | None = None
    streamer: Any = None

    def __post_init__(self) -> None:
        """Raises InputError if an option is wrong; `Speculation` checks the drafter."""
        if self.rule is not None:
            check_choice("rule", self.rule, RULES, "None follows `do_sample`.")
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
        """Return whether the rule preserves the model's own output or distribution."""
        return self.rule not in LOSSY


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and prepared. Iterating `rounds` executes it."""

    text: Sequences  # the rows' prompts, new tokens and stopping criteria
    rounds: Iterator[Round]
    pad: int  # id of the token that pads shorter rows
    target: HfTarget
    inputs: Mapping[str, Any]  # the model's inputs by name
    results: Results

    @property
    def rows(self) -> int:
        """Return the number of rows of the batch."""
        return len(self.text.tokens)

    @property
    def sequences(self) -> Tensor:
        """Return the prompts with their new tokens (B, L); complete once all rounds are done."""
        return self.text.padded(self.pad)

    def output(self, config: GenerationConfig) -> Tensor | Output:
        """Return what `generate` returns: sequences (B, L), or transformers' output object. Call it once all rounds are
        done. config: its `return_dict_in_generate` decides between the two."""
        sequences = self.sequences
        if not setting(config, "return_dict_in_generate"):
            return sequences
        lengths = [len(tokens) for tokens in self.text.tokens]
        return self.results.output(self.target, self.inputs, sequences, lengths, config)


@final
class Speculation:
    """The custom loop that `mmdec.speculate` returns and `generate(custom_generate=...)` calls.

    A drafter that needs the model (a folder with weights, a smaller model) is made when the model is known, once for
    each model.
    """

    def __init__(self, options: DecodingOptions) -> None:
        """Raises InputError if `options.drafter` is not a drafter."""
        self.options, choice = options, options.drafter
        self.networks = (choice,) if isinstance(choice, PreTrainedModel) else ()  # models that the drafter itself runs
        self._auto = isinstance(choice, str) and choice == AUTO
        entry = drafter_entry(choice) if isinstance(choice, str) else None
        # the dotted path of the class, if the drafter is made from the target model itself
        self._class = None if entry is None else entry.of_model
        self._folder = _folder(choice) if isinstance(choice, (str, os.PathLike)) and not self._auto else None
        waits = self._folder is not None or self._auto or self._class is not None
        self._drafter = None if waits else _drafter(choice)
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Drafter]]
        self._loaded = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._told = set[str]()  # warnings that were already given, so that each is given once

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """Return the drafter for a target model, with its device and precision; None: plain decoding."""
        if self._folder is None and not self._auto and self._class is None and not self.networks:
            return self._drafter
        with self._lock:
            device, dtype, drafter = self._loaded.get(model, (None, None, None))
            if drafter is None or (device, dtype) != (model.device, model.dtype):
                drafter = small_drafter(self.networks[0], model) if self.networks else self._load(model)
                self._loaded[model] = model.device, model.dtype, drafter
            return drafter

    def _load(self, model: PreTrainedModel) -> Drafter:
        if self._class is not None:
            made: Drafter = import_dotted(self._class).of(model)
            return made
        return auto_drafter(model) if self._folder is None else load_drafter(self._folder, model, "drafter")

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
        """Check the arguments and prepare the run, without any pass of the model.

        target: the adapter of `model`. input_ids: (B, P) int64. The other arguments: as transformers passes them to a
            custom loop.
        Returns: a `PreparedRun`, or a `StockRun` if transformers' own loop must decode.
        Raises: InputError if the model, the drafter, the rule or an option is not supported.
        """
        if self.options.streamer is not None and len(input_ids) > 1:
            raise InputError(f"`streamer` must serve one row, but the batch has {len(input_ids)}. Use `mmdec.stream`.")
        check(target, generation_config, synced_gpus)
        drafter = self.drafter_for(model)
        if drafter is not None:
            drafter.check(target)
        name, batch, options = self._rule_name(generation_config), len(input_ids), self.options
        if options.num_speculative_tokens == 0:
            drafter = None  # plain decoding: the drafter's updates would be wasted
        together = (drafter is not None or batch > 1) and siblings_matter(model, target)
        # a caller's processor may read other rows of a batch, and block verification runs it on rejected nodes, too
        asked = batch > 1 or (drafter is not None and name == "block")
        faults = stock_alone(logits_processor, stopping_criteria, batch) if asked else []
        faults += target.stock_alone(generation_config, {"input_ids": input_ids, **inputs})
        self._warn(faults)
        if faults or (together and batch > 1):
            forget(inputs.get(CACHE))
            loop = (logits_processor, stopping_criteria, inputs, options.seed)
            return StockRun(model, input_ids, generation_config, *loop)
        if together:
            drafter = None
        inputs = {"input_ids": input_ids, **target.prepare_inputs(input_ids, generation_config, inputs)}
        results = Results(target, input_ids, logits_processor, generation_config)
        criteria = stop(stopping_criteria, generation_config, batch)
        text = Sequences(input_ids, criteria, results.processors, results.steps)
        rule = self._rule(name, generation_config, batch)
        statistics = default_statistics() if options.statistics is None else options.statistics
        budget, shape = learned(statistics, target, drafter, options.num_speculative_tokens)
        keeps = target.keeps_cache(inputs, generation_config)
        cache = inputs.get(CACHE) if keeps and len(input_ids) == 1 else None
        if cache is not None and drafter is not None and drafter.needs.travels:
            drafter = ConversationTurn(drafter, target.name, cache)
        else:
            forget(cache)
        rounds = decode(target, inputs, text, rule, drafter, budget, shape)
        pad = pad_token(generation_config)
        if keeps:
            rounds = _extending(rounds, target, inputs, text, pad)
        return PreparedRun(text, rounds, pad, target, inputs, results)

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
        name: RuleName = self.options.rule or ("sampled" if sampled else "greedy")
        if name != "typical" and sampled != (name != "greedy"):
            raise InputError(
                f"`rule` must fit `do_sample`, but is {name!r} with do_sample={sampled}. Leave `rule` out to follow it."
            )
        return name

    def _rule(self, name: RuleName, config: GenerationConfig, batch: int) -> Rule:
        sampled, seed = bool(setting(config, "do_sample")), self.options.seed
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
    """Yield the same rounds; once all rows have ended, fill the caller's cache as `generate` would. pad: id of the pad
    token."""
    for round_ in rounds:
        if not text.live:
            target.extend(inputs, text.padded(pad))
        yield round_


def _folder(choice: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a drafter, given as a path, a hub id or "<model>/<drafter>"; None for a name or a dotted
    path.

    Raises: InputError for any other text.
    """
    if isinstance(choice, str) and (drafter_entry(choice) is not None or is_dotted(choice)):
        return None
    found = drafter_by_name(choice, "drafter")
    if found is not None:
        return found
    try:
        path = Path(choice)
        if path.is_dir():
            return path
    except (TypeError, ValueError, OSError):  # bytes, a null character, or too long a name
        pass
    raise InputError(
        f"`drafter` must be one of {', '.join(drafter_names())}, a drafter's folder or hub id, a dotted path such "
        f"as package.module:Class, a model or a Drafter, but is {show(choice)}. Choose one."
        f"{did_you_mean(choice, [*drafter_names(), *loader_names()])} Names of drafters with weights: "
        f"{', '.join(loader_names())}."
    )


def _drafter(choice: DraftedBy) -> Drafter | None:
    if choice is None:
        return None
    if isinstance(choice, PreTrainedModel):
        small_target(choice)  # refused before there is a target; `small_drafter` makes the drafter
        return None
    drafter = named_drafter(choice) if isinstance(choice, str) else choice
    check_drafter(drafter)
    return drafter  # type: ignore[return-value] # `check_drafter` has checked that it is a Drafter


# Cache -> names of target and drafter, and the drafter's memory at the end of a run. It is no attribute of the cache,
# because a copy of the caller's cache would copy it, too.
_memories: WeakKeyDictionary[Any, tuple[str, str, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def forget(cache: Any) -> None:
    """Drop the drafter's memory that is stored for a cache, because it lacks or will lack part of the cache's text."""
    if cache is not None:
        with _lock:
            _memories.pop(cache, None)


@final
class ConversationTurn(ForwardingDrafter):
    """A drafter for one run over a cache: starts with the memory of the previous turn, and stores its own.

    A drafter that reads hidden states needs a state for every column of the target's cache. A new turn computes only
    the states of new columns; those of old columns are in the memory of the previous run. The memory belongs to the
    cache object and is dropped with it. A copied or cropped cache, or one that another model or drafter has written to,
    starts without a memory; the drafter itself compares columns with `Context.past`. Tokens are the same either way.
    """

    def __init__(self, drafter: Drafter, target: str, cache: Any) -> None:
        """drafter: the drafter to wrap. target: the target model's name, as in `Target.name`. cache: the caller's cache
        for a batch of 1, which the run fills."""
        super().__init__(drafter)
        self._target, self._cache = target, cache

    def start(self, context: Context) -> Any:
        """Start the drafter with the previous turn's memory in its context."""
        with _lock:
            stored = _memories.pop(self._cache, None)  # `pop`: two runs must not share a memory
        if stored is not None and stored[:2] == (self._target, self.name):
            context = replace(context, carried=stored[2])
        memory = super().start(context)
        with _lock:
            _memories[self._cache] = self._target, self.name, memory
        return memory

    def propose(self, memory: Any, roots: Tensor, plan: Plan) -> Draft:
        with self._whole():
            return super().propose(memory, roots, plan)

    def update(self, memory: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        with self._whole():
            super().update(memory, draft, scores, verdict)

    def select(self, memory: Any, live: Tensor) -> None:
        with self._whole():
            super().select(memory, live)

    @contextmanager
    def _whole(self) -> Generator[None]:
        """Drop the memory if the call in the block fails, because it may be half written."""
        try:
            yield
        except Exception:
            forget(self._cache)
            raise
