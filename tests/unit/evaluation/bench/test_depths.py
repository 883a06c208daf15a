"""Acceptance by depth, against drafts whose fate is known; the text and the drafter's own work stay what they are."""

from __future__ import annotations

import pytest
import torch

import mmdec
from mmdec.decode.tree import trees_from_lists
from mmdec.drafters.registry import named_drafter
from mmdec.evaluation.bench.pairing import DepthRecorder, recorded
from mmdec.evaluation.quality.harness import Method
from mmdec.types import Scores, Verdict
from tests.support.tiny_text import language_model


def verdict(paths: list[list[int]]) -> Verdict:
    path = torch.tensor(paths)
    rows = torch.zeros(len(paths), dtype=torch.long)
    return Verdict(path, rows, rows.bool(), path, rows)


def test_shares_of_known_drafts() -> None:
    recorder = DepthRecorder(named_drafter("lookup"))
    recorder.drafter = Silent()
    roots = torch.tensor([1, 1])
    # A chain of three and a tree two deep; the first is accepted to depth 2, the second not at all.
    draft = trees_from_lists(roots, [([5, 6, 7], [0, 1, 2]), ([5, 6, 7], [0, 0, 1])])
    recorder.update(None, draft, Scores(torch.empty(0)), verdict([[0, 1, 2], [0, -1, -1]]))
    assert recorder.shares() == [0.5, 0.5, 0.0]
    plain = trees_from_lists(roots, [([], []), ([], [])])
    recorder.update(None, plain, Scores(torch.empty(0)), verdict([[0], [0]]))
    assert recorder.shares() == [0.5, 0.5, 0.0]  # a round without a draft says nothing


class Silent:
    """A drafter whose update does nothing."""

    def update(self, *_: object) -> None:
        pass


def test_a_recorded_run_says_the_same_and_counts() -> None:
    model = language_model()
    (method,), recorders = recorded([Method.drafted("lookup", "lookup", 4)])
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    drafter = method.options["drafter"]
    assert drafter is recorders["lookup"]
    out = mmdec.generate(model, ids, drafter, num_speculative_tokens=4, max_new_tokens=20, do_sample=False)
    plain = mmdec.generate(model, ids, None, max_new_tokens=20, do_sample=False)
    assert out.sequences.tolist() == plain.sequences.tolist()
    chains = [(round_.drafted[0], round_.accepted[0]) for round_ in out.rounds]
    shares = [
        sum(accepted >= depth for _, accepted in chains) / sum(drafted >= depth for drafted, _ in chains)
        for depth in range(1, max(drafted for drafted, _ in chains) + 1)
    ]
    assert recorders["lookup"].shares() == shares
    assert 1 <= len(shares) <= 4
    assert any(shares)


def test_only_drafters_are_recorded() -> None:
    methods = [Method.greedy(), Method.drafted("plain", None), Method.drafted("recycling", "recycling")]
    watched, recorders = recorded(methods)
    assert [method.name for method in watched] == ["greedy", "plain", "recycling"]
    assert recorders.keys() == {"recycling"}
    assert watched[:2] == methods[:2]
    with pytest.raises(mmdec.InputError, match="`drafter`"):
        recorded([Method.drafted("x", "eagle")])
