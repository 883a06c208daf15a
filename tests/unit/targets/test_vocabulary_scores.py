"""The product with a large vocabulary, for few columns computed the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmdec.targets.whisper_vocabulary import FEW, LARGE, GreedyWords, alike, vocabulary_scores


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3), (2, 2), (1, 8), (3, 3), (1, 10), (1, 11), (4, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_output_layer_s_own(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    output = nn.Linear(24, LARGE, bias=False).to(dtype)
    states = torch.randn(*shape, 24, generator=generator).to(dtype)
    with torch.inference_mode():
        found, wanted = vocabulary_scores(output, states), output(states)
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert (found - wanted).abs().max() <= (2e-6 if dtype == torch.float32 else 0)


def test_what_is_not_a_plain_output_layer_is_called() -> None:
    heard: list[int] = []
    hooked, biased = nn.Linear(4, LARGE, bias=False), nn.Linear(4, LARGE)
    hooked.register_forward_hook(lambda *_: heard.append(1))
    states = torch.randn(1, FEW[0], 4)
    assert torch.equal(vocabulary_scores(hooked, states), hooked(states))
    assert heard == [1, 1]
    assert torch.equal(vocabulary_scores(biased, states), biased(states))


def test_runs_share_what_they_ask_of_scores_only_where_it_is_the_same() -> None:
    barred = torch.tensor([True, False, False])
    one, same = (GreedyWords(barred.clone(), slice(2, None)) for _ in range(2))
    assert alike([one]) is one
    assert alike([one, same]) is one
    for other in (None, GreedyWords(~barred, slice(2, None)), GreedyWords(barred, slice(1, None))):
        assert alike([one, other]) is None
        assert alike([other, one]) is None
