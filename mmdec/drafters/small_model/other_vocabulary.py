"""Drafts with a small model that has another vocabulary: text is converted between both tokenizers.

In each round the target's text is decoded, and encoded with the small model's tokenizer. The small model continues the
text greedily. The end of the target's text and the continuation are then encoded with the target's tokenizer. If one
token would span the end of the text and the continuation, the draft cannot follow the text's tokens and is dropped.

Source: universal assisted decoding (transformers, `AssistedCandidateGeneratorDifferentTokenizers`), here in batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from mmdec.core.growing_text import REPLACEMENT_CHARACTER
from mmdec.core.tree import chain_drafts
from mmdec.drafters.fit import check_drafter_device
from mmdec.drafters.small_model.drafter import keep_columns
from mmdec.drafters.without_weights import masked_rows
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

REENCODED_TOKENS = 10  # number of last target tokens that are encoded again with a draft, because tokens may merge
# number of last tokens that the small model does not cache, because more text may change their encoding
UNCACHED_TOKENS = 4
MAX_LENGTH_SHIFT = 3  # the re-encoded end of the text may have at most this many tokens more or fewer than before
MAX_RESTARTS = 8  # maximum times per `generate` call that the small model re-reads the text after cached tokens changed
MAX_LENGTH_RATIO = 4.0  # the small model drafts at most this many tokens for each token that the target needs


@dataclass
class OtherVocabularyState:
    """The drafter's state of one `generate` call: the target's texts, and the small model's cache."""

    texts: list[list[int]]  # each batch row's tokens of the target, without padding and image placeholders
    cached: list[list[int]] = field(default_factory=lambda: [])  # each batch row's tokens in the small model's cache
    session: Any = None  # the small model's decoding state with its cache; None before the first draft
    restarts: int = 0  # how often the small model has re-read the whole text


