"""Early exit: a copy of the target with fewer layers drafts. It shares the target's weights.

The copy has the first layers (LayerSkip), or skips some between the first and the last (SWIFT, Draft & Verify). Which
copy drafts is found while decoding: now and then one of them predicts the newest tokens of the text, in one pass. The
share that it predicts rightly, and its number of layers, give the speed that it would reach (DEL). First the early
exits are tried, then sets of skipped layers, each a change of the best so far. A copy's cache holds its own layers.

References:
    LayerSkip (Elhoushi et al. 2024, 2404.16710); SWIFT (Xia et al. 2024, 2410.06916); Draft & Verify (Zhang et al.
    2023, 2309.08168); DEL (2504.05598). SWIFT leaves out attention and MLP apart; here layers are left out whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.arguments import format_value
from mmdec.core.tree import chain_drafts, int_list, root_only
from mmdec.drafters.registry import built_in_drafter
from mmdec.drafters.small_model.drafter import SmallModelDrafter, SmallModelState, keep_columns
from mmdec.errors import InputError
from mmdec.targets.hf_target import model_name
from mmdec.targets.smaller import smaller_copy
from mmdec.targets.text import TextTarget, attention_name, text_scorer
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

Layers = tuple[int, ...]  # indices of the layers that a copy keeps
EXITS = (0.5, 0.25, 0.75)  # shares of the layers that the early exits keep, the one to begin with first
SKIPPED_SHARE = 0.45  # of the layers between the first and the last that the first searched set skips; SWIFT's
TRIAL_TOKENS = 32  # a copy is tried on so many of the newest tokens, after as many others
TRIAL_ROUNDS = 4  # rounds between two trials
MAX_TRIALS = 48  # trials for each model
GOOD_RATE = 0.95  # once the best copy predicts this share rightly, no further ones are tried
MAX_RATED_DEPTH = 6  # a copy's speed is that of the best chain of at most so many tokens

_drafters: WeakKeyDictionary[PreTrainedModel, EarlyExitDrafter] = WeakKeyDictionary()
_lock = Lock()


@dataclass
class EarlyExitState:
    """The drafter's state of one `generate` call."""

    context: Context
    live: list[int]  # for each row, its index in `context`
    new: list[list[int]]  # each row's new tokens
    layers: Layers  # of the copy that drafts
    copy: SmallModelDrafter
    inner: SmallModelState  # the copy's
    vocab_size: int = 0  # the target's
    rounds: int = 0  # since the last trial


