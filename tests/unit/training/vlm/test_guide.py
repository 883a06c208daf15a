"""The guide of the first heads: against transformers' own attention, and where its gradient goes; the pointer to a
patch's cells against a loop; and the whitened projector, which says what the plain one says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.training.vlm.module import VlmModule, turn_weights
from mmdec.training.vlm.network import Shape, Whitening
from mmdec.training.vlm.tokens import BEGIN, END, IMAGE, NOWHERE, PAD, Batch, pack
from mmdec.types import InputError

SHAPE = Shape(32, 16, 16, 2, 2, 24, 24, 3, 2, 12, 32, 256)  # three layers of two heads of 12
UNITS = [BEGIN, END, PAD, IMAGE, *(f"word{number}" for number in range(36)), "ĠB", "A", "7", "Ġ"]
B, A, SEVEN, SPACE = range(40, 44)
LEAD = np.array([0, 5, 3, 3, 3, 3, 6])  # the picture's four patches are tokens 2 to 5
READ = [[0, NOWHERE, 3, 2], [1, 1, NOWHERE, NOWHERE]]  # by the tokens of each row's answer


def module(guided: tuple[int, ...], **more: Any) -> VlmModule:
    """Its projector measured on `batch`, and folded: the model is the one that transformers knows."""
    made = VlmModule(UNITS, SHAPE, guided=guided, half=False, **more)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(2)
        made.losses(batch(READ), False)
    made.whitening.fold(made.model.model.multi_modal_projector.linear_1)
    return made


def batch(read: list[list[int]]) -> Batch:
    """Two rows of one question each, without padding: every token sees all before it, as in transformers."""
    draw = np.random.default_rng(0)
    rows = [pack(LEAD, [(draw.integers(7, 40, 5), draw.integers(7, 40, 4), np.array(row))], 16, 2) for row in read]
    columns = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
    pixels = torch.from_numpy(draw.integers(0, 255, (2, 3, 32, 32)).astype(np.uint8))
    return Batch(pixels, *columns, cells=torch.ones(2, 4, 8, 2, dtype=torch.uint8))


def naive(made: VlmModule, rows: Batch, guided: tuple[int, ...]) -> Tensor:
    """From the attention that transformers returns, token by token."""
    stock: Any = made.model
    seen = stock(input_ids=rows.tokens, pixel_values=rows.pixels.float() / 127.5 - 1, output_attentions=True).attentions
    losses = [
        -seen[layer][row, 0, len(LEAD) + 5 - 1 + at, 2 + patch].log()  # looks where the token before it stands
        for layer in guided
        for row, answer in enumerate(READ)
        for at, patch in enumerate(answer)
        if patch != NOWHERE
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("guided", [(0,), (1,), (0, 2)])
def test_the_loss_is_that_of_transformers_attention(guided: tuple[int, ...]) -> None:
    made, rows = module(guided), batch(READ)
    parts = made.losses(rows, False)
    made.whitening.fold(made.model.model.multi_modal_projector.linear_1)  # as after each step
    expected = naive(made, rows, guided)
    assert abs(expected.item() - np.log(13)) > 1e-3  # no even look
    torch.testing.assert_close(parts["guide"], expected, rtol=1e-5, atol=1e-5)
    whole = parts["answers"] + 0.3 * parts["cells"] + 0.3 * (parts["guide"] + parts["pointer"])
    torch.testing.assert_close(parts["loss"], whole)


def test_the_gradient_goes_through_the_first_head_alone() -> None:
    made = module((1,))
    made.losses(batch(READ), False)["guide"].backward()
    below, guided, above = made.model.model.language_model.layers
    for part in (guided.self_attn.q_proj, guided.self_attn.k_proj):
        assert (part.weight.grad[:12].abs().sum(1) > 0).all()
        assert (part.weight.grad[12:] == 0).all()
    assert (guided.input_layernorm.weight.grad != 0).any()
    for part in (guided.self_attn.v_proj, guided.self_attn.o_proj, guided.mlp.up_proj, *above.modules()):
        assert getattr(part, "weight", None) is None or part.weight.grad is None
    for parameter in below.parameters():  # what the guided layer reads was made there, by all of it
        assert (parameter.grad != 0).any()
    tower = made.model.model.vision_tower.encoder.layers[0]
    assert (tower.self_attn.q_proj.weight.grad != 0).any()


def test_a_step_against_the_gradient_looks_closer() -> None:
    made, rows = module((1,)), batch(READ)
    before = made.losses(rows, False)["guide"]
    before.backward()
    with torch.no_grad():
        for parameter in made.model.model.language_model.layers[1].self_attn.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / parameter.grad.norm()
    assert made.losses(rows, False)["guide"] < before


def test_rows_that_read_nothing_cost_nothing() -> None:
    made = module((1,))
    parts = made.losses(batch([[NOWHERE] * 4] * 2), False)
    assert parts["guide"].item() == 0
    parts["loss"].backward()
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None)


def test_without_weight_nothing_is_watched() -> None:
    plain = module((), guide_weight=0.3).losses(batch(READ), False)
    off = module((1,), guide_weight=0.0).losses(batch(READ), False)
    assert "guide" not in plain
    assert "guide" not in off
    assert torch.equal(plain["loss"], off["loss"])


def test_the_pointer_is_taught_the_cell_of_the_character_that_is_read() -> None:
    made, rows = module((0, 2)), batch([[0, 3, 3, 1], [2, 2, 2, NOWHERE]])
    first = len(LEAD) + 5 - 1  # where the token before the answer stands
    rows.labels[0, first : first + 4] = torch.tensor([B, A, SEVEN, SPACE])
    rows.labels[1, first : first + 3] = torch.tensor([SEVEN, A, 9])
    rows.cells[..., 0] = 0
    a, b, seven = 1, 2, 27 + 7  # letters, then digits: the kinds of cells
    rows.cells[0, 0, 5, 0] = b
    rows.cells[0, 3, :2, 0] = a  # twice: it could be either
    rows.cells[0, 3, 6, 0] = seven
    rows.cells[0, 1, 1:, 0] = a  # of a patch that is read by a space, one cell is empty
    rows.cells[1, 2, 3, 0], rows.cells[1, 2, 4, 0] = a, seven
    states = torch.randn(2, rows.tokens.shape[1], 24)
    wanted = {(0, 0): 5, (0, 2): 6, (1, 0): 4, (1, 1): 3}
    losses, right = [], []
    for (row, at), cell in wanted.items():
        state = states[row, first + at]
        scores = made.pointer(state / state.square().mean().sqrt())
        losses.append(-scores.log_softmax(-1)[cell])
        right.append(float(scores.argmax() == cell))
    loss, share = made.pointer_loss(states, rows)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-5)
    assert share.item() == pytest.approx(np.mean(right))


def test_a_whitened_projector_is_the_plain_one() -> None:
    torch.manual_seed(0)
    states = torch.randn(40, 4, 16).double() @ torch.randn(16, 16).double() + 3  # far from white
    whitening, plain = Whitening(16, 24).double(), torch.nn.Linear(16, 24).double()
    assert not whitening.measured
    whitening.measure(states, plain)
    assert whitening.measured
    torch.testing.assert_close(whitening(states), plain(states))  # goes on from a layer that was trained
    white = ((states - whitening.middle) @ whitening.turn).flatten(0, 1)
    torch.testing.assert_close(white.mean(0), torch.zeros(16).double(), rtol=0, atol=1e-8)
    before, after = (torch.linalg.eigvalsh(part.flatten(0, 1).T.cov(correction=0)) for part in (states, white[None]))
    torch.testing.assert_close(after, before / (before + 0.01 * before.mean()))  # 1 but where there is next to nothing
    assert float(after[-1] / after[0]) < 0.1 * float(before[-1] / before[0])
    with torch.no_grad():
        whitening.first.weight.normal_()
        whitening.first.bias.normal_()
    whitening.fold(plain)
    torch.testing.assert_close(plain(states), whitening(states))


def test_only_layers_that_are_there_are_guided() -> None:
    for wrong in ((3,), (-1, 0)):
        with pytest.raises(InputError, match="`guided` must be numbers of layers from 0 to 2"):
            module(wrong)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_an_answer_s_weight_is_by_its_length(power: float) -> None:
    turns = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, -1]])
    asked = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    lengths = torch.tensor([3.0, 3.0, 3.0, 1.0, 2.0, 2.0])  # of the answer of each column that counts
    expected = lengths**-power / (lengths**-power).sum()
    assert torch.allclose(turn_weights(turns, asked, power), expected)
