"""Drafts from texts that resemble the answer: documents, code, transcripts, earlier answers.

The corpus is one array of token ids, and its places sorted by the tokens before them, read backwards. So a binary
search finds the longest end of the new text that the corpus holds, and the places of each shorter end lie around it.
What follows these places, and those of n-grams of the row's own text, is merged into one trie. A node's value is the
probability that the text goes through it, as in an n-gram model with backoff: the longest match gets the share in which
its continuations were right so far, the next shorter match its share of the rest.

References:
    REST (He et al. 2023, 2311.08252): retrieval of the longest suffix, and the trie of its continuations. Token Map
    Drafting (2507.21522): the same from transcripts of a domain, for Whisper. ANPD (2404.08698) and ADED (2407.12021):
    n-grams that are counted while decoding. REST's code judges a node once for each path through it, and draws a token
    at random where nothing is found; neither is done here.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from mmdec.checks.files import open_regular, quote_path, write_atomically
from mmdec.checks.weights import report_damage
from mmdec.core.tree import sort_depth_first, trees_from_lists
from mmdec.drafters.without_weights import PRIOR_TRIALS, HitRate, prompts_with_sources, worthwhile_prefix
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

INDEX_FORMAT = "mmdec-corpus-1"
MAX_INDEX_TOKENS = 2**24  # an index of so many tokens has 134 MB; its construction takes six times as much memory
END = -1  # the token that ends each text of a corpus
MAX_MATCH = 16  # at most this many of the newest tokens are searched for; a power of two
SHORT_MATCHES = (4, 3, 2, 1)  # lengths that are searched for besides the longest
MAX_HITS = 48  # continuations that are read of each match in the corpus, evenly spaced over all of them
MAX_OWN_HITS = 8  # of each n-gram of a row's own text, at most this many places are kept, the newest
MIN_PROBABILITY = 0.01  # nodes of smaller probability are not drafted
LENGTH_BOUNDS, COUNT_BOUNDS = (2, 3, 4, 8), (2, 8)  # the bounds between groups of matches: by length, by number of hits
Array = NDArray[np.int32]


@final
class TokenIndex:
    """Token ids of texts, and their places sorted by the tokens before them.

    Args:
        tokens: (n,) int32, the texts, each with `END` after it.
        places: (n,) int32, indices of `tokens`, sorted by the tokens before them from the nearest on.
        tokenizer: Fingerprint of the tokenizer that made the tokens; "" if it is not known.
    """

    def __init__(self, tokens: Array, places: Array, tokenizer: str = "") -> None:
        self.tokens, self.places, self.tokenizer = tokens, places, tokenizer

    @classmethod
    def from_texts(cls, texts: Iterable[Sequence[int]], tokenizer: str = "") -> TokenIndex:
        """Make the index of texts, given as token ids.

        Raises:
            InputError: If they have more than `MAX_INDEX_TOKENS` tokens, or none.
        """
        parts, size = list[Array](), 0
        for text in texts:
            if len(text):
                parts.append(np.array([*text, END], np.int32))
                size += len(parts[-1])
            if size > MAX_INDEX_TOKENS:  # before the others are read
                break
        if not 0 < size <= MAX_INDEX_TOKENS:
            raise InputError(
                f"`texts` must have from 1 to {MAX_INDEX_TOKENS} tokens, but have {size}"
                f"{' or more. Leave some out.' if size else '. Give texts with words.'}"
            )
        tokens = np.concatenate(parts)
        return cls(tokens, _sort_places(tokens), tokenizer)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        """Twelve digits that identify the texts."""
        sample = self.tokens[:: max(1, len(self) // 4096)]
        return blake2b(f"{len(self)}".encode() + sample.tobytes(), digest_size=6).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the index to a file (safetensors), whole or not at all."""
        arrays = {"tokens": torch.from_numpy(self.tokens), "places": torch.from_numpy(self.places)}
        return write_atomically(path, save(arrays, {"format": INDEX_FORMAT, "tokenizer": self.tokenizer}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], argument: str = "drafter") -> TokenIndex:
        """Open an index's file. The arrays stay in the file, which all processes that open it share.

        Args:
            argument: Name of the caller's argument, for errors.

        Raises:
            InputError: If the file is damaged or no index.
        """
        name = f"'{quote_path(path)}'"
        with (
            open_regular(path, argument),
            report_damage(f"`{argument}` must be a whole index of `mmdec index`, but {name} is not", "Make it again."),
            safe_open(path, framework="pt") as file,
        ):
            about = file.metadata() or {}
            is_index = about.get("format") == INDEX_FORMAT
            if is_index:
                tokens, places = (file.get_tensor(part).numpy() for part in ("tokens", "places"))
                if {tokens.dtype, places.dtype} != {np.dtype(np.int32)} or tokens.ndim != 1 or not len(tokens):
                    raise ValueError(f"its tokens are {tokens.dtype} of shape {tokens.shape}")
                if tokens.shape != places.shape or len(tokens) > MAX_INDEX_TOKENS:
                    raise ValueError(f"it has {len(tokens)} tokens and {places.shape} places")
                if tokens.min() < END or places.min() < 0 or places.max() >= len(tokens):
                    raise ValueError("a place or a token is out of range")
                return cls(tokens, places, about.get("tokenizer", ""))
        raise InputError(
            f"`{argument}` must be an index that `mmdec index` wrote, but {name} is another file. Make one with "
            "`mmdec index`."
        )

    def matches(self, text: Sequence[int]) -> list[tuple[int, int, int]]:
        """Find the end of a text in the corpus: the longest that is there, and those of `SHORT_MATCHES` tokens.

        Returns:
            Of each match, the longest first: (tokens, first, last index in `places` plus 1).
        """
        end = list(text[: -MAX_MATCH - 1 : -1])
        at = self._bisect(bisect_left, end, 0, len(self))
        longest = max((_common(end, self._before(place, len(end))) for place in (at - 1, at)), default=0)
        found, low, high = list[tuple[int, int, int]](), 0, len(self)
        for size in sorted({longest, *(size for size in SHORT_MATCHES if size < longest)} - {0}):
            low = self._bisect(bisect_left, end[:size], low, high)
            high = self._bisect(bisect_right, end[:size], low, high)
            if low < high:  # places in a wrong order, in a file that was tampered with, may enclose none
                found.append((size, low, high))
        return found[::-1]

    def continuations(self, first: int, last: int, length: int) -> list[list[int]]:
        """Return at most `length` tokens after each of the places first, ..., last - 1.

        Of many places, an even sample is taken.
        """
        step = -(-(last - first) // MAX_HITS)
        starts = self.places[first:last:step].astype(np.int64)
        indices = np.minimum(starts[:, None] + np.arange(length), len(self) - 1)  # the last token is `END`
        rows: list[list[int]] = self.tokens[indices].tolist()
        return [row[: row.index(END)] if END in row else row for row in rows]

    def _before(self, index: int, size: int) -> list[int]:
        """Return at most `size` tokens before a place, the nearest first; [] if there is no such place."""
        if not 0 <= index < len(self):
            return []
        place = int(self.places[index])
        return self.tokens[max(0, place - size) : place][::-1].tolist()

    def _bisect(self, bisect: Any, end: list[int], low: int, high: int) -> int:
        return bisect(range(len(self)), end, low, high, key=lambda index: self._before(index, len(end)))


def _sort_places(tokens: Array) -> Array:
    """Sort the places of tokens (n,) by the `MAX_MATCH` tokens before each, the nearest first: prefix doubling."""
    size = len(tokens)
    ranks = np.zeros(size, np.int64)  # of each place, by the tokens compared so far; 0 where there are none
    ranks[1:] = tokens[:-1].astype(np.int64) + 2  # `END` is 1
    order, width = np.arange(size), 1
    while width < MAX_MATCH:
        further = np.zeros(size, np.int64)
        further[width:] = ranks[:-width] if width < size else 0
        keys = ranks * (int(ranks.max()) + 1) + further
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ranks[order] = np.concatenate([[0], np.cumsum(keys[1:] != keys[:-1])])
        width *= 2
    return order.astype(np.int32)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first items that two lists share."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 16 digits that identify a tokenizer's vocabulary."""
    digest = blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{number}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@final
class RowText:
    """A batch row's text, and the newest positions of its n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.text = list[int]()
        self._positions = dict[tuple[int, ...], list[int]]()  # n-gram -> positions after it, the newest last
        # of each match of the last query: its group, and the tokens after it
        self.last_matches = list[tuple[tuple[int, ...], frozenset[int]]]()
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self.text.append(token)
        end = len(self.text)
        for size in range(1, min(SHORT_MATCHES[0], end) + 1):
            positions = self._positions.setdefault(tuple(self.text[end - size :]), [])
            positions.append(end)
            del positions[:-MAX_OWN_HITS]

    def continuations(self, length: int) -> list[tuple[int, list[list[int]]]]:
        """Return what followed earlier occurrences of the text's last tokens, the longest match first.

        Each match is (tokens of the match, continuations of at most `length` tokens).
        """
        text, matches = self.text, list[tuple[int, list[list[int]]]]()
        for size in SHORT_MATCHES:
            positions = self._positions.get(tuple(text[-size:]), []) if size <= len(text) else []
            earlier = [text[position : position + length] for position in positions if position < len(text)]
            if earlier:
                matches.append((size, earlier))
        return matches


@dataclass
class CorpusState:
    """The drafter's state of one `generate` call."""

    rows: list[RowText]
    # group of matches -> how often the next token was among those after the match
    rates: dict[tuple[int, ...], HitRate] = field(default_factory=dict)

    def probability(self, group: tuple[int, ...]) -> float:
        """Return the probability that the next token is among those after a match; the prior grows with its length."""
        _, length, _ = group
        prior, rate = PRIOR_TRIALS * (length + 1) / (length + 3), self.rates.get(group) or HitRate()
        return (prior + rate.hits) / (PRIOR_TRIALS + rate.trials)

    def count(self, row: RowText, token: int) -> None:
        """Record the token that followed a row's last query."""
        for group, tokens in row.last_matches:
            self.rates.setdefault(group, HitRate()).count(token in tokens)
        row.last_matches = []


def _group(source: int, length: int, count: int) -> tuple[int, int, int]:
    """Return the group of a match: 0 (corpus) or 1 (own text), and classes of its length and number of hits."""
    return source, bisect_right(LENGTH_BOUNDS, length), bisect_right(COUNT_BOUNDS, count)


@final
class CorpusDrafter:
    """A drafter that copies what followed the newest tokens in a corpus, and in the text so far.

    It has no weights and fits every target with the corpus' tokens. `mmdec.corpus` makes it.

    Args:
        index: The corpus.
    """

    needs = Needs(may_stop_early=True, may_find_nothing=True)

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._max_token = int(index.tokens.max())
        self.name = f"corpus-{index.name}"

    def check(self, target: Target) -> None:
        """Raise InputError if the corpus has tokens that the target does not have."""
        if self._max_token >= target.vocab_size:
            raise InputError(
                f"`drafter` must have tokens below {target.vocab_size}, but this corpus has {self._max_token}. Make "
                "the index with the model's own tokenizer."
            )

    def start(self, context: Context) -> CorpusState:
        """Return the state of each batch row, which begins with the prompt's text."""
        return CorpusState([RowText(text) for text in prompts_with_sources(context, context.text_mask)])

    def propose(self, state: CorpusState, roots: Tensor, plan: Plan) -> Draft:
        """Draft the likeliest nodes of the trie of continuations.

        If `plan.nodes` <= `plan.depth`, draft the likeliest chain.
        """
        return trees_from_lists(roots, [self._tree(state, row, plan) for row in state.rows])

    def update(self, state: CorpusState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Append the new tokens to the rows' texts, and count whether the first was after each match."""
        for row, tokens in zip(state.rows, verdict.new_tokens, strict=True):
            state.count(row, tokens[0])
            for token in tokens:
                row.add(token)

    def select(self, state: CorpusState, live: Tensor) -> None:
        state.rows = [state.rows[index] for index in live.tolist()]

    def _tree(self, state: CorpusState, row: RowText, plan: Plan) -> tuple[list[int], list[int]]:
        """Draft a tree for one batch row.

        Returns:
            Tokens and parents' indices of the nodes below the root; parent 0 is the root.
        """
        depth = min(plan.depth, plan.nodes)
        tokens, parents, values = [0], [-1], [1.0]
        below: list[dict[int, int]] = [{}]  # of each node of the trie: token -> child
        for probabilities, continuations in self._weigh(state, row, depth):
            for continuation in continuations:
                node = 0
                for token, probability in zip(continuation, probabilities, strict=False):
                    child = below[node].get(token)
                    if child is None:
                        child = below[node][token] = len(tokens)
                        tokens.append(token)
                        parents.append(node)
                        values.append(0.0)
                        below.append({})
                    node = child
                    values[node] += probability
        if plan.is_chain:
            best, node = list[int](), 0
            while below[node] and len(best) < depth:
                node = max(below[node].values(), key=values.__getitem__)
                if values[node] < MIN_PROBABILITY:
                    break
                best.append(node)
            chain = worthwhile_prefix([tokens[node] for node in best], [values[node] for node in best], plan)
            return chain, list(range(len(chain)))
        # a parent is at least as likely as its children, and comes before them
        likely = sorted(range(1, len(tokens)), key=lambda node: (-values[node], node))[: plan.nodes]
        likely = [node for node in likely if values[node] >= MIN_PROBABILITY]
        numbers = [node - 1 for node in likely]
        return sort_depth_first(numbers, [tokens[node] for node in likely], [parents[node] for node in likely])

    def _weigh(self, state: CorpusState, row: RowText, length: int) -> list[tuple[list[float], list[list[int]]]]:
        """Find the matches of a row's text.

        Returns:
            Of each match: the probability of each of the `length` tokens of one of its continuations, and these.
        """
        found = [(size, 1, rows) for size, rows in row.continuations(length)]
        for size, first, last in self._index.matches(row.text):
            rows = [rest for rest in self._index.continuations(first, last, length) if rest]
            if rows:
                found.append((size, 0, rows))
        rest, weighed = 1.0, list[tuple[list[float], list[list[int]]]]()
        row.last_matches = []
        for size, source, rows in sorted(found, key=lambda match: (-match[0], -match[1])):
            probability = rest * state.probability(_group(source, size, len(rows)))
            row.last_matches.append((_group(source, size, len(rows)), frozenset(tokens[0] for tokens in rows)))
            rest -= probability
            probabilities = [probability / len(rows)]
            for step in range(1, length):
                probabilities.append(probabilities[-1] * state.probability(_group(source, size + step, len(rows))))
            weighed.append((probabilities, rows))
        return weighed
