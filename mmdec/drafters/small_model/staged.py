"""Drafts the small model's own chain, so that one of its passes gives several tokens.

The small model's greedy chain is itself greedy decoding, which can be drafted: by an inner drafter without weights, and
by the rest of the small model's last chain, if it continues unchanged after a token that the target replaced.
The chain is the same as without an inner drafter, only its number of passes differs.

References:
    Staged speculative decoding (Spector & Re 2023, section 3.2); SpecASR (Wei et al. 2025), draft recycling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from mmdec.checks.arguments import check_methods, did_you_mean, format_value
from mmdec.core.tree import chain_drafts, int_rows
from mmdec.drafters.registry import DRAFTER_METHODS, check_drafter, drafter_names, make_drafter
from mmdec.drafters.text_cursor import TextCursor
from mmdec.errors import InputError
from mmdec.types import Context, Drafter, Plan, Scores, Target, Verdict

# A token of the inner drafter is a column of the small model's pass. If its probability is lower than this, the column
# costs more than it saves.
MIN_INNER_PROBABILITY = 0.3


class InnerDrafter(Drafter, Protocol):
    """A drafter that can draft the small model's chain: it can take tokens back that the target rejects.

    It is given one row at a time. All tensors are on the CPU but the logits, which are on the small model's device.
    """

    def rewrite(self, state: Any, removed: Sequence[int], added: Sequence[Sequence[int]]) -> None:
        """Change the end of each row's text.

        Args:
            state: What `start` returned.
            removed: Number of tokens to remove from the end of each row's text.
            added: The tokens to append to each row's text after that.
        """
        ...


def inner_drafter(inner: object) -> InnerDrafter:
    """Resolve the argument `inner` to an inner drafter.

    Args:
        inner: "lookup", "recycling", the name of a registered drafter without weights, or a drafter.

    Raises:
        InputError: If there is none of this name, or if it cannot take tokens back.
    """
    names = ", ".join(drafter_names())
    if isinstance(inner, str):
        if inner not in drafter_names():
            raise InputError(
                f"`inner` must be a drafter without weights, one of {names}, but is {format_value(inner)}."
                f"{did_you_mean(inner, drafter_names())}"
            )
        inner = make_drafter(inner)
    remedy = "Use lookup or recycling."
    check_methods("inner", inner, (*DRAFTER_METHODS, "rewrite"), remedy)
    try:
        check_drafter(inner)
    except InputError as error:
        raise error.with_names({"drafter": "inner"}) from error
    return cast(InnerDrafter, inner)


@final
class StagedRow:
    """One batch row's chain while the small model writes it, and what drafts it.

    Args:
        drafter: Drafts the chain's next tokens.
        state: What `drafter.start` returned for the row.
        model: The small model.
    """

    def __init__(self, drafter: InnerDrafter, state: Any, model: Target) -> None:
        self.chain: list[int] = []  # the small model's greedy tokens after the accepted text
        self._drafter, self._state, self._model = drafter, state, model
        self._last_chain = TextCursor(())  # the part of the last round's chain that the target did not accept

    def guess(self, root: int, length: int) -> list[int]:
        """Guess at most `length` tokens that the small model will append to the chain.

        Args:
            root: The last accepted token.
        """
        if length < 1:
            return []
        tokens = self._last_chain.rest(length) if self._last_chain.is_match else []
        if not tokens:
            roots = torch.tensor([self.chain[-1] if self.chain else root])
            plan = Plan(length, length, threshold=MIN_INNER_PROBABILITY)
            draft = self._drafter.propose(self._state, roots, plan)
            size = int(draft.size[0])
            is_chain = int_rows(draft.parents)[0][:size] == list(range(-1, size - 1))
            tokens = int_rows(draft.tokens)[0][1:size] if is_chain else []
        unknown = (at for at, token in enumerate(tokens) if token >= self._model.vocab_size)
        return tokens[: next(unknown, length)]

    def extend(self, root: int, guess: Sequence[int], greedy: Sequence[int], logits: Tensor) -> int:
        """Append what the small model wrote: the part of the guess that it would have written, and one more token.

        Args:
            root: The last accepted token.
            guess: What `guess` returned.
            greedy: The small model's likeliest token after the chain so far, and after each token of the guess.
            logits: (1 + number of guessed tokens, V), the small model's there.

        Returns:
            Number of tokens appended.
        """
        right = 0
        while right < len(guess) and guess[right] == greedy[right]:
            right += 1
        tokens = list(greedy[: right + 1])
        table = torch.tensor([tokens])
        verdict = Verdict(
            torch.arange(right + 1)[None],
            table[:, -1],
            torch.zeros(1, dtype=torch.bool),
            table,
            torch.tensor([len(tokens)]),
        )
        last = torch.tensor([self.chain[-1] if self.chain else root])
        self._drafter.update(self._state, chain_drafts(last, [guess]), Scores(logits[None]), verdict)
        for token in tokens:
            self._last_chain.add(token)
        self.chain += tokens
        return len(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Add the tokens that the target wrote in this round, and keep the rest of the chain for the next one."""
        common, chain = 0, self.chain
        while common < min(len(chain), len(tokens)) and chain[common] == tokens[common]:
            common += 1
        self._drafter.rewrite(self._state, [len(chain) - common], [tokens[common:]])
        if chain:
            self._last_chain = TextCursor(chain[common:])
            tokens = tokens[common:]
        for token in tokens:
            self._last_chain.add(token)
        self.chain = []


def start_rows(drafter: InnerDrafter, context: Context, model: Target) -> list[StagedRow]:
    """Return the batch rows of a `generate` call, with the prompt's text.

    Args:
        context: The target's; placeholders of images and sound are left out.
        model: The small model.
    """
    rows: list[StagedRow] = []
    for index, mask in enumerate(context.text_mask):
        source = None if context.source is None else [context.source[index]]
        row_context = replace(
            context,
            tokens=context.tokens[index : index + 1, mask].cpu(),
            mask=mask[mask][None].cpu(),
            source=source,
            media=None,
            encoder=None,
        )
        rows.append(StagedRow(drafter, drafter.start(row_context), model))
    return rows


def greedy_tokens(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Return the likeliest token after each node, and its log-probability.

    Args:
        logits: (B, N, V).
    """
    values, tokens = logits.float().max(-1)
    logprobs: Any = (values - logits.float().logsumexp(-1)).clamp(max=0.0)
    return int_rows(tokens), logprobs.tolist()
