"""Decodes a graph by a beam search with an n-gram language model of its tokens (Huang et al. 2022, section 3.3).

Each vertex's best token is independent of the tokens of its neighbours, so that a path may join parts of two different
words. The n-gram, trained only on text, says which token follows which. The search goes through the vertices in
order, keeps the best texts that end on each vertex, and sums the probabilities of all paths that emit the same text.
The score of a text Y is

    log P(Y | X) + NGRAM_WEIGHT * log P_ngram(Y) + TOKEN_BONUS * |Y|, and without an n-gram log P(Y | X).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, final

import torch
from torch import Tensor

from mmdec.kernels.dag import check_lengths
from mmdec.kernels.dag_decode import LatticePath

# maximum numbers at each vertex: of texts that are continued, of tokens and of jumps that are tried
BEAM_SIZE, MAX_TOKENS_PER_VERTEX, MAX_JUMPS_PER_VERTEX = 5, 3, 5
MIN_TOKEN_LOGPROB, MIN_JUMP_LOGPROB = -5.0, -6.0  # in nats: tokens and jumps of a lower log-probability are not tried
NGRAM_WEIGHT, TOKEN_BONUS = 0.7, 3.0


class TokenNGram(Protocol):
    """A language model of tokens.

    The id `pieces` stands for a text's start, `pieces + 1` for its end.
    """

    pieces: int  # number of tokens

    def after(self, context: Sequence[int]) -> Callable[[int], float]:
        """Return a function: token id -> ln P(token | context).

        Args:
            context: Ids of all tokens before it.
        """
        ...


@final
@dataclass
class _BeamHypothesis:
    """A hypothesis: scores and best path of a text that ends on a vertex."""

    log_probability: float  # natural log of the summed probabilities of all paths that emit this text
    ngram_score: float  # the text's ln P by the n-gram
    best: float  # ln P of the most probable of these paths
    vertices: tuple[int, ...]  # the vertices on this most probable path that emit the text's tokens


def beam_path(
    emissions: Tensor,
    links: Tensor,
    graph_lengths: Tensor,
    ngram: TokenNGram | None = None,
    *,
    count: int = 1,
    collapse: bool = False,
    bos: int,
    eos: int,
    specials: int,
) -> LatticePath:
    """Decode each graph to the texts of the highest scores.

    Padding is never read.

    Args:
        emissions: (B, L, V) log-probabilities.
        links: (B, L, L) log-probabilities.
        graph_lengths: (B,), numbers of vertices.
        ngram: A language model of the tokens; None: only the graph's probabilities count.
        count: Number of texts of each graph, the best first. If a graph has fewer texts, its last text is repeated.
        collapse: Whether a vertex that emits the same token as the vertex before adds nothing to the text.
        bos: Id of <s>, which the first vertex always emits.
        eos: Id of </s>, which the last vertex always emits.
        specials: Ids below this number are special tokens, which are not part of the text.

    Returns:
        A `LatticePath` of B * count rows: the most probable path of each text; the texts of one graph follow each
        other. If no text is probable enough, the text is empty and its score -inf.

    References:
        Huang et al. 2022, "Directed Acyclic Transformer", section 3.3 and its released code.
    """
    ends = check_lengths("graph_lengths", graph_lengths, emissions.size(0), emissions.size(1), emissions.device) - 1
    emissions, links = emissions.detach().float().cpu(), links.detach().float().cpu()
    rows, scores, beams = [], [], []
    for row, end in enumerate(ends.tolist()):
        row_emissions = emissions[row, : end + 1]
        first, last = float(row_emissions[0, bos]), float(row_emissions[end, eos])
        texts = _search(row_emissions, links[row, : end + 1, : end + 1], ngram, collapse, specials)[:count]
        for value, text, hypothesis in texts + texts[-1:] * (count - len(texts)):
            beams.append(value)
            scores.append(first + hypothesis.best + last if end else first)
            tokens, vertices = [bos, *text, eos], [0, *hypothesis.vertices, end]
            rows.append((tokens, vertices) if end else (tokens[:1], vertices[:1]))
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    width = int(lengths.max())
    tokens, vertices = (
        torch.tensor([[*part, *[-1] * (width - len(part))] for part in parts]).to(ends.device)
        for parts in zip(*rows, strict=True)
    )
    sums = (torch.tensor(part, device=ends.device) for part in (scores, beams))
    return LatticePath(tokens, vertices, lengths.to(ends.device), *sums)


def _search(
    emissions: Tensor, links: Tensor, ngram: TokenNGram | None, collapse: bool, specials: int
) -> list[tuple[float, tuple[int, ...], _BeamHypothesis]]:
    """Search one graph.

    Args:
        emissions: (L, V).
        links: (L, L).

    Returns:
        (score, token ids, hypothesis) of each text, best first.
    """
    end = len(emissions) - 1
    likely, tokens = (part.tolist() for part in emissions.topk(min(MAX_TOKENS_PER_VERTEX, emissions.size(1)), -1))
    logprobs, jumps = (part.tolist() for part in links.topk(min(MAX_JUMPS_PER_VERTEX, end + 1), -1))
    weight, bonus = (0.0, 0.0) if ngram is None else (NGRAM_WEIGHT, TOKEN_BONUS)

    def value(item: tuple[tuple[int, ...], _BeamHypothesis]) -> float:
        text, hypothesis = item
        return hypothesis.log_probability + weight * hypothesis.ngram_score + bonus * len(text)

    beams: list[dict[tuple[int, ...], _BeamHypothesis]] = [{} for _ in range(end + 1)]
    beams[0][()] = _BeamHypothesis(0.0, 0.0, 0.0, ())
    for vertex in range(end):
        best = [(*item, _after(ngram, item[0])) for item in heapq.nlargest(BEAM_SIZE, beams[vertex].items(), key=value)]
        for jump, following in zip(logprobs[vertex], jumps[vertex], strict=True):
            if jump < MIN_JUMP_LOGPROB or following <= vertex:
                continue
            choices = [(0.0, -1)]
            if following < end:
                pairs = zip(likely[following], tokens[following], strict=True)
                choices = [(emitted, token) for emitted, token in pairs if emitted >= MIN_TOKEN_LOGPROB]
            for (text, shorter, score), (emitted, token) in product(best, choices):
                longer, vertices, ngram_score = text, shorter.vertices, shorter.ngram_score
                if following == end:
                    ngram_score += score(None)
                elif token >= specials and not (collapse and text and token == text[-1]):
                    longer, vertices = (*text, token), (*vertices, following)
                    ngram_score += score(token)
                hypothesis = _BeamHypothesis(
                    shorter.log_probability + jump + emitted, ngram_score, shorter.best + jump + emitted, vertices
                )
                _keep(beams[following], longer, hypothesis)
        beams[vertex] = {}  # the hypotheses at this vertex are not needed any more: the search only goes forward
    if not beams[end]:
        return [(-math.inf, (), _BeamHypothesis(-math.inf, 0.0, -math.inf, ()))]
    return [(value(item), *item) for item in sorted(beams[end].items(), key=value, reverse=True)]


def _after(ngram: TokenNGram | None, text: Sequence[int]) -> Callable[[int | None], float]:
    """Return a function: token after `text` -> its ln P by the n-gram.

    The token None stands for the text's end. Without an n-gram the function returns 0.
    """
    if ngram is None:
        return lambda token: 0.0
    start, score = ngram.pieces, ngram.after((ngram.pieces, *text))
    return lambda token: score(start + 1 if token is None else token)


def _keep(texts: dict[tuple[int, ...], _BeamHypothesis], text: tuple[int, ...], new: _BeamHypothesis) -> None:
    """Add a hypothesis to the dict `texts`.

    If the text is already there, the probabilities are summed and the better path is kept.
    """
    old = texts.get(text)
    if old is None:
        texts[text] = new
        return
    more, less = max(old.log_probability, new.log_probability), min(old.log_probability, new.log_probability)
    old.log_probability = more + math.log1p(math.exp(less - more))
    if new.best > old.best:
        old.best, old.vertices = new.best, new.vertices
