"""Tests the direction of ratios in reports: above 1 the subject is faster, for both orders of the methods."""

from __future__ import annotations

import pytest
import torch

import mmdec
from mmdec.bench.pairing import DepthRecorder, Group, MethodTimings, add_depth_recorders, length_groups, task_groups
from mmdec.core.tree import trees_from_lists
from mmdec.drafters.registry import make_drafter
from mmdec.evaluation.harness import Method
from mmdec.types import Scores, Verdict
from tests.support.bench_reports import compared, measurement
from tests.support.tiny_text import language_model


def test_runs_give_a_row_for_each_clock() -> None:
    rows = compared("medusa", "greedy", "40+ words", "length", 2.64, 2.18, 4.19, size=40.0, unit="words")
    assert [row.timed for row in rows] == ["decoder", "wall clock"]
    assert [row.times for row in rows] == pytest.approx([2.64, 2.18])
    row = rows[0]
    assert (row.size, row.unit, row.kind, row.inputs, row.pairs) == (40.0, "words", "length", 4, 8)
    assert (row.subject_ms, row.baseline_ms, row.tokens_per_round) == pytest.approx((250.0, 660.0, 4.19))


def test_inputs_where_the_baseline_differs_are_left_out() -> None:
    ours, theirs = [measurement(1.0, 1.0, 3, 6)], [measurement(2.0, 4.0)]
    wrong = [measurement(9.0, 9.0)]
    result = MethodTimings({"a": [ours, ours], "b": [theirs, wrong]}, {"b": [True, False]}, {}, "processor")
    assert [(row.timed, row.times, row.inputs) for row in result.rows("a", "b", Group("all", "all", [0, 1]))] == [
        ("processor", 2.0, 1),
        ("wall clock", 4.0, 1),
    ]
    assert result.rows("a", "b", Group("second", "all", [1])) == []


def test_inputs_are_grouped_by_length_and_by_task() -> None:
    groups = length_groups([1, 8, 11, 90, 9], ((1, 8), (9, 39), (40, 100)), "tokens")
    assert [(group.name, group.size, group.indices) for group in groups] == [
        ("1-8 tokens", 4.5, [0, 1]),
        ("9-39 tokens", 24.0, [2, 4]),
        ("40+ tokens", 40.0, [3]),
    ]
    groups = task_groups(["b", "a", "b"])
    assert [(group.name, group.kind, [*group.indices]) for group in groups] == [
        ("all", "all", [0, 1, 2]),
        ("task a", "task", [1]),
        ("task b", "task", [0, 2]),
    ]


def verdict(paths: list[list[int]]) -> Verdict:
    path = torch.tensor(paths)
    rows = torch.zeros(len(paths), dtype=torch.long)
    return Verdict(path, rows, rows.bool(), path, rows)


def test_shares_of_known_drafts() -> None:
    recorder = DepthRecorder(make_drafter("lookup"))
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
    (method,), recorders = add_depth_recorders([Method.with_drafter("lookup", "lookup", 4)])
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
    methods = [Method.greedy(), Method.with_drafter("plain", None), Method.with_drafter("recycling", "recycling")]
    watched, recorders = add_depth_recorders(methods)
    assert [method.name for method in watched] == ["greedy", "plain", "recycling"]
    assert recorders.keys() == {"recycling"}
    assert watched[:2] == methods[:2]
    with pytest.raises(mmdec.InputError, match="`drafter`"):
        add_depth_recorders([Method.with_drafter("x", "eagle")])
