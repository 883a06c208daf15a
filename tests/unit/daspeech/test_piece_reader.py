"""Tests the reader: rows do not depend on their batch, uncertain pieces become expected embeddings, encoder states are
added, and both decoders run on its output."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from mmdec.daspeech.ar_decoder import ArConfig
from mmdec.daspeech.dag_decoder import DagConfig
from mmdec.daspeech.piece_reader import PiecesToUnits, ReaderConfig

SIZES = {"d_model": 16, "ffn": 16, "heads": 2, "layers": 2, "dropout": 0.0}
DAG = DagConfig(16, 16, 2, 1, 0.0, upsample=8, min_vertices=24, link_heads=2, link_dim=8, positions="sinusoidal")


@pytest.fixture
def network() -> PiecesToUnits:
    torch.manual_seed(0)
    config = ReaderConfig(11, 9, **SIZES, d_states=6, ar=ArConfig(**SIZES), dag=DAG)
    return PiecesToUnits(ReaderConfig.from_dict(asdict(config))).eval()


def test_a_row_alone_equals_a_row_beside_longer_ones(network: PiecesToUnits) -> None:
    pieces, lengths = torch.randint(1, 11, (3, 7)), torch.tensor([7, 2, 4])
    with torch.no_grad():
        states = network.encode(pieces, lengths)
        for row, length in enumerate(lengths.tolist()):
            single = network.encode(pieces[row : row + 1, :length], lengths[row : row + 1])
            torch.testing.assert_close(states[row, :length], single[0])


def test_a_doubtful_place_is_the_expected_embedding(network: PiecesToUnits) -> None:
    reader, lengths = network.reader, torch.tensor([2])
    pieces, weights = torch.tensor([[[3, 5], [4, 1]]]), torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    mixed = torch.einsum("nk,nkd->nd", weights[0], reader.embed_pieces.weight[pieces[0]])
    with torch.no_grad():
        doubtful = reader(pieces, weights, lengths)
        reader.embed_pieces.weight[7], reader.embed_pieces.weight[8] = mixed[0], mixed[1]
        torch.testing.assert_close(doubtful, network.encode(torch.tensor([[7, 8]]), lengths))


def test_states_of_zeros_equal_no_states(network: PiecesToUnits) -> None:
    pieces, lengths = torch.tensor([[3, 5]]), torch.tensor([2])
    given = (pieces[..., None], torch.ones(1, 2, 1), lengths)
    with torch.no_grad():
        plain = network.reader(*given)
        torch.testing.assert_close(network.reader(*given, torch.zeros(1, 2, 6)), plain)
        assert not torch.allclose(network.reader(*given, torch.ones(1, 2, 6)), plain)


def test_the_graph_has_eight_vertices_a_piece(network: PiecesToUnits) -> None:
    pieces, lengths = torch.randint(1, 11, (2, 5)), torch.tensor([5, 2])
    assert network.decoder is not None
    with torch.no_grad():
        lattice = network.decoder(network.encode(pieces, lengths), lengths, lengths)
    assert lattice.lengths.tolist() == [40, 24]
