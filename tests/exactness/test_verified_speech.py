"""Tests speech translation where the graph drafts and the autoregressive decoder verifies: the units are those of
greedy autoregressive decoding, for any draft."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import MatchRule
from mmdec.daspeech.ar_decoder import ArConfig, ArDecoder
from mmdec.daspeech.dag_drafter import DagDrafter
from mmdec.daspeech.target import UnitTarget
from mmdec.daspeech.units import EOS, PAD
from mmdec.errors import InputError
from mmdec.types import Context, Plan
from tests.support.grid import slow_but

UNITS = 11


def decoder(seed: int) -> ArDecoder:
    torch.manual_seed(seed)
    network = ArDecoder(ArConfig(d_model=16, ffn=24, heads=2, layers=2), UNITS, 16).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2.0)  # sharper: the greedy units vary
    return network


def lattice(batch: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    emissions = (3 * torch.randn(batch, size, UNITS, generator=generator)).log_softmax(-1)
    scores = torch.randn(batch, size, size, generator=generator)
    links = scores.masked_fill(torch.ones(size, size).triu(1) == 0, -torch.inf).log_softmax(-1).nan_to_num(-torch.inf)
    return emissions, links, torch.full((batch,), size)


def verified(network: ArDecoder, states: Tensor, sizes: Tensor, graph: Any, limit: int, nodes: int) -> Sequences:
    text = Sequences(torch.zeros(len(states), 1, dtype=torch.long), Stop(limit + 1, frozenset({EOS, PAD})))
    drafter = DagDrafter(*graph, EOS)
    inputs = {"states": states, "state_lengths": sizes}
    for _ in decode(UnitTarget(network), inputs, text, MatchRule(), drafter, FixedBudget(nodes)):
        pass
    return text


@pytest.mark.parametrize(
    ("nodes", "batch"), slow_but(product((0, 1, 9, 200), (1, 2, 5)), [(0, 5), (1, 1), (9, 5), (200, 2)])
)
def test_any_graph_leaves_the_decoders_units(nodes: int, batch: int) -> None:
    for seed in range(4):
        network = decoder(seed)
        states = torch.randn(batch, 13, 16)
        sizes = torch.randint(5, 14, (batch,))
        text = verified(network, states, sizes, lattice(batch, 30, seed), 40, nodes)
        expected = network.generate(states, sizes, 40)
        assert [row[:-1] if row[-1] in (EOS, PAD) else row for row in text.tokens] == expected


def test_a_right_graph_needs_two_passes() -> None:
    network = decoder(3)
    states, sizes = torch.randn(1, 9, 16), torch.tensor([9])
    units = network.generate(states, sizes, 25)[0]
    vertex_units = [0, *units, EOS]
    emissions = torch.full((1, len(vertex_units), UNITS), -20.0)
    emissions[0, range(len(vertex_units)), vertex_units] = 0.0
    links = torch.full((1, len(vertex_units), len(vertex_units)), -torch.inf)
    for before, after in pairwise(range(len(vertex_units))):
        links[0, before, after] = 0.0
    text = Sequences(torch.zeros(1, 1, dtype=torch.long), Stop(26, frozenset({EOS})))
    drafter = DagDrafter(emissions, links, torch.tensor([len(vertex_units)]), EOS)
    inputs = {"states": states, "state_lengths": sizes}
    rounds = list(decode(UnitTarget(network), inputs, text, MatchRule(), drafter, FixedBudget(100)))
    assert len(rounds) == 2
    assert text.tokens[0][: len(units)] == units


def test_the_next_unit_has_the_distribution_of_all_paths() -> None:
    """P(y | prefix) equals the enumeration of every path through a small graph."""
    emissions, links, lengths = lattice(1, 6, 0)
    drafter = DagDrafter(emissions, links, lengths, EOS)
    none = torch.zeros(1, 1, dtype=torch.long)
    state = drafter.start(Context(none, none == 0, none[None], none[:, 0]))[0]
    e, a = emissions[0].exp().numpy().astype(np.float64), links[0].exp().numpy().astype(np.float64)
    prefix = [4, 7]
    for unit in prefix:
        state.alpha = state.after(state.alpha @ state.links, unit)
    _, probabilities = state.next_distributions(state.alpha)
    expected = np.zeros(UNITS)
    for path in product(range(1, 6), repeat=3):
        probability = a[0, path[0]] * e[path[0], 4] * a[path[0], path[1]] * e[path[1], 7] * a[path[1], path[2]]
        expected += probability * e[path[2]]
    assert np.allclose(probabilities / probabilities.sum(), expected / expected.sum(), atol=1e-5)


def test_drafts_keep_to_the_plan() -> None:
    emissions, links, lengths = lattice(3, 40, 1)
    drafter = DagDrafter(emissions, links, lengths, EOS)
    none = torch.zeros(3, 1, dtype=torch.long)
    state = drafter.start(Context(none, none == 0, none[None], none[:, 0]))
    for plan in (Plan(1, 1), Plan(7, 3), Plan(60, 60)):
        draft = drafter.propose(state, none[:, 0], plan)
        assert int(draft.size.max()) <= plan.nodes + 1
        for parents, size in zip(draft.parents.tolist(), draft.size.tolist(), strict=True):
            assert all(0 <= parents[node] < node for node in range(1, size))


def test_another_models_graph_is_refused() -> None:
    emissions, links, lengths = lattice(1, 5, 0)
    with pytest.raises(InputError, match="units"):
        DagDrafter(emissions[..., :-1], links, lengths, EOS).check(UnitTarget(decoder(0)))
