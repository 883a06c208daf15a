"""The calls for models of transformers: `generate`, `stream`, and `speculate` for `model.generate`.

transformers prepares everything (masks, caches, processors, stopping criteria) and hands over where its own loop would
begin, so that every option of `generate` keeps its meaning. What cannot work is refused before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria

from mmdec.checks.arguments import check_instance, check_methods, options_error
from mmdec.decode.budget import Nodes
from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.summary import counted, rounds_line, three_lines
from mmdec.decode.verify import LOSSY, RuleName
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.generation.model_lock import read_while, reading
from mmdec.generation.prompt import check_options, healed, option_names, prompt_inputs, tokenizer_options
from mmdec.generation.registration import register
from mmdec.generation.run import PreparedRun, Speculation
from mmdec.generation.stock_loop import StockRun
from mmdec.targets.hf_target import HfTarget
from mmdec.targets.registry import target_of
from mmdec.types import InputError

register()


@dataclass(frozen=True)
class Generation:
    """The result of `generate`."""

    sequences: Tensor  # (B, L) prompts and new tokens, shorter rows padded on the right
    rounds: list[Round]
    lossless: bool  # False for typical acceptance

    @property
    def tokens_per_round(self) -> float:
        """New tokens for each row and round, correction or bonus included; the prompt's pass is not counted."""
        later = self.rounds[1:]
        passes = sum(len(round_.rows) for round_ in later)
        return sum(len(tokens) for round_ in later for tokens in round_.tokens) / passes if passes else 1.0

    def __str__(self) -> str:
        """Three lines: how much, in how many rounds, in how many seconds."""
        rows, tokens = len(self.sequences), sum(len(tokens) for round_ in self.rounds for tokens in round_.tokens)
        seconds = {name: sum(getattr(round_, name) for round_ in self.rounds) for name in ("target", "drafter", "core")}
        what = f"{counted(rows, 'row')}, {counted(tokens, 'new token')}"
        return three_lines(what, rounds_line(len(self.rounds), self.tokens_per_round, self.lossless), seconds)


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

    inputs: token ids (B, P), or a tokenizer's output. drafter: a registered name ("lookup", "recycling"), a folder with
    a drafter's weights, its hub id, or "<model>/<drafter>" for one of a shipped model, a dotted path
    "package.module:Class", a smaller model with the same vocabulary, an object that follows `mmdec.types.Drafter`, or
    None. rule: None follows `do_sample`. "greedy" and
    "sampled" give plain decoding's own tokens (sampling at batch 1: those of `generate` under the same
    `torch.manual_seed`; in larger batches, or with a `seed`: those of the same call without a drafter). "residual" and
    "block" give the model's own distribution and are for drafts that are drawn, as a smaller model's. "typical" is
    LOSSY.
    num_speculative_tokens: nodes of a draft below the root, in a chain; (nodes, depth) is for a tree; None lets a
    budget choose by measured times and acceptance, 0 is plain decoding. statistics: holds these measurements from
    earlier runs and receives those of this one; None is `mmdec.default_statistics()`.
    options: whatever `generate` takes. A processor or criterion of the caller's own in a batch makes transformers' own
    loop decode, without drafts and with a warning, unless it says by `mmdec_row_wise = True` that what it does to a row
    depends on that row and its index alone.

    Raises InputError for what cannot work: beams, a cache that cannot roll back, a drafter of another vocabulary.
    """
    speculation = Speculation(drafter, rule, num_speculative_tokens, seed, statistics)
    with _reading(model, speculation):
        run = _begin(model, inputs, speculation, options)
        rounds = list(run.rounds)
    return Generation(run.sequences, rounds, rule not in LOSSY)


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

    Close the iterator, or drop it, to cancel: nothing runs between two rounds. From the first round to the end the
    iterator holds the model's read lock (`mmdec.model_lock`): the model cannot be changed until then.
    """
    if tokenizer is not None:
        check_methods("tokenizer", tokenizer, ("decode",), "Pass the model's tokenizer.")
        options = {"tokenizer": tokenizer, **options}
    speculation = Speculation(drafter, rule, num_speculative_tokens, seed, statistics)
    with _reading(model, speculation):
        run = _begin(model, inputs, speculation, options)
    rounds = read_while((model, *speculation.networks), run.rounds)
    return rounds if tokenizer is None else _with_text(rounds, tokenizer, run.rows)


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

    The object has no state of a run and can be used for many. `on_round` is called with every round; `streamer` gets
    every token. transformers passes neither its own `streamer` on to a custom loop, nor `assistant_model`, nor the
    tokenizer that `stop_strings` and `token_healing` need: give these here, as `drafter`, and to `mmdec.generate` (or
    pass a `StopStringCriteria`).
    """
    return Speculation(drafter, rule, num_speculative_tokens, seed, statistics, on_round, streamer)


@dataclass(frozen=True)
class _Beginning:
    """Takes what `generate` has prepared, and hands the run out instead of finishing it."""

    speculation: Speculation
    target: HfTarget
    held: Mapping[str, Any]  # goes past `generate`

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> PreparedRun | StockRun:
        return self.speculation.begin(self.target, model, input_ids, generation_config, **{**inputs, **self.held})


def _reading(model: object, speculation: Speculation) -> AbstractContextManager[object]:
    """Hold the model and the drafter's networks for reading; `_begin` refuses what is no model."""
    return reading(*((model, *speculation.networks) if isinstance(model, PreTrainedModel) else ()))


def _begin(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Any], speculation: Speculation, options: dict[str, Any]
) -> PreparedRun | StockRun:
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", "Load it first.")
    target = target_of(model)
    if not target.one_run:
        raise InputError(
            f"`model` must be a language model, but is {type(model).__name__}, whose `generate` may run the decoding "
            "loop several times. Call `model.generate(inputs, custom_generate=mmdec.speculate(drafter))`."
        )
    named = prompt_inputs(model, inputs)
    names = {*options} - {"tokenizer"} or {*named} - {"input_ids"}  # options first: inputs are seldom to blame
    check_options(options, named)
    options = dict(options)
    if speculation.rule is not None and speculation.rule != "typical":
        options.setdefault("do_sample", speculation.rule != "greedy")
    try:
        strings, heals = tokenizer_options(options, model)
        tokenizer = options.pop("tokenizer", None)
        if strings is not None:
            ends = StopStringCriteria(tokenizer, strings)
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), ends]
        if heals:
            named["input_ids"] = healed(named["input_ids"], named.get("attention_mask"), model, tokenizer)
        prepare: Any = model.generate  # torch types what it finds in a module as a tensor
        prepared, held_back = target.hold_back({**options, **named})
        run = prepare(**prepared, custom_generate=_Beginning(speculation, target, held_back))
        if held_back and isinstance(run, StockRun):  # whose loop takes all from `generate`
            run = prepare(**options, **named, custom_generate=_Beginning(speculation, target, {}))
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # nothing has run yet: what transformers prepares fails as it likes
        raise options_error(names, error, {*option_names(model), *signature(generate).parameters}) from error
    return cast(PreparedRun | StockRun, run)


def _with_text(rounds: Iterator[Round], tokenizer: Any, rows: int) -> Iterator[Round]:
    """Add text: what a round's tokens add to the text before; an unfinished character waits for its next token."""
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
