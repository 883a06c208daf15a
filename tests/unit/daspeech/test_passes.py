"""Tests the passes that `translate_speech` reports, on devices where the decoder seldom checks whether it has ended."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmdec.daspeech import ar_decoder
from mmdec.daspeech.ar_decoder import ArCache, ArConfig, ArDecoder
from mmdec.daspeech.passes import Pass, PassListener
from mmdec.daspeech.units import EOS, PAD

UNITS = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c"]


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize(
    ("units", "heard"),
    [
        ([4, 5, EOS, 6, 6], [["a"], ["b"], []]),
        ([4, PAD, 5, EOS], [["a"], []]),  # a unit that is PAD ends the row, too
        ([EOS], [[]]),
        ([4] * 40, [["a"]] * 20 + [[]]),  # cut by the limit
    ],
)
def test_no_pass_is_reported_after_the_end(
    units: list[int], heard: list[list[str]], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """every: steps between two looks, 16 as on a GPU."""
    monkeypatch.setattr(ar_decoder, "END_CHECK_STEPS", {"cpu": every})
    decoder = ArDecoder(ArConfig(d_model=8, ffn=8, heads=2, layers=1), len(UNITS), 8).eval()

    def step(tokens: Tensor, cache: ArCache) -> Tensor:
        unit = units[min(cache.length, len(units) - 1)]
        cache.length += 1
        return torch.eye(len(UNITS))[[unit]]

    monkeypatch.setattr(decoder, "step", step)
    passes: list[Pass] = []
    listener = PassListener(passes.append, 0, UNITS, torch.device("cpu"), limit=20)
    inputs = torch.zeros(1, 3, 8), torch.tensor([3]), 20
    for step_units in decoder.greedy_steps(*inputs):
        listener.step(step_units)
    (row,) = decoder.generate(*inputs)
    assert [pass_.units for pass_ in passes] == heard
    assert len(passes) == len(row) + 1  # as `Translation.passes` has it
