"""Lattice decoding against brute force: every path of tiny graphs, batched and ragged."""

from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmdec.errors import InputError
from mmdec.kernels.dag_decode import LatticePath, LatticeStrategy, decode_lattice
from tests.support.grid import WHOLE
from tests.support.naive_dag import all_paths, best_tokens, greedy_path

STRATEGIES: list[LatticeStrategy] = ["greedy", "lookahead", "viterbi", "joint-viterbi"]
BOS, EOS = 0, 2


def random_lattice(
    lengths: list[int], vocabulary: int = 5, seed: int = 0, holes: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised emissions (B, L, V) and links (B, L, L); a share of the links forbidden; the padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(lengths), max(lengths)
    emissions = (2 * torch.randn(batch, size, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(2)
    links = 2 * torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    forward = torch.ones(size, size, dtype=torch.bool).triu(1)
    links = links.masked_fill(~forward, -inf).log_softmax(2).masked_fill(~forward, -inf)
    links = links.masked_fill(torch.rand(links.shape, generator=generator) < holes, -inf)
    for b, length in enumerate(lengths):
        emissions[b, length:] = links[b, length:] = links[b, :, length:] = torch.nan
    return emissions, links, torch.tensor(lengths)


def link_score(path: tuple[int, ...], links: Tensor) -> float:
    return sum(links[i, j].item() for i, j in pairwise(path))


def brute_force(
    strategy: str, emissions: Tensor, links: Tensor, *, weight: float, penalty: float, longest: int
) -> tuple[int, ...]:
    """Return the path that the definition asks for, by a walk in Python or by listing all paths of all lengths."""
    size = len(links)
    gains = best_tokens(emissions)[1]
    if strategy in ("greedy", "lookahead"):
        return greedy_path(links, gains, weight if strategy == "lookahead" else 0.0)
    scored = []
    for path in (path for t in range(1, longest + 1) for path in all_paths(t, size)):
        emitted = sum(gains[j] for j in path) if strategy == "joint-viterbi" else 0.0
        scored.append(((link_score(path, links) + emitted) / len(path) ** penalty, path))
    top, path = max(scored)
    return path if top > -inf else (0, size - 1)


@settings(max_examples=60 if WHOLE else 20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    strategy=st.sampled_from(STRATEGIES),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    penalty=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    max_length=st.sampled_from([None, 2, 3, 5]),
    holes=st.sampled_from([0.0, 0.3]),
)
def test_equals_brute_force(
    lengths: list[int],
    seed: int,
    strategy: LatticeStrategy,
    weight: float,
    penalty: float,
    max_length: int | None,
    holes: float,
) -> None:
    assert_equals_brute_force(lengths, seed, strategy, weight, penalty, max_length, holes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_graphs_equal_brute_force(strategy: LatticeStrategy) -> None:
    assert_equals_brute_force([8, 7, 6, 5] * 15, 0, strategy, 1.0, 1.0, None, 0.1)


def assert_equals_brute_force(
    lengths: list[int],
    seed: int,
    strategy: LatticeStrategy,
    weight: float,
    penalty: float,
    max_length: int | None,
    holes: float,
) -> None:
    emissions, links, graph_lengths = random_lattice(lengths, seed=seed, holes=holes)
    result = decode_lattice(
        emissions,
        links,
        graph_lengths,
        strategy,
        lookahead_weight=weight,
        length_penalty=penalty,
        max_length=max_length,
    )
    assert result.vertices.shape == result.tokens.shape == (len(lengths), int(result.lengths.max()))
    for b, size in enumerate(lengths):
        own_emissions, own_links = emissions[b, :size], links[b, :size, :size]
        longest = min(size, max_length or size)
        path = brute_force(strategy, own_emissions, own_links, weight=weight, penalty=penalty, longest=longest)
        tokens, gains = best_tokens(own_emissions)
        count = int(result.lengths[b])
        assert tuple(result.vertices[b, :count].tolist()) == path
        assert result.tokens[b, :count].tolist() == [tokens[j] for j in path]
        assert (result.vertices[b, count:] == -1).all()
        assert (result.tokens[b, count:] == -1).all()
        score = link_score(path, own_links) + sum(gains[j] for j in path)
        assert result.scores[b].item() == pytest.approx(score)


def test_joint_viterbi_maximises_over_tokens_too() -> None:
    """Every path and every token on it, not only the best token of each vertex."""
    emissions, links, lengths = random_lattice([5], vocabulary=3, seed=4)
    result = decode_lattice(emissions, links, lengths, "joint-viterbi", length_penalty=0.0)
    options = []
    for path in (path for t in range(2, 6) for path in all_paths(t, 5)):
        choices = [[BOS], *([[0, 1, 2]] * (len(path) - 2)), [EOS]]
        for tokens in torch.cartesian_prod(*[torch.tensor(choice) for choice in choices]).tolist():
            emitted = sum(emissions[0, vertex, token].item() for vertex, token in zip(path, tokens, strict=True))
            options.append((link_score(path, links[0]) + emitted, path, tokens))
    score, path, tokens = max(options)
    assert tuple(result.vertices[0].tolist()) == path
    assert result.tokens[0].tolist() == tokens
    assert result.scores[0].item() == pytest.approx(score)


def test_a_search_ignoring_emissions_is_caught() -> None:
    """Negative control: greedy and Viterbi paths differ from lookahead and Joint-Viterbi ones somewhere."""
    emissions, links, lengths = random_lattice([8] * 20)
    greedy, lookahead, viterbi, joint = (decode_lattice(emissions, links, lengths, name) for name in STRATEGIES)
    for first, second in ((greedy, lookahead), (viterbi, joint), (greedy, viterbi)):
        assert first.vertices.shape != second.vertices.shape or not torch.equal(first.vertices, second.vertices)
    # The search that maximises the score of the whole path is never beaten at it.
    free = decode_lattice(emissions, links, lengths, "joint-viterbi", length_penalty=0.0)
    for path in (greedy, lookahead, viterbi, joint):
        assert (free.scores >= path.scores - 1e-12).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_equals_its_samples_one_by_one(strategy: LatticeStrategy) -> None:
    emissions, links, lengths = random_lattice([70, 33, 64, 1, 65, 2], vocabulary=20, seed=1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        batch = decode_lattice(emissions.to(dtype), links.to(dtype), lengths, strategy, collapse=True)
        for b, size in enumerate(lengths.tolist()):
            own = emissions[b : b + 1, :size].to(dtype), links[b : b + 1, :size, :size].to(dtype)
            single = decode_lattice(*own, lengths[b : b + 1], strategy, collapse=True)
            count = int(single.lengths[0])
            assert int(batch.lengths[b]) == count
            assert torch.equal(batch.vertices[b, :count], single.vertices[0, :count])
            assert torch.equal(batch.tokens[b, :count], single.tokens[0, :count])
            torch.testing.assert_close(batch.scores[b], single.scores[0])


def collapsed(path: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Apply the rule of `collapse` to one path of (token, vertex), in plain Python."""
    vertices = [path[0]]
    for k in range(1, len(path)):
        if path[k][0] != path[k - 1][0]:
            vertices.append(path[k])
    if len(path) > 1 and vertices[-1] != path[-1]:  # the last run lost the last vertex: it keeps that one instead
        vertices = [*(vertices[:-1] if len(vertices) > 1 else vertices), path[-1]]
    return vertices


@settings(max_examples=60 if WHOLE else 20, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_collapse_keeps_one_vertex_of_each_run(lengths: list[int], seed: int) -> None:
    emissions, links, graph_lengths = random_lattice(lengths, vocabulary=3, seed=seed)
    for bos, eos in ((BOS, EOS), (1, 1), (None, None)):
        whole, short = (
            decode_lattice(
                emissions, links, graph_lengths, "viterbi", length_penalty=2.0, collapse=collapse, bos=bos, eos=eos
            )
            for collapse in (False, True)
        )
        assert torch.equal(short.scores, whole.scores)
        for b, size in enumerate(lengths):
            expected = collapsed(steps(whole, b))
            assert steps(short, b) == expected
            assert expected[0][1] == 0
            assert expected[-1][1] == size - 1
            assert (short.tokens[b, len(expected) :] == -1).all()


def steps(path: LatticePath, sample: int) -> list[tuple[int, int]]:
    """Return (token, vertex) along one path."""
    count = int(path.lengths[sample])
    pairs = zip(path.tokens[sample, :count].tolist(), path.vertices[sample, :count].tolist(), strict=True)
    return list(pairs)


def test_doubled_tokens_survive_unless_collapsed() -> None:
    emissions = torch.full((1, 5, 4), -9.0)
    for vertex, token in enumerate([0, 3, 3, 1, 2]):
        emissions[0, vertex, token] = -0.1
    links = torch.full((1, 5, 5), -inf)
    links[0, [0, 1, 2, 3], [1, 2, 3, 4]] = 0.0
    lengths = torch.tensor([5])
    for strategy in STRATEGIES:
        assert decode_lattice(emissions, links, lengths, strategy).tokens.tolist() == [[0, 3, 3, 1, 2]]
        short = decode_lattice(emissions, links, lengths, strategy, collapse=True)
        assert short.tokens[0, : int(short.lengths)].tolist() == [0, 3, 1, 2]
        assert short.vertices[0, : int(short.lengths)].tolist() == [0, 1, 3, 4]


def test_a_larger_penalty_never_shortens_the_path() -> None:
    emissions, links, lengths = random_lattice([9] * 10, seed=2)
    for strategy in ("viterbi", "joint-viterbi"):
        counts = [
            decode_lattice(emissions, links, lengths, strategy, length_penalty=penalty).lengths
            for penalty in (0.0, 0.5, 1.0, 2.0, 4.0)
        ]
        for fewer, more in pairwise(counts):
            assert (fewer <= more).all()
        assert (counts[0] < counts[-1]).any()


def test_dead_ends_jump_to_the_last_vertex_and_are_reported() -> None:
    emissions, links, lengths = random_lattice([6, 6])
    links[0, 2:] = -inf  # nothing leaves vertices 2 to 4
    links[0, :2, 4:] = -inf  # and the end is out of reach of the others
    for strategy in STRATEGIES:
        result = decode_lattice(emissions, links, lengths, strategy)
        assert result.scores.isfinite().tolist() == [False, True]
        assert result.vertices[0, int(result.lengths[0]) - 1] == 5
        assert result.vertices[0, 0] == 0


class DeviceWaits(TorchDispatchMode):
    """Counts the operations that would make the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_loop_waits_for_the_device(strategy: LatticeStrategy) -> None:
    for size in (10, 90):
        emissions, links, lengths = random_lattice([size] * 3)
        with DeviceWaits() as waits:
            decode_lattice(emissions, links, lengths, strategy, collapse=True)
        assert waits.count == 1  # the width of the result; the check of the lengths reads them in one go


def test_wrong_inputs_are_named() -> None:
    emissions, links, lengths = random_lattice([6, 4])
    with pytest.raises(InputError, match=r'`strategy` must be one of "greedy", .*, but is \'joint_viterbi\''):
        decode_lattice(emissions, links, lengths, "joint_viterbi")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"`emissions` must be .* shape \(6, 5\)"):
        decode_lattice(emissions[0], links, lengths)
    with pytest.raises(InputError, match=r"`links` must have shape \(2, 6, 6\), but has \(2, 6, 5\)"):
        decode_lattice(emissions, links[:, :, :5], lengths)
    with pytest.raises(InputError, match="`graph_lengths` must be 2 integers"):
        decode_lattice(emissions, links, lengths[:1])
    with pytest.raises(InputError, match="`graph_lengths` must be between 1 and 6, but ranges from 4 to 7"):
        decode_lattice(emissions, links, torch.tensor([7, 4]))
    with pytest.raises(InputError, match="`length_penalty` must be at least 0"):
        decode_lattice(emissions, links, lengths, length_penalty=-1.0)
    with pytest.raises(InputError, match="`lookahead_weight` must be at least 0 and finite, but is nan"):
        decode_lattice(emissions, links, lengths, lookahead_weight=float("nan"))
    with pytest.raises(InputError, match="`max_length` must be at least 2"):
        decode_lattice(emissions, links, lengths, "viterbi", max_length=1)
    with pytest.raises(InputError, match="`eos` must be a token below 5, but is 5"):
        decode_lattice(emissions, links, lengths, eos=5)
