"""Whisper's encoder at any length: equal to transformers' own at a whole window, rows independent of their batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmdec.whisper.unpadded_encoder import (
    SILENCE_MARGIN,
    STATE_SAMPLES,
    UnpaddedEncoder,
    UnpaddedEncoderConfig,
    read_states,
)
from tests.support.tiny_whisper import build


@pytest.fixture(scope="module")
def pair() -> tuple[UnpaddedEncoder, torch.nn.Module]:
    stock = build(80, 1, 2, 0, max_source_positions=100, init_std=0.2).eval()
    config = UnpaddedEncoderConfig.of(stock.config.to_dict())
    encoder = UnpaddedEncoder(config).eval()
    encoder.load_state_dict(stock.model.encoder.state_dict())
    return encoder, stock.model.encoder


def sound(seconds: float, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(round(16_000 * seconds), generator=torch.Generator().manual_seed(seed))


def test_a_whole_window_equals_transformers(pair: tuple[UnpaddedEncoder, torch.nn.Module]) -> None:
    encoder, stock = pair
    features = torch.randn(2, 80, 200, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states, lengths = encoder(features)
        wanted = stock(features).last_hidden_state
    assert lengths.tolist() == [100, 100]
    torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)


def test_a_row_alone_equals_a_row_beside_a_longer_one(pair: tuple[UnpaddedEncoder, torch.nn.Module]) -> None:
    sounds = [sound(0.31), sound(0.9, 1), sound(0.5, 2)]
    with torch.no_grad():
        states, lengths = read_states(pair[0], sounds, margin=0.2)
        for row, samples in enumerate(sounds):
            alone, count = read_states(pair[0], [samples], margin=0.2)
            assert lengths[row] == count[0] == alone.shape[1]
            torch.testing.assert_close(states[row, : count[0]], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("seconds", "states"), [(0.5, 75), (0.001, 51), (1.5, 100), (4.0, 100)])
def test_the_sound_and_a_second_of_silence_are_read_and_no_more_than_a_window(
    pair: tuple[UnpaddedEncoder, torch.nn.Module], seconds: float, states: int
) -> None:
    assert SILENCE_MARGIN == 1.0
    with torch.no_grad():
        assert read_states(pair[0], [sound(seconds)])[1].tolist() == [states]
    assert STATE_SAMPLES == 320


def test_the_margin_is_cut_to_the_requested_frames(pair: tuple[UnpaddedEncoder, torch.nn.Module]) -> None:
    sounds = [sound(0.5), sound(0.3, 1), sound(4.0, 2)]
    with torch.no_grad():
        states, lengths = read_states(pair[0], sounds)
        cut, counts = read_states(pair[0], sounds, tail=0.2)
    assert lengths.tolist() == [75, 65, 100]
    assert counts.tolist() == [35, 25, 100]
    assert torch.equal(cut, states)  # the third row is the longest


def test_an_exported_layer_takes_any_length_and_contains_only_torch_ops(
    pair: tuple[UnpaddedEncoder, torch.nn.Module],
) -> None:
    layer, width = pair[0].layers[0], pair[0].config.d_model
    shapes = ({1: torch.export.Dim("states", min=4, max=100)}, None)
    program = torch.export.export(layer.requires_grad_(False), (torch.zeros(1, 20, width), None), dynamic_shapes=shapes)
    assert not [node for node in program.graph.nodes if "mkldnn" in str(node.target)]
