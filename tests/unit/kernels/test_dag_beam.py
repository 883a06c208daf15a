"""Beam search over a lattice: against all paths, with and without an n-gram."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from mmdec.kernels import dag_beam
from mmdec.kernels.dag_beam import NGRAM_WEIGHT, TOKEN_BONUS, beam_path

BOS, EOS = 0, 2


class Ngram:
    """Any number for each trigram of six tokens."""

    pieces = 6

    def after(self, context: Sequence[int]) -> Callable[[int], float]:
        return lambda piece: self.score(context, piece)

    def score(self, context: Sequence[int], piece: int) -> float:
        before, last = (6, 6, *context)[-2:]
        return -0.1 - ((before * 31 + last * 17 + piece * 7) % 23) / 5


def lattice(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    emissions = torch.randn(size, 6, generator=generator).log_softmax(-1)
    scores = torch.randn(size, size, generator=generator)
    ahead = torch.ones(size, size).triu(1).bool()
    return emissions, scores.masked_fill(~ahead, -torch.inf).log_softmax(-1)


def all_texts(emissions: torch.Tensor, links: torch.Tensor, collapse: bool) -> dict[tuple[int, ...], float]:
    """Return the probability of each text, over every path and every choice of tokens."""
    end, probabilities = len(emissions) - 1, dict[tuple[int, ...], float]()
    for count in range(end):
        for inner in itertools.combinations(range(1, end), count):
            path = (0, *inner, end)
            jumps = sum(float(links[a, b]) for a, b in itertools.pairwise(path))
            for tokens in itertools.product(range(6), repeat=count):
                text = [token for token in tokens if token >= 3]
                if collapse:
                    text = [token for token, _ in itertools.groupby(text)]
                emitted = sum(float(emissions[v, token]) for v, token in zip(inner, tokens, strict=True))
                probabilities[tuple(text)] = probabilities.get(tuple(text), 0.0) + math.exp(jumps + emitted)
    return probabilities


def worth(text: tuple[int, ...], probability: float, ngram: Ngram | None) -> float:
    if ngram is None:
        return math.log(probability)
    whole = (ngram.pieces, ngram.pieces, *text, ngram.pieces + 1)
    known = sum(ngram.score(whole[at : at + 2], whole[at + 2]) for at in range(len(text) + 1))
    return math.log(probability) + NGRAM_WEIGHT * known + TOKEN_BONUS * len(text)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("collapse", [False, True])
@pytest.mark.parametrize("ngram", [None, Ngram()])
def test_a_wide_beam_finds_the_best_of_all_texts(
    monkeypatch: pytest.MonkeyPatch, seed: int, collapse: bool, ngram: Ngram | None
) -> None:
    for name, value in {
        "BEAM_SIZE": 10_000,
        "MAX_TOKENS_PER_VERTEX": 6,
        "MAX_JUMPS_PER_VERTEX": 6,
        "MIN_TOKEN_LOGPROB": -99.0,
        "MIN_JUMP_LOGPROB": -99.0,
    }.items():
        monkeypatch.setattr(dag_beam, name, value)
    emissions, links = lattice(seed, 6)
    path = beam_path(
        emissions[None], links[None], torch.tensor([6]), ngram, collapse=collapse, bos=BOS, eos=EOS, specials=3
    )
    count = int(path.lengths[0])
    text = tuple(path.tokens[0, 1 : count - 1].tolist())
    texts = all_texts(emissions, links, collapse)
    best = max(texts, key=lambda text: worth(text, texts[text], ngram))
    assert worth(text, texts[text], ngram) == pytest.approx(worth(best, texts[best], ngram), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_several_texts_are_the_best_of_all(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for name, value in {
        "BEAM_SIZE": 10_000,
        "MAX_TOKENS_PER_VERTEX": 6,
        "MAX_JUMPS_PER_VERTEX": 6,
        "MIN_TOKEN_LOGPROB": -99.0,
        "MIN_JUMP_LOGPROB": -99.0,
    }.items():
        monkeypatch.setattr(dag_beam, name, value)
    emissions, links = lattice(seed, 5)
    path = beam_path(emissions[None], links[None], torch.tensor([5]), Ngram(), count=3, bos=BOS, eos=EOS, specials=3)
    texts = all_texts(emissions, links, False)
    best = sorted(texts, key=lambda text: -worth(text, texts[text], Ngram()))[:3]
    result = [tuple(row[1 : count - 1].tolist()) for row, count in zip(path.tokens, path.lengths, strict=True)]
    assert result == best
    assert path.beams is not None
    assert path.beams.tolist() == pytest.approx([worth(text, texts[text], Ngram()) for text in best], abs=1e-5)


def test_a_lattice_with_fewer_texts_repeats_its_last_one() -> None:
    emissions, links = lattice(0, 2)
    path = beam_path(emissions[None], links[None], torch.tensor([2]), count=3, bos=BOS, eos=EOS, specials=3)
    assert path.tokens.tolist() == [[BOS, EOS]] * 3
    assert path.select(torch.tensor([2])).vertices.tolist() == [[0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_rows_alone_equal_rows_in_a_batch(seed: int) -> None:
    rows = [lattice(seed, size) for size in (9, 1, 5, 2)]
    emissions, links = torch.full((4, 9, 6), torch.nan), torch.full((4, 9, 9), -torch.inf)
    for row, (own, jumps) in enumerate(rows):
        emissions[row, : len(own)], links[row, : len(own), : len(own)] = own, jumps
    path = beam_path(emissions, links, torch.tensor([9, 1, 5, 2]), Ngram(), bos=BOS, eos=EOS, specials=3)
    for row, (own, jumps) in enumerate(rows):
        single = beam_path(own[None], jumps[None], torch.tensor([len(own)]), Ngram(), bos=BOS, eos=EOS, specials=3)
        count = int(single.lengths[0])
        assert path.tokens[row, :count].equal(single.tokens[0])
        assert bool((path.tokens[row, count:] == -1).all())
        assert path.vertices[row, :count].equal(single.vertices[0])
        assert path.scores[row] == single.scores[0]
        assert bool((single.vertices[0].diff() > 0).all())
        assert single.vertices[0, -1] == len(own) - 1


def test_an_impossible_lattice_has_an_empty_text() -> None:
    emissions = torch.zeros(1, 4, 6).log_softmax(-1)
    path = beam_path(emissions, torch.full((1, 4, 4), -torch.inf), torch.tensor([4]), bos=BOS, eos=EOS, specials=3)
    assert path.tokens.tolist() == [[BOS, EOS]]
    assert path.scores.tolist() == [-math.inf]