@final
class OtherVocabularyDrafter:
    """A drafter that uses a small model with another tokenizer.

    It drafts chains, and reads text only, without special tokens. It holds both tokenizers and the small model.

    Args:
        model: The small model, as a `Target`.
        tokenizer: The small model's tokenizer, of transformers.
        target_tokenizer: The target's tokenizer, of transformers.
        positions: Maximum number of tokens that the small model can read; None: unlimited.
        size: The target's vocabulary size.

    Raises:
        InputError: If the tokenizer does not belong to the small model.
    """

    def __init__(
        self, model: Target, tokenizer: Any, target_tokenizer: Any, positions: int | None = None, size: int = 2**31
    ) -> None:
        if len(tokenizer) > model.vocab_size:
            raise InputError(
                f"`drafter` must have a tokenizer of at most {model.vocab_size} tokens, but its tokenizer has "
                f"{len(tokenizer)}. Load both from one folder."
            )
        self._model, self._positions, self._size = model, positions, size
        self._tokenizer, self._target_tokenizer = tokenizer, target_tokenizer
        self._special, self._target_special = set(tokenizer.all_special_ids), set(target_tokenizer.all_special_ids)
        self.needs = Needs(may_stop_early=True, has_other_vocabulary=True)

    @property
    def name(self) -> str:
        return f"other-vocabulary({self._model.name})"

    def check(self, target: Target) -> None:
        """Raise InputError if the two models are on different devices."""
        check_drafter_device(target, self._model.device)

    def start(self, context: Context) -> OtherVocabularyState:
        """Return the state of each batch row: its prompt without padding and image placeholders."""
        return OtherVocabularyState(masked_rows(context.tokens, context.text_mask))

    def update(self, state: OtherVocabularyState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Append the new tokens of this round to the rows' texts."""
        for text, tokens in zip(state.texts, verdict.new_tokens, strict=True):
            text += tokens

    def select(self, state: OtherVocabularyState, live: Tensor) -> None:
        state.texts = [state.texts[row] for row in live.tolist()]
        if state.session is not None:
            self._model.select(state.session, live)
            state.cached = [state.cached[row] for row in live.tolist()]

    def propose(self, state: OtherVocabularyState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain of the likeliest tokens in each batch row.

        Draft none where the text ends in an incomplete UTF-8 character.
        """
        depth = min(plan.depth, plan.nodes)
        none: list[list[int]] = [[] for _ in state.texts]
        if depth < 1 or state.restarts > MAX_RESTARTS:
            return chain_drafts(roots, none)
        written = [self._decode(self._target_tokenizer, text) for text in state.texts]
        encoded = [self._tokenizer(text.rstrip(REPLACEMENT_CHARACTER))["input_ids"] for text in written]
        able = [
            len(ids) > 1 and not text.endswith(REPLACEMENT_CHARACTER)
            for text, ids in zip(written, encoded, strict=True)
        ]
        # The small model's pass needs two tokens at least: all but the last go to the cache, and the last one is
        # continued.
        read = [ids if len(ids) > 1 else [0, 0] for ids in encoded]
        steps = max(
            math.ceil(depth * min(len(ids) / max(len(text), 1), MAX_LENGTH_RATIO))
            for ids, text in zip(read, state.texts, strict=True)
        )
        if self._positions is not None:
            steps = min(steps, self._positions - max(map(len, read)))
        if steps < 1 or not any(able) or not self._follow(state, read):
            return chain_drafts(roots, none)
        threshold = plan.threshold if plan.is_chain else 0.0
        added = self._continue_texts(state, read, able, steps, threshold)
        drafted = [
            self._to_target_tokens(text, ids, new)[:depth] if new else []
            for text, ids, new in zip(state.texts, read, added, strict=True)
        ]
        return chain_drafts(roots, drafted)

    def _follow(self, state: OtherVocabularyState, read: list[list[int]]) -> bool:
        """Make the small model's cache hold the beginning of each batch row's text.

        If the cache holds other tokens, it is refilled.

        Args:
            read: Each row's text as the small model's tokens.

        Returns:
            False if the cache was refilled more than `MAX_RESTARTS` times; then drafting ends.
        """
        rows = zip(state.cached, read, strict=True)
        if state.session is not None and all(len(past) < len(ids) and ids[: len(past)] == past for past, ids in rows):
            return True
        state.restarts += state.session is not None
        state.cached = [ids[: max(len(ids) - UNCACHED_TOKENS, 1)] for ids in read]
        width = max(map(len, state.cached))
        rows_ids = [[0] * (width - len(ids)) + ids for ids in state.cached]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in state.cached]
        device = self._model.device
        inputs = {
            "input_ids": torch.tensor(rows_ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }
        state.session = self._model.prefill(inputs, Needs()).session
        keep_columns(self._model, state.session, [[0] for _ in read])
        return state.restarts <= MAX_RESTARTS

    def _continue_texts(
        self, state: OtherVocabularyState, read: list[list[int]], able: list[bool], steps: int, threshold: float
    ) -> list[list[int]]:
        """Continue the rows' texts greedily with the small model.

        Args:
            read: Each row's text as the small model's tokens.
            able: Which rows to continue.
            steps: Maximum new tokens.
            threshold: Stop when the probability of the continuations, averaged over these rows, falls below this.

        Returns:
            Each row's new tokens.
        """
        added: list[list[int]] = [[] for _ in read]
        logprobs, going = [0.0] * len(read), list(able)
        for _ in range(steps):
            pending = [ids[len(past) :] + new for past, ids, new in zip(state.cached, read, added, strict=True)]
            firsts = torch.tensor([row[0] for row in pending], device=self._model.device)
            logits = self._model.score(state.session, chain_drafts(firsts, [row[1:] for row in pending])).logits
            last = torch.tensor([len(row) - 1 for row in pending], device=logits.device)
            ends = logits[torch.arange(len(last), device=logits.device), last].float()
            # remove the new tokens and the text's last `UNCACHED_TOKENS` tokens from the cache
            stable = [
                max(len(ids) - UNCACHED_TOKENS - len(past), 0) for past, ids in zip(state.cached, read, strict=True)
            ]
            keep_columns(self._model, state.session, [list(range(count)) for count in stable])
            state.cached = [
                ids[: len(past) + count] for past, ids, count in zip(state.cached, read, stable, strict=True)
            ]
            values, tokens = ends.log_softmax(-1).max(-1)
            for row, (value, token) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True)):
                logprobs[row] += value
                going[row] = going[row] and token not in self._special and token < len(self._tokenizer)
                if going[row]:
                    added[row].append(token)
            if not any(going):
                break
            if threshold and sum(math.exp(logprobs[row]) for row in range(len(read)) if able[row]) < threshold * sum(
                able
            ):
                break
        return added

    def _to_target_tokens(self, text: list[int], ids: list[int], new: list[int]) -> list[int]:
        """Return the target's tokens for a continuation; [] if a token would span the text's end.

        Args:
            text: The target's tokens so far.
            ids: The same text as the small model's tokens.
            new: The small model's tokens of the continuation.
        """
        before = self._decode(self._tokenizer, ids)
        after = self._decode(self._tokenizer, ids + new).rstrip(REPLACEMENT_CHARACTER)
        if not after.startswith(before) or len(after) == len(before):
            return []
        tail = text[-REENCODED_TOKENS:]
        starts = [index + 1 for index, token in enumerate(tail) if token in self._target_special]
        tail = tail[starts[-1] :] if starts else tail
        end = self._decode(self._target_tokenizer, tail)
        whole = self._target_tokenizer(end + after[len(before) :], add_special_tokens=False)["input_ids"]
        for count in sorted(
            range(len(tail) - MAX_LENGTH_SHIFT, len(tail) + MAX_LENGTH_SHIFT + 1),
            key=lambda count: abs(count - len(tail)),
        ):
            if 0 <= count < len(whole) and self._decode(self._target_tokenizer, whole[:count]) == end:
                new_tokens = whole[count:]
                return new_tokens[
                    : next((at for at, token in enumerate(new_tokens) if token >= self._size), len(new_tokens))
                ]
        return []

    @staticmethod
    def _decode(tokenizer: Any, ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