@built_in_drafter("early_exit")
@final
class EarlyExitDrafter:
    """A drafter that is the target itself with fewer layers.

    It holds the copies, and which of them is the best; calls share both.

    Args:
        model: The target: a decoder-only language model.
        layers: The first so many layers, or the indices of layers. Default None: they are found while decoding.

    Raises:
        InputError: If layers cannot be left out of this model, or `layers` does not name some of them.
    """

    needs = Needs(may_stop_early=True)

    def __init__(self, model: PreTrainedModel, layers: int | Sequence[int] | None = None) -> None:
        self._model, self._lock, self._rng = ref(model), Lock(), random.Random(0)
        self._count: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self._rates: dict[Layers, float] = {}  # copies that were tried -> share of tokens that they predicted rightly
        if layers is None:
            sizes = [round(share * self._count) for share in EXITS]
            self._exits = [tuple(range(size)) for size in dict.fromkeys(sizes) if 0 < size < self._count]
            self._trials = MAX_TRIALS
        else:
            self._exits, self._trials = [self._checked(layers)], 0
        if not self._exits:
            raise InputError(
                "`drafter` must be another one than early_exit for this model, which has one layer. Use lookup."
            )
        self.layers = self._exits[0]  # those of the copy that is best so far
        # the newest copy: its layers, the attention implementation, its drafter
        self._made: tuple[Layers, str, SmallModelDrafter] | None = None
        self._best_copy()  # raises InputError if layers cannot be left out
        chosen = "" if layers is None else f"-{'.'.join(map(str, self.layers))}"
        self.name = f"early-exit{chosen}({model_name(model)})"

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> EarlyExitDrafter:
        """Return the drafter of a loaded model, which all calls share."""
        with _lock:
            if model not in _drafters:
                _drafters[model] = cls(model)
            return _drafters[model]

    def check(self, target: Target) -> None:
        """Raise InputError if the target is another model than the drafter's."""
        if getattr(target, "model", None) is not self._model():
            raise InputError(
                "`drafter` must be made of the model that it drafts for, but this early exit is another's. Make one "
                "with `EarlyExitDrafter.from_model(model)`."
            )

    def start(self, context: Context) -> EarlyExitState:
        """Run the best copy over the prompt."""
        rows, (layers, copy) = len(context.tokens), self._best_copy()
        return EarlyExitState(context, list(range(rows)), [[] for _ in range(rows)], layers, copy, copy.start(context))

    def propose(self, state: EarlyExitState, roots: Tensor, plan: Plan) -> Draft:
        """Draft with the best copy; before that, try another one if it is time."""
        if self._trials > 0 and state.rounds >= TRIAL_ROUNDS and len(state.new[0]) >= TRIAL_TOKENS // 2:
            state.rounds = 0
            self._try_one(state)
        if state.layers != self.layers:
            self._change(state)
        return state.copy.propose(state.inner, roots, plan)

    def update(self, state: EarlyExitState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Tell the copy what was accepted."""
        state.rounds += 1
        state.vocab_size = scores.logits.shape[-1]
        for row, tokens in zip(state.new, verdict.new_tokens, strict=True):
            row += tokens
        state.copy.update(state.inner, draft, scores, verdict)

    def select(self, state: EarlyExitState, live: Tensor) -> None:
        rows = int_list(live)
        state.live, state.new = [state.live[row] for row in rows], [state.new[row] for row in rows]
        state.copy.select(state.inner, live)

    def _checked(self, layers: Any) -> Layers:
        """Return the argument `layers` as indices."""
        given = range(layers) if type(layers) is int else layers
        indices = tuple(given) if isinstance(given, (range, list, tuple)) else ()
        is_number = all(type(index) is int and 0 <= index < self._count for index in indices)
        if not indices or not is_number or list(indices) != sorted({*indices}) or len(indices) == self._count:
            raise InputError(
                f"`layers` must be a number from 1 to {self._count - 1}, or ascending indices below {self._count}, but "
                f"is {format_value(layers)}. Leave it out to let mmdec find them."
            )
        return indices

    def _target(self, layers: Layers) -> TextTarget:
        model = self._model()
        assert model is not None
        return text_scorer(smaller_copy(model, layers))

    def _best_copy(self) -> tuple[Layers, SmallModelDrafter]:
        """Return the best copy. It is made again if the model's attention implementation has changed."""
        model: Any = self._model()
        attention = attention_name(model)
        with self._lock:
            layers = self.layers
            if self._made is None or self._made[:2] != (layers, attention):
                small = self._target(layers)
                copy = SmallModelDrafter(
                    small, positions=small.positions, nodes_take_positions=small.nodes_take_positions
                )
                self._made = layers, attention, copy
            return layers, self._made[2]

    def _change(self, state: EarlyExitState) -> None:
        """Go on with the copy that is now the best: it reads the prompt, then the new tokens."""
        state.layers, state.copy = self._best_copy()
        context = state.context
        state.inner = state.copy.start(context)
        device, width = context.tokens.device, max(map(len, state.new))
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in state.new], device=device)
        state.copy.select(state.inner, torch.tensor(state.live, device=device))
        lengths = torch.tensor(list(map(len, state.new)), device=device)
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        verdict = Verdict(
            torch.zeros_like(last)[:, None], last, torch.zeros_like(last, dtype=torch.bool), tokens, lengths
        )
        vocabulary = torch.empty(0, 0, state.vocab_size, device=device)
        state.copy.update(state.inner, root_only(last), Scores(vocabulary), verdict)

    def _try_one(self, state: EarlyExitState) -> None:
        """Try one more copy: what share of the newest tokens does it predict?"""
        with self._lock:
            untried = [layers for layers in self._exits if layers not in self._rates]
            layers = untried[0] if untried else self._changed_set()
            self._trials -= 1
        if layers is None or layers in self._rates:
            return
        context, row = state.context, state.live[0]
        text = [*int_list(context.tokens[row, context.text_mask[row]]), *state.new[0]][-2 * TRIAL_TOKENS :]
        target, ids = self._target(layers), torch.tensor([text], device=context.tokens.device)
        first = max(1, len(text) - TRIAL_TOKENS)
        session = target.prefill({"input_ids": ids[:, :first]}, Needs()).session
        keep_columns(target, session, [[0]])
        logits = target.score(session, chain_drafts(ids[:, first], [text[first + 1 :]])).logits
        rate = float((logits[0, :-1].argmax(-1) == ids[0, first + 1 :]).float().mean())
        with self._lock:
            self._rates[layers] = rate
            self.layers = max(self._rates, key=self._speed)
            if self._rates[self.layers] >= GOOD_RATE:
                self._trials = 0

    def _speed(self, layers: Layers) -> float:
        """Return the tokens in the time of one pass of the target, with the best length of a chain."""
        rate, cost = self._rates[layers], len(layers) / self._count
        lengths = range(1, MAX_RATED_DEPTH + 1)
        return max(sum(rate**step for step in range(length + 1)) / (1 + length * cost) for length in lengths)

    def _changed_set(self) -> Layers | None:
        """Return a changed set of layers to skip; None if there are no layers to skip.

        It is the best set so far, with one layer exchanged, added or left out. Only layers between the first and the
        last are skipped.
        """
        inner = range(1, self._count - 1)
        if not inner:
            self._trials = 0
            return None
        sets = [layers for layers in self._rates if layers[-1] == self._count - 1]
        if not sets:
            skipped = max(1, round(SKIPPED_SHARE * len(inner)))
            left_out = {inner[round((place + 0.5) * len(inner) / skipped - 0.5)] for place in range(skipped)}
            return tuple(layer for layer in range(self._count) if layer not in left_out)
        kept = {*max(sets, key=self._speed)}
        out, back = [layer for layer in inner if layer in kept], [layer for layer in inner if layer not in kept]
        change = self._rng.choice(("exchange", "exchange", "skip", "restore"))
        if change != "restore" and out:
            kept.remove(self._rng.choice(out))
        if change != "skip" and back:
            kept.add(self._rng.choice(back))
        return tuple(sorted(kept)) if len(kept) < self._count else None
