"""The evidence for a translation's confidence, counted by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import mmdec
from mmdec.daspeech.evidence import head_evidence, path_evidence
from mmdec.daspeech.model import EncodedSpeech
from mmdec.drafters.ctc.network import best_pieces
from mmdec.tasks.confidence import UNCERTAINTY_OFFSET
from tests.conftest import buzz


def source(logits: torch.Tensor, lengths: torch.Tensor) -> EncodedSpeech:
    heard = best_pieces(logits, lengths, 2)
    return EncodedSpeech(torch.zeros(len(logits), 1, 1), heard.lengths, heard.lengths, [9] * len(logits), heard)


def test_evidence_comes_from_frames_and_pieces() -> None:
    probabilities = torch.tensor([[[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.2, 0.6, 0.2], [0.5, 0.2, 0.3]],
                            [[0.1, 0.2, 0.7], [0.9, 0.1, 0.0], [0.3, 0.3, 0.4], [0.3, 0.3, 0.4]]])  # fmt: skip
    first, second = head_evidence(source((probabilities + 1e-9).log(), torch.tensor([4, 2])))
    frames = -sum(map(math.log, (0.8, 0.6, 0.6, 0.5))) / 4
    assert first["frames"] == pytest.approx(math.log(frames + UNCERTAINTY_OFFSET), abs=1e-4)
    assert first["rate"] == pytest.approx(math.log(1 / 4))
    assert first["heard_mean"] == pytest.approx(math.log(-math.log(0.6 / 0.8) + UNCERTAINTY_OFFSET), abs=1e-4)
    assert first["heard_count"] == 0.0
    frames = -sum(map(math.log, (0.7, 0.9))) / 2
    assert second["frames"] == pytest.approx(math.log(frames + UNCERTAINTY_OFFSET), abs=1e-4)
    assert second["rate"] == pytest.approx(math.log(1 / 2))
    assert second["heard_mean"] == pytest.approx(math.log(-math.log(0.7 / 0.9) + UNCERTAINTY_OFFSET), abs=1e-4)


def test_a_source_without_a_head_has_no_evidence() -> None:
    assert head_evidence(EncodedSpeech(torch.zeros(2, 1, 1), torch.ones(2), torch.ones(2), [9, 9])) == [{}, {}]


def test_a_path_counts_for_each_of_its_vertices() -> None:
    seen = path_evidence(torch.tensor([-6.0, -torch.inf]), torch.tensor([3, 2]))
    assert seen == [
        {"graph": pytest.approx(math.log(2 + UNCERTAINTY_OFFSET))},
        {"graph": pytest.approx(math.log(30 + UNCERTAINTY_OFFSET))},
    ]


@pytest.mark.parametrize("strategy", ["lookahead", "reranked", "autoregressive", "verified"])
def test_a_translation_carries_the_evidence_its_curve_is_fitted_to(tiny_heard_model: Path, strategy: str) -> None:
    (out,) = mmdec.load(tiny_heard_model, "cpu").translate([torch.from_numpy(buzz(1.0))], strategy)
    names = {"mean", "worst", "count", "differs", "heard_mean", "heard_worst", "heard_count", "frames", "rate", "graph"}
    assert out.evidence.keys() == names
    assert all(math.isfinite(value) for value in out.evidence.values())
    # without a fitted curve it is the mean probability of the units, not of what was heard
    assert out.confidence == pytest.approx(math.exp(min(UNCERTAINTY_OFFSET - math.exp(out.evidence["mean"]), 0)))
