"""Tests the losses of the translation part: against enumeration of all paths, the tokens that GLAT reveals, and
gradients."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.daspeech.acoustic import AcousticBatch
from mmdec.daspeech.dag_decoder import DagConfig, DagDecoder, Lattice
from mmdec.daspeech.model import DASpeech
from mmdec.daspeech.training.data import SpeechBatch
from mmdec.daspeech.training.module import DASpeechModule, autoregressive_loss, ctc_loss, glance, glat_ratio, graph_loss
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.errors import InputError
from mmdec.kernels.dag import dag_best_alignment
from mmdec.training.metrics.text import phone_distance
from tests.support.naive_dag import enumerated_paths
from tests.support.tiny_translator import tiny_sizes

UNITS = 7
TARGETS = torch.tensor([[BOS, 4, 5, 6, EOS], [BOS, 5, EOS, PAD, PAD], [BOS, 4, 4, EOS, PAD]])
TARGET_LENGTHS = torch.tensor([5, 3, 4])
SIZES = torch.tensor([7, 5, 4])


def random_lattice(lengths: Tensor = SIZES, seed: int = 0) -> Lattice:
    """Emissions and links that ask for gradients."""
    torch.manual_seed(seed)
    rows, size = len(lengths), int(lengths.max())
    emissions = torch.randn(rows, size, UNITS, requires_grad=True)
    scores = torch.randn(rows, size, size, requires_grad=True)
    steps = torch.arange(size)
    allowed = (steps[None, :] > steps[:, None]) & (steps < lengths[:, None])[:, None]
    links = scores.masked_fill(~allowed, -1e30).log_softmax(-1).masked_fill(~allowed, -torch.inf)
    return Lattice(torch.randn(rows, size, 8), emissions.log_softmax(-1), links, lengths)


def enumerated(lattice: Lattice, forced: Tensor | None = None) -> float:
    """-mean over rows of log P(Y|X) / M by the list of all paths."""
    match = lattice.matches(TARGETS).detach()
    total = 0.0
    for row, (steps, size) in enumerate(zip(TARGET_LENGTHS.tolist(), SIZES.tolist(), strict=True)):
        part = match[row, :steps, :size].clone()
        for vertex in range(size):
            if forced is not None and forced[row, vertex] >= 0:
                part[:, vertex] = -torch.inf
                part[forced[row, vertex], vertex] = 0.0
        scores = [score for _, score in enumerated_paths(part, lattice.links[row, :size, :size].detach())]
        total -= float(torch.tensor(scores).logsumexp(0)) / steps
    return total / len(TARGETS)


def test_graph_loss_equals_enumeration():
    lattice = random_lattice()
    loss = graph_loss(lattice, TARGETS, TARGET_LENGTHS)
    assert loss.value.item() == pytest.approx(enumerated(lattice), rel=1e-5)
    assert loss.invalid.item() == 0
    assert loss.match.shape == (3, 5, 7)
    assert loss.match[0, 1, 3] == lattice.logits[0, 3, 4]


def test_forced_vertices_emit_their_token_for_sure():
    lattice = random_lattice()
    forced = torch.full((3, 7), -1)
    forced[0, 2], forced[0, 4], forced[1, 0], forced[2, 1] = 1, 3, 0, 1
    loss = graph_loss(lattice, TARGETS, TARGET_LENGTHS, forced)
    assert loss.value.item() == pytest.approx(enumerated(lattice, forced), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.value, lattice.logits)
    for row, vertex in ((0, 2), (0, 4), (1, 0), (2, 1)):
        assert not gradient[row, vertex].any()
    assert gradient[0, 3].any()


def test_rows_that_do_not_fit_are_counted_and_skipped():
    lattice = random_lattice(torch.tensor([7, 2, 4]))
    loss = graph_loss(lattice, TARGETS, TARGET_LENGTHS)
    assert loss.invalid.item() == 1
    assert loss.value.isfinite()
    loss.value.backward()
    single = random_lattice()
    assert graph_loss(single, TARGETS, TARGET_LENGTHS).invalid.item() == 0
    emissions, links = torch.autograd.grad(
        graph_loss(lattice := random_lattice(torch.tensor([7, 2, 4])), TARGETS, TARGET_LENGTHS).value,
        (lattice.logits, lattice.links),
    )
    assert emissions.isfinite().all()
    assert links.isfinite().all()
    assert not emissions[1].any()
    assert emissions[0].any()


def shown(lattice: Lattice, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    states, lengths = torch.zeros(3, 4, 8), torch.tensor([4, 4, 4])
    given, forced = glance(lambda *_: lattice, states, lengths, lengths, TARGETS, TARGET_LENGTHS, ratio)  # type: ignore[arg-type]
    path = dag_best_alignment(lattice.matches(TARGETS), lattice.links, TARGET_LENGTHS, lattice.lengths)
    return given, forced, path


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_glancing_shows_a_share_of_what_is_still_wrong(ratio: float):
    lattice = random_lattice(seed=3)
    given, forced, path = shown(lattice, ratio)
    for row, steps in enumerate(TARGET_LENGTHS.tolist()):
        on_path = [(vertex, int(step)) for vertex, step in enumerate(path[row]) if step >= 0]
        assert len(on_path) == steps
        result = lattice.logits[row].argmax(-1).tolist()
        right = sum(result[vertex] == TARGETS[row, step].item() for vertex, step in on_path)
        assert (given[row] >= 0).sum() == round(ratio * (steps - right))
        for vertex in range(7):
            if forced[row, vertex] >= 0:
                assert forced[row, vertex] == path[row, vertex]
                assert given[row, vertex] == TARGETS[row, forced[row, vertex]]
            else:
                assert given[row, vertex] == -1


def test_glancing_chooses_at_random():
    lattice = random_lattice(seed=3)
    chosen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        chosen.add(tuple(shown(lattice, 0.5)[1].flatten().tolist()))
    assert len(chosen) > 2


def test_a_row_that_does_not_fit_is_shown_nothing():
    given, forced, _ = shown(random_lattice(torch.tensor([7, 2, 4])), 1.0)
    assert (given[1] == -1).all()
    assert (forced[1] == -1).all()
    assert (given[0] >= 0).any()


def test_both_passes_of_glancing_share_their_dropout():
    torch.manual_seed(0)
    decoder = DagDecoder(DagConfig(16, 16, 2, 1, 0.5, 0.5, link_heads=2, link_dim=8), UNITS, 16).train()
    seen: list[Tensor] = []
    decoder.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
    states, lengths, frames = torch.randn(3, 4, 16), torch.tensor([4, 4, 4]), torch.tensor([16, 16, 16])
    glance(decoder, states, lengths, frames, TARGETS, TARGET_LENGTHS, 0.5)
    decoder(states, lengths, frames)
    decoder(states, lengths, frames)
    first, second, later = seen
    assert torch.equal(first, second)
    assert not torch.equal(second, later)


def test_cross_entropy_leaves_padding_out():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, UNITS)
    rows = [
        -logits[row, step].log_softmax(-1)[TARGETS[row, step + 1]]
        for row in range(3)
        for step in range(int(TARGET_LENGTHS[row]) - 1)
    ]
    expected = torch.stack(rows).mean()
    assert autoregressive_loss(logits, TARGETS, 0.0).item() == pytest.approx(expected.item(), rel=1e-5)
    logits[1, 2:] = 1e4  # after the end
    assert autoregressive_loss(logits, TARGETS, 0.0).item() == pytest.approx(expected.item(), rel=1e-5)
    assert autoregressive_loss(logits, TARGETS, 0.1) > expected


def test_ctc_sees_neither_padding_nor_sentences_that_do_not_fit():
    torch.manual_seed(0)
    logits = torch.randn(3, 9, 5, requires_grad=True)
    lengths, text = torch.tensor([9, 4, 2]), torch.tensor([[1, 2, 3], [4, 4, 0], [1, 2, 3]])
    text_lengths = torch.tensor([3, 2, 3])  # the last one needs three states and has two
    loss = ctc_loss(logits, lengths, text, text_lengths)
    single = [
        F.ctc_loss(
            logits[row : row + 1, : lengths[row]].log_softmax(-1).transpose(0, 1),
            text[row : row + 1, : text_lengths[row]],
            lengths[row : row + 1],
            text_lengths[row : row + 1],
        )
        for row in range(2)
    ]
    assert loss.item() == pytest.approx(sum(float(value.detach()) for value in single) / 3, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    assert not gradient[1, 4:].any()


def joint_module(embedding_share: float = 0.0) -> DASpeechModule:
    torch.manual_seed(0)
    return DASpeechModule(
        ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c"],
        size="small",
        glat_start=0.0,
        glat_end=0.0,
        mu=2.0,
        ctc_weight=0.5,
        embedding_share=embedding_share,
        model={**tiny_sizes(), "dag.min_vertices": 8},
    )


def batch() -> SpeechBatch:
    torch.manual_seed(1)
    durations = torch.tensor([[2, 3, 1, 0], [4, 0, 0, 0], [1, 1, 0, 0]])
    acoustic = AcousticBatch(
        TARGET_LENGTHS - 1, durations, 100.0 * (durations > 0), 10.0 * (durations > 0), torch.randn(3, 6, 80),
        durations.sum(1),
    )  # fmt: skip
    return SpeechBatch(
        torch.randn(3, 48, 80),
        torch.tensor([48, 30, 40]),
        TARGETS,
        TARGET_LENGTHS,
        torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]]),
        torch.tensor([3, 2, 1]),
        [(0,), (1,), (2,)],
        acoustic,
    )


def test_the_acoustic_loss_reaches_vertices_and_not_links():
    module = joint_module().train()
    parts = module.losses(batch())
    parts["tts"].backward()
    network = module.network
    assert all(parameter.grad is None for parameter in network.decoder.links.parameters())
    reached = [network.decoder.layers[0].fc1.weight, network.encoder.linear.weight, network.adaptor.fc1.weight]  # type: ignore[union-attr]
    for parameter in reached:
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_the_loss_is_the_weighted_sum_of_its_parts():
    parts = joint_module().eval().losses(batch())
    expected = parts["dag"] + 1.0 * parts["ar"] + 0.5 * parts["ctc"] + 2.0 * parts["tts"]
    assert parts["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(bool(value.isfinite()) for value in parts.values())
    assert parts["invalid"].item() == 0


def test_rows_that_read_embeddings_leave_the_graph_alone():
    module = joint_module(embedding_share=1.0).train()
    module.losses(batch())["tts"].backward()
    assert module.network.decoder.layers[0].fc1.weight.grad is None or not (
        module.network.decoder.layers[0].fc1.weight.grad.any()
    )
    assert module.network.tts.units.weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("posterior", ["paper", "released"])
def test_a_row_that_does_not_fit_speaks_from_its_embeddings(posterior: Literal["paper", "released"]):
    torch.manual_seed(0)
    sizes = {**tiny_sizes(), "dag.min_vertices": 2}
    units = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c"]
    module = DASpeechModule(units, size="small", mu=1.0, posterior=posterior, glat_start=0, glat_end=0, model=sizes)
    network = module.eval().network
    assert isinstance(network, DASpeech)
    short = replace(batch(), lengths=torch.tensor([48, 8, 40]))  # 2 vertices for 3 units
    heard: list[Tensor] = []
    network.tts.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    parts = module.losses(short)
    assert parts["invalid"].item() == 1
    assert parts["tts"].isfinite()
    embedded = network.tts.embed(TARGETS[:, 1:])
    assert torch.equal(heard[0][1], embedded[1])
    assert not torch.isclose(heard[0][[0, 2], :3], embedded[[0, 2], :3]).any(-1).all()


def test_the_joint_stage_needs_acoustic_targets():
    plain = SpeechBatch(*(getattr(batch(), name) for name in SpeechBatch.__dataclass_fields__ if name != "acoustic"))
    with pytest.raises(InputError, match="`acoustic` of the data must be true"):
        joint_module().losses(plain)


def test_glancing_fades_out(monkeypatch: pytest.MonkeyPatch):
    module = DASpeechModule(["<s>", "<pad>", "</s>", "<unk>"], size="small", model=tiny_sizes(), glat_steps=10)
    for step, ratio in ((0, 0.5), (5, 0.3), (10, 0.1), (25, 0.1)):
        monkeypatch.setattr(DASpeechModule, "global_step", step)
        assert glat_ratio(module.options, module.global_step) == pytest.approx(ratio)


def test_phone_distance_is_the_edit_distance():
    assert phone_distance([1, 2, 3], [1, 2, 3]) == 0
    assert phone_distance([1, 2, 3], [2, 3, 4]) == 2
    assert phone_distance([], [1, 1]) == phone_distance([5, 5], []) == 2
