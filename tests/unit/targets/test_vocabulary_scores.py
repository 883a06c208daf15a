"""Tests the matrix product of an LM head with a large vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmdec.kernels.float16_linear import MIN_PASSES_BEFORE_COPY, half_precision_copies
from mmdec.kernels.tokenwise import MAX_PRODUCT_ROWS
from mmdec.whisper.output_layer import MIN_COPIED_VOCABULARY, vocabulary_scores


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3), (2, 2), (1, 8), (3, 3), (1, 10), (1, 11), (4, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_scores_equal_the_output_layer(shape: tuple[int, int], dtype: torch.dtype, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    output = nn.Linear(24, MIN_COPIED_VOCABULARY, bias=False).to(dtype)
    states = torch.randn(*shape, 24, generator=generator).to(dtype)
    if packed:
        half_precision_copies(output).passes = MIN_PASSES_BEFORE_COPY
    with torch.inference_mode():
        result, expected = vocabulary_scores(output, states), output(states)
        if dtype == torch.bfloat16:  # each row's bits are those that it has among others
            rows = states.flatten(0, 1)
            expected = output(F.pad(rows, (0, 0, 0, MAX_PRODUCT_ROWS - len(rows))))[: len(rows)].view_as(expected)
    assert result.shape == expected.shape
    assert result.is_contiguous()
    assert torch.equal(result.argmax(-1), expected.argmax(-1))
    assert (result - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 0)


def test_other_output_layers_are_called() -> None:
    heard: list[int] = []
    hooked, biased = nn.Linear(4, MIN_COPIED_VOCABULARY, bias=False), nn.Linear(4, MIN_COPIED_VOCABULARY)
    hooked.register_forward_hook(lambda *_: heard.append(1))
    states = torch.randn(1, 2, 4)
    assert torch.equal(vocabulary_scores(hooked, states), hooked(states))
    assert heard == [1, 1]
    assert torch.equal(vocabulary_scores(biased, states), biased(states))


def test_copies_are_made_when_they_pay_and_after_weights_change() -> None:
    layer, made = nn.Linear(4, 4), list[int]()

    def make() -> int:
        made.append(1)
        return len(made)

    copies = half_precision_copies(layer)
    assert copies.get(make) is None
    copies.passes += MIN_PASSES_BEFORE_COPY
    assert copies.get(make) == half_precision_copies(layer).get(make) == 1
    with torch.no_grad():
        layer.weight.add_(1)
    assert half_precision_copies(layer).get(make) is None
    assert half_precision_copies(nn.Linear(4, 4, dtype=torch.bfloat16)).usable is False


def test_weights_that_change_before_they_are_copied_cost_no_copies() -> None:
    layer = nn.Linear(4, 4)
    copies = half_precision_copies(layer)
    copies.passes = MIN_PASSES_BEFORE_COPY
    with torch.no_grad():
        layer.weight.add_(1)
    assert copies.get(lambda: "made") == "made"
    assert half_precision_copies(layer) is copies
    assert not half_precision_copies(layer.to(torch.bfloat16)).usable


def test_copies_may_be_made_before_the_first_pass() -> None:
    assert half_precision_copies(nn.Linear(4, 4)).get(lambda: "made", after=0) == "made"


def test_without_a_kernel_there_is_no_copy() -> None:
    def fails() -> None:
        raise RuntimeError("no kernel")

    copies = half_precision_copies(nn.Linear(4, 4))
    copies.passes = MIN_PASSES_BEFORE_COPY
    assert copies.get(fails) is None
    assert not copies.usable
