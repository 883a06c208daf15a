"""Tests the graph decoder: its links are probabilities, padding has no effect, its options, the paper's sizes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.daspeech.dag_decoder import DagConfig, DagDecoder, Lattice, graph_sizes
from mmdec.daspeech.model import DASpeech, DASpeechConfig, SpeechToUnits
from mmdec.daspeech.units import BOS, EOS, UNK
from mmdec.daspeech.vocoder import Vocoder
from mmdec.training.corpora.cvss import SPECIALS

# the paper's options
PLAIN = DagConfig(d_model=32, ffn=48, heads=4, layers=2, upsample=0.25, max_vertices=64, link_heads=2, link_dim=8)
FULL = dataclasses.replace(PLAIN, positions="sinusoidal", link_prior=True, copy_encoder=True, min_vertices=6)
UNITS, MEMORY = 12, 24
FRAMES = torch.tensor([61, 9, 40])
STATES = torch.tensor([16, 3, 10])


def tiny(config: DagConfig) -> DagDecoder:
    torch.manual_seed(0)
    return DagDecoder(config, UNITS, MEMORY).eval()


def states() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 16, MEMORY)


def lattice(config: DagConfig, given: Tensor | None = None) -> Lattice:
    with torch.inference_mode():
        return tiny(config)(states(), STATES, FRAMES, given)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["paper", "phrasebook"])
def test_links_are_probabilities_of_later_vertices(config: DagConfig):
    made = lattice(config)
    size = made.links.shape[1]
    for row, length in enumerate(made.lengths.tolist()):
        links = made.links[row]
        for i in range(size):
            assert (links[i, : i + 1] == -torch.inf).all()
            assert (links[i, length:] == -torch.inf).all()
            if i < length - 1:
                assert links[i, i + 1 : length].isfinite().all()
                assert links[i].logsumexp(0).item() == pytest.approx(0.0, abs=1e-5)
            else:
                assert (links[i] == -torch.inf).all()


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["paper", "phrasebook"])
def test_a_batch_equals_its_rows_alone(config: DagConfig):
    made, decoder, state = lattice(config), tiny(config), states()
    for row in range(3):
        with torch.inference_mode():
            single = decoder(state[row : row + 1, : STATES[row]], STATES[row : row + 1], FRAMES[row : row + 1])
        length = int(single.lengths)
        assert length == int(made.lengths[row])
        assert single.hidden.shape == (1, length, 32)
        torch.testing.assert_close(made.hidden[row, :length], single.hidden[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(made.emissions[row, :length], single.emissions[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(made.links[row, :length, :length], single.links[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["paper", "phrasebook"])
def test_gradients_are_finite_and_reach_every_weight(config: DagConfig):
    decoder = tiny(config).train()
    made = decoder(states(), STATES, FRAMES)
    links = made.links.masked_fill(made.links == -torch.inf, 0.0)
    (made.hidden.square().mean() + made.emissions.square().mean() + links.square().mean()).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["paper", "phrasebook"])
@pytest.mark.parametrize("lengths", [[15], [15, 2, 9]], ids=["one row", "three rows"])
def test_links_without_a_gradient_equal_those_of_training(config: DagConfig, lengths: list[int]):
    links = tiny(config).links
    sizes = torch.tensor(lengths)
    hidden = 3 * torch.randn(len(lengths), 15, 32, generator=torch.Generator().manual_seed(2))
    trained = links(hidden, sizes)
    assert trained.requires_grad
    with torch.inference_mode():
        decoded = links(hidden, sizes)
    for row, length in enumerate(lengths):  # from padding there are no links; training does not look
        torch.testing.assert_close(decoded[row, :length], trained[row, :length].detach(), atol=1e-5, rtol=0)
        assert (decoded[row, length - 1 :] == -torch.inf).all()
    with torch.no_grad():  # what decoding keeps between calls serves outside of inference mode too
        again = links(hidden.clone(), sizes)
    assert torch.equal(again, decoded)


def test_emissions_are_probabilities():
    torch.testing.assert_close(lattice(PLAIN).emissions.logsumexp(-1), torch.zeros(3, 15), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("upsample", "frames", "vertices"), [(0.5, 7, 3), (0.25, 61, 15), (0.5, 1, 2), (0.5, 0, 2), (1.0, 5000, 64)]
)
def test_graph_sizes_are_clamped(upsample: float, frames: int, vertices: int):
    config = dataclasses.replace(PLAIN, upsample=upsample)
    assert graph_sizes(config, torch.tensor([frames])).tolist() == [vertices]


def test_first_and_last_vertex_have_tokens_of_their_own():
    decoder = tiny(PLAIN)
    decoder.embed_positions = None  # to look at the tokens alone
    with torch.inference_mode():
        lengths = torch.tensor([5, 3])
        x = decoder.inputs(states()[:2], STATES[:2], lengths, None)
        place = decoder.inputs(states()[:2], STATES[:2], lengths, torch.full((2, 5), UNK))
    table = math.sqrt(32) * decoder.embed_tokens.weight
    for row, tokens in enumerate([[BOS, UNK, UNK, UNK, EOS], [BOS, UNK, EOS, UNK, UNK]]):
        for j, token in enumerate(tokens):
            torch.testing.assert_close(x[row, j] - place[row, j], table[token] - table[UNK], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["paper", "phrasebook"])
def test_given_tokens_take_their_vertices(config: DagConfig):
    given = torch.full((3, 15), -1)
    given[0, 4] = 7
    decoder, state = tiny(config), states()
    with torch.inference_mode():
        lengths = graph_sizes(config, FRAMES)
        plain = decoder.inputs(state, STATES, lengths, None)
        shown = decoder.inputs(state, STATES, lengths, given)
        table = math.sqrt(32) * decoder.embed_tokens.weight
    torch.testing.assert_close(shown[0, 4] - plain[0, 4], table[7] - table[UNK], atol=1e-5, rtol=1e-5)
    changed = (shown != plain).any(-1)
    assert changed.nonzero().tolist() == [[0, 4]]
    made = lattice(config, given)
    assert not torch.allclose(made.emissions[0, :4], lattice(config).emissions[0, :4])
    torch.testing.assert_close(made.emissions[1:], lattice(config).emissions[1:])


def test_the_prior_favours_short_jumps():
    links = tiny(dataclasses.replace(PLAIN, link_prior=True)).links
    with torch.inference_mode():
        for linear in (links.query_linear, links.gate_linear):
            linear.weight.zero_()
            linear.bias.zero_()
        made = links(torch.randn(1, 9, 32), torch.tensor([9]))[0]
        slopes = F.softplus(links.prior)
        assert slopes.tolist() == pytest.approx([0.6, 0.15])
        jumps = torch.arange(1, 9)
        heads = (-slopes[:, None] * jumps).log_softmax(-1)
        torch.testing.assert_close(made[0, 1:], heads.logsumexp(0) - math.log(2))
    assert tiny(PLAIN).links.prior is None


def test_the_gates_mix_the_heads():
    links = tiny(dataclasses.replace(PLAIN, link_prior=True)).links
    with torch.inference_mode():
        links.query_linear.weight.zero_()
        links.query_linear.bias.zero_()
        links.gate_linear.weight.zero_()
        links.gate_linear.bias.copy_(torch.tensor([0.0, 50.0]))  # all to the second head
        made = links(torch.randn(1, 5, 32), torch.tensor([5]))[0]
        expected = (-F.softplus(links.prior)[1] * torch.arange(1, 5)).log_softmax(-1)
    torch.testing.assert_close(made[0, 1:], expected)


def test_encoder_states_are_stretched_over_the_graph():
    decoder = tiny(dataclasses.replace(FULL, d_model=MEMORY))
    assert decoder.copy is not None
    with torch.inference_mode():
        nn.init.eye_(decoder.copy.weight)
        decoder.copy.bias.zero_()
        lengths, state_lengths = torch.tensor([9, 7]), torch.tensor([5, 2])
        memory = torch.full((2, 5, MEMORY), torch.nan)
        for row, count in enumerate(state_lengths.tolist()):
            memory[row, :count] = torch.arange(float(count))[:, None]
        plain = decoder.inputs(torch.zeros(2, 5, MEMORY), state_lengths, lengths, None)
        copied = decoder.inputs(memory, state_lengths, lengths, None) - plain
    torch.testing.assert_close(copied[0, :, 0], torch.arange(9) * 0.5, atol=1e-5, rtol=0)
    torch.testing.assert_close(copied[1, :7, 0], torch.arange(7) / 6, atol=1e-5, rtol=0)


def test_positions_may_be_learned():
    assert tiny(PLAIN).embed_positions is not None
    assert tiny(FULL).embed_positions is None
    names = [name for name, _ in tiny(FULL).named_parameters()]
    assert not any("position" in name for name in names)


def millions(module: nn.Module | None) -> float:
    return 0.0 if module is None else sum(parameter.numel() for parameter in module.parameters()) / 1e6


def test_the_paper_has_93_million_parameters():
    with torch.device("meta"):
        model = DASpeech(DASpeechConfig(), 76)  # ARPAbet with stress marks, and the special units
    assert millions(model.encoder) == pytest.approx(33.5, abs=0.1)
    assert millions(model.decoder) == pytest.approx(18.0, abs=0.1)
    assert millions(model.tts) == pytest.approx(41.2, abs=0.1)
    assert model.ctc is None
    assert millions(model) - millions(model.ar) == pytest.approx(93.4, abs=0.1)


def test_the_small_model_ships_in_20_megabytes():
    units = len(SPECIALS) + 43  # flite's phones
    with torch.device("meta"):
        model = DASpeech(DASpeechConfig.small(), units)
        half = SpeechToUnits(DASpeechConfig.small(), units)
        vocoder = Vocoder()
    assert millions(model) + millions(vocoder) <= 10.0
    stored = [*model.state_dict().values(), *vocoder.state_dict().values()]
    assert sum(2 * tensor.numel() + 120 for tensor in stored) <= 20e6  # 120 bytes: name and place in the file
    assert millions(half) <= 8.0


def test_a_configuration_survives_json():
    config = DASpeechConfig.small(dropout=0.2)
    assert DASpeechConfig.from_dict(config.to_dict()) == config
    assert config.dag.dropout == 0.2
