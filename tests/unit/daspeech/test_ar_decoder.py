"""Tests the autoregressive decoder: its cache, its batches, and greedy decoding against a simple reference."""

import pytest
import torch
from torch import Tensor

from mmdec.daspeech.ar_decoder import ArConfig, ArDecoder
from mmdec.daspeech.units import BOS, EOS, PAD

UNITS, MEMORY = 6, 24
LENGTHS = torch.tensor([7, 3, 5])


def tiny(seed: int = 0, units: int = UNITS) -> ArDecoder:
    torch.manual_seed(seed)
    model = ArDecoder(ArConfig(d_model=32, ffn=48, heads=4, layers=2), units, MEMORY).eval()
    with torch.no_grad():  # so that sentences end, at different lengths, and do not repeat one unit for ever
        model.embed_tokens.weight[EOS] *= 1.5
        for layer in model.layers:
            for linear in (layer.self_attn.kv, layer.encoder_attn.kv, layer.fc2):
                linear.weight *= 6
    return model


def states(seed: int = 0) -> Tensor:
    torch.manual_seed(100 + seed)
    return torch.randn(3, 7, MEMORY)


def test_the_cache_gives_what_the_full_pass_gives():
    model, state = tiny(), states()
    torch.manual_seed(1)
    tokens = torch.cat([torch.full((3, 1), BOS), torch.randint(3, UNITS, (3, 8))], 1)
    with torch.inference_mode():
        full = model(tokens, state, LENGTHS)
        cache = model.start(state, LENGTHS, 9)
        for place in range(9):
            step = model.step(tokens[:, place], cache)
            torch.testing.assert_close(step, full[:, place], atol=1e-5, rtol=1e-5)
    assert cache.length == 9


def test_attention_is_causal():
    model, state = tiny(), states()
    tokens = torch.tensor([[BOS, 3, 4, 5], [BOS, 3, 5, 4], [BOS, 3, 3, 3]])
    with torch.inference_mode():
        made = model(tokens, state[:1].expand(3, -1, -1), torch.tensor([7, 7, 7]))
    torch.testing.assert_close(made[0, :2], made[1, :2])
    torch.testing.assert_close(made[0, :2], made[2, :2])
    assert not torch.allclose(made[0, 2], made[1, 2])


def naive_greedy(model: ArDecoder, memory: Tensor, most: int, least: int = 0) -> list[int]:
    units: list[int] = []
    while len(units) < most:
        tokens = torch.tensor([[BOS, *units]])
        scores = model(tokens, memory, torch.tensor([memory.shape[1]]))[0, -1]
        if len(units) < least:
            scores[EOS] = -torch.inf
        best = int(scores.argmax())
        if best in (EOS, PAD):
            break
        units.append(best)
    return units


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [0, 4])
def test_greedy_equals_a_naive_loop_alone_and_in_a_batch(seed: int, least: int):
    model, state = tiny(seed, units=9), states(seed)
    together = model.generate(state, LENGTHS, 8, least)
    with torch.inference_mode():
        for row, length in enumerate(LENGTHS.tolist()):
            part = state[row : row + 1, :length]
            single = model.generate(part, LENGTHS[row : row + 1], 8, least)
            assert together[row] == single[0] == naive_greedy(model, part, 8, least)


def test_sentences_end_at_different_lengths():
    """Otherwise the test above would prove nothing."""
    lengths = {len(row) for seed in range(4) for row in tiny(seed, units=9).generate(states(seed), LENGTHS, 8)}
    assert len(lengths) > 1


def test_padding_does_not_matter():
    model, state = tiny(), states()
    state[1, 3:] = 1e3
    first = model.generate(state, LENGTHS, 8)
    state[1, 3:] = -5.0
    assert model.generate(state, LENGTHS, 8) == first


def test_the_length_can_be_forced():
    rows = tiny(units=9).generate(states(), LENGTHS, 5, min_length=5)
    assert [len(row) for row in rows if PAD not in row] == [5, 5, 5]


def test_an_immediate_end_is_an_empty_list():
    model = tiny()
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[EOS] = 1.0
        for layer in model.layers:
            layer.final_layer_norm.bias.fill_(1.0)
    assert model.generate(states(), LENGTHS, 8) == [[], [], []]
