"""Tests the fast pass: when it is used, that runs do not share memory, and that rejected drafts leave no trace."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import mmdec
from mmdec.decode.tree import chains, trees_from_lists
from mmdec.ops.kernels import graphs_why_not
from mmdec.targets import fast_pass as passes
from mmdec.targets.fast_pass import FastPass, Replay, bucket, columns_for, fast_pass
from mmdec.targets.text import TextTarget
from mmdec.types import CACHE, Draft, Needs, Scores, Verdict
from tests.support.recorded_graphs import recorded_graphs
from tests.support.tiny_text import VOCABULARY, language_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])


@pytest.fixture
def model() -> Iterator[Any]:
    mmdec.default_statistics().clear()
    network = language_model("llama", 7)
    fast_pass(network).enabled = True
    with recorded_graphs():
        yield network


def said(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return mmdec.generate(model, inputs, "lookup", num_speculative_tokens=4, **{**OPTIONS, **options}).sequences


def begun(model: Any, rows: int = 1) -> tuple[TextTarget, Any]:
    target = TextTarget(model)
    return target, target.prefill({"input_ids": IDS.repeat(rows, 1)}, Needs(layers=(0, -1)))[0]


def verdict(path: list[int], rows: int = 1) -> Verdict:
    ones = torch.ones(rows, dtype=torch.long)
    return Verdict(torch.tensor([path] * rows), ones, ones == 0, ones[:, None], ones)


# --- when it is used -------------------------------------------------------------------------------------------------


def test_it_is_off_on_a_cpu_unless_asked_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = fast_pass(model)
    assert passes.why_not() is None
    passes.enabled = None
    assert passes.why_not() == (
        "the model lies on cpu, which gains nothing by it" if torch.cuda.is_available() else "no GPU"
    )
    said(model)
    assert passes.bytes == 0
    passes.enabled = False
    assert passes.why_not() == "it is switched off"
    monkeypatch.setenv("MMDEC_GRAPHS", "0")
    assert graphs_why_not(torch.device("cuda")) == "MMDEC_GRAPHS=0 keeps them off"


def test_what_a_graph_would_leave_out_keeps_it_off(model: Any) -> None:
    passes = fast_pass(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert passes.why_not() == "hooks hang on the model"
    handle.remove()
    model.model.layers[1].forward = model.model.layers[1].forward
    assert passes.why_not() == "hooks hang on the model"
    del model.model.layers[1].forward
    model(IDS, output_hidden_states=True)  # transformers' recorders stay, and do nothing
    assert passes.why_not() is None
    model.train()
    assert passes.why_not() == "the model is being trained"
    model.eval()
    model.lm_head.to("meta")
    assert passes.why_not() == "the model lies on several devices"


def test_a_pass_that_cannot_be_captured_ends_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, norm = said(model), type(model.model.norm).forward

    def waiting(module: Any, states: Tensor) -> Tensor:
        return norm(module, states) * float(states.abs().max() >= 0)

    monkeypatch.setattr(type(model.model.norm), "forward", waiting)
    fast_pass(model).clear()
    assert torch.equal(said(model), wanted)
    reason = fast_pass(model).why_not()
    assert reason is not None
    assert reason.startswith("its pass cannot be captured: operation not permitted")
    assert "\n" not in reason
    assert torch.equal(said(model), wanted)


def test_models_have_one_each_for_as_long_as_they_live(model: Any) -> None:
    other = language_model("llama", 8)
    passes = fast_pass(other)
    assert isinstance(passes, FastPass)
    assert fast_pass(model) is fast_pass(model) is not passes is fast_pass(other)
    passes.enabled = True
    said(other)
    assert passes.bytes > 0
    passes.clear()  # the stand-in for graphs keeps what it read
    assert passes.why_not() is None
    del other
    gc.collect()
    assert passes.why_not() == "the model is gone"


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (2, 2), (3, 4), (63, 64), (64, 64), (65, 128)])
def test_buckets_are_powers_of_two(count: int, wanted: int) -> None:
    assert bucket(count) == wanted


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, 256), (256, 256), (257, 512), (2000, 2048), (4097, 5120), (33000, 40960)]
)
def test_slots_are_little_wider_than_asked_for(count: int, wanted: int) -> None:
    assert columns_for(count) == wanted


# --- memory ----------------------------------------------------------------------------------------------------------


def test_runs_follow_each_other_in_one_slot_and_share_its_graphs(model: Any) -> None:
    with recorded_graphs(step=64) as graphs:
        wanted = said(model)
        made, held = graphs.made, fast_pass(model).bytes
        assert made > 1
        assert fast_pass(model).captured == made
        assert held > 0
        for _ in range(3):
            assert torch.equal(said(model), wanted)
        assert (graphs.made, fast_pass(model).bytes) == (made, held)
        fast_pass(model).clear()
        gc.collect()
        assert fast_pass(model).bytes == 0


def test_runs_at_the_same_time_have_a_slot_each(model: Any) -> None:
    other = torch.tensor([[9, 8, 9, 8, 9, 8]])
    wanted = [said(model, ids)[:, ids.shape[1] :].tolist()[0] for ids in (IDS, other)]
    streams = [
        mmdec.stream(model, {"input_ids": ids}, "lookup", num_speculative_tokens=4, **OPTIONS) for ids in (IDS, other)
    ]
    texts: list[list[int]] = [[], []]
    while any(len(text) < 20 for text in texts):
        for text, stream in zip(texts, streams, strict=True):
            for round_ in [next(stream, None)]:
                text += round_.tokens[0] if round_ else []
    assert texts == wanted


def test_a_cache_that_somebody_keeps_is_nobody_elses(model: Any) -> None:
    held = DynamicCache(config=model.config)
    first = said(model, **{CACHE: held})
    before = [layer.keys.clone() for layer in held.layers if layer.keys is not None]
    for _ in range(3):
        said(model, torch.tensor([[9, 8, 9, 8, 9, 8]]))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(held.layers, before, strict=True))
    longer = torch.cat([first, torch.tensor([[11, 12]])], 1)
    wanted = model.generate(longer, attention_mask=torch.ones_like(longer), **OPTIONS)
    twin = copy.deepcopy(held)
    assert all(type(layer) is DynamicLayer for layer in twin.layers)
    assert torch.equal(said(model, longer, **{CACHE: held}), wanted)
    stock = model.generate(longer, attention_mask=torch.ones_like(longer), **{CACHE: twin}, **OPTIONS)
    assert torch.equal(stock, wanted)
    more = torch.cat([wanted, torch.tensor([[13]])], 1)  # stock code writes on in the slot, and outgrows it
    stock = model.generate(more, attention_mask=torch.ones_like(more), **{CACHE: held}, **OPTIONS)
    assert torch.equal(stock, model.generate(more, attention_mask=torch.ones_like(more), **OPTIONS))


def test_weights_that_moved_are_not_looked_for_where_they_lay(model: Any) -> None:
    with recorded_graphs() as graphs:
        wanted, made = said(model), graphs.made
        model.model.norm.weight = torch.nn.Parameter(-model.model.norm.weight.detach())
        changed = said(model)
        assert graphs.made > made
        fast_pass(model).enabled = False
        assert torch.equal(changed, said(model))
        assert not torch.equal(changed, wanted)


def test_what_an_earlier_run_left_is_a_number(model: Any) -> None:
    """A mask hides what it hides only if it is one."""
    wanted = said(model)
    for slot in fast_pass(model)._idle:
        for pool in slot.pools:
            pool.fill_(torch.nan)
    assert torch.equal(said(model), wanted)


# --- drafts ----------------------------------------------------------------------------------------------------------


def both(model: Any, rows: int) -> list[tuple[TextTarget, Any]]:
    """A run in fixed shapes, and one in shapes of its own."""
    runs = [begun(model, rows)]
    fast_pass(model).enabled = False
    runs.append(begun(model, rows))
    fast_pass(model).enabled = True
    assert [session.fast is None for _, session in runs] == [False, True]
    return runs


def assert_alike(found: Scores, wanted: Scores) -> None:
    assert found.logits.shape == wanted.logits.shape
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    assert found.features.keys() == wanted.features.keys()
    for layer, states in found.features.items():
        torch.testing.assert_close(states, wanted.features[layer], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 127, 128, 129])
def test_trees_of_all_sizes_are_scored_alike(model: Any, size: int, rows: int) -> None:
    """The largest one that kernels take, and one that is larger."""
    generator = torch.Generator().manual_seed(size)
    tokens = torch.randint(3, VOCABULARY, (rows, size - 1), generator=generator).tolist()
    parents = [max(0, node - 2) for node in range(size - 1)]
    draft = trees_from_lists(torch.full((rows,), 9), [(row, parents) for row in tokens])
    runs = both(model, rows)
    for _ in range(2):
        found, wanted = (target.score(session, draft) for target, session in runs)
        assert_alike(found, wanted)
        for target, session in runs:
            target.commit(session, verdict([0, 1][: min(size, 2)], rows))


@torch.inference_mode()
def test_drafts_are_rolled_back_by_length(model: Any) -> None:
    """Rejected ones, accepted ones, large and small in turn; what is left is what plain passes leave."""
    runs = both(model, 1)
    paths = [([[3, 4, 5, 6]], [0]), ([[7] * 20], [0, 1, 2]), ([[8]], [0, 1]), ([[1, 2, 3]], [0]), ([[4, 4]], [0, 1, 2])]
    for tails, path in paths:
        draft: Draft = chains(torch.tensor([9]), tails)
        found, wanted = (target.score(session, draft) for target, session in runs)
        assert_alike(found, wanted)
        for target, session in runs:
            target.commit(session, verdict(path))
    held, plain = (session.cache.layers for _, session in runs)
    assert held[0].get_seq_length() == plain[0].get_seq_length() == 8 + 1 + 3 + 2 + 1 + 3
    for mine, theirs in zip(held, plain, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_rows_that_end_leave_the_others_alone(model: Any) -> None:
    runs = both(model, 5)
    draft = chains(torch.arange(5) + 9, [[3, 4]] * 5)
    for live in ([4, 0, 2], [1, 2], [1], [0]):
        for target, session in runs:
            target.score(session, draft)
            target.commit(session, verdict([0, 1], len(draft.tokens)))
            target.select(session, torch.tensor(live))
        draft = chains(draft.tokens[torch.tensor(live), 0] + 1, [[5]] * len(live))
        found, wanted = (target.score(session, draft) for target, session in runs)
        assert_alike(found, wanted)
        for target, session in runs:
            target.commit(session, verdict([0], len(live)))


@torch.inference_mode()
def test_scores_of_the_last_draft_stay_as_they_are(model: Any) -> None:
    target, session = begun(model)
    draft = chains(torch.tensor([9]), [[3, 4]])
    kept = target.score(session, draft)
    before = kept.logits.clone(), kept.features[0].clone()
    target.commit(session, verdict([0]))
    target.score(session, chains(torch.tensor([2]), [[1, 1]]))
    assert torch.equal(kept.logits, before[0])
    assert torch.equal(kept.features[0], before[1])


def test_a_function_is_called_where_nothing_is_captured() -> None:
    one, seen = Replay(), list[float]()

    def run(x: Tensor) -> tuple[Tensor]:
        seen.append(float(x))
        return (x + 1,)

    assert [float(one(run, (torch.tensor(value),))[0]) for value in (1.0, 2.0, 3.0, 4.0)] == [2, 3, 4, 5]
    assert seen == [1, 2, 3, 4]
    assert one.graph is None
    assert one.why_not is None


def test_a_captured_call_reads_its_inputs_and_nothing_else() -> None:
    """The stand-in's way, and a graph's: what Python decided stays, tensors are read and written where they lay."""
    held, weight = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])

    def adding(number: float) -> passes.Run:
        def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            held.copy_(x)
            return (x + y) * weight + number, held[:2]

        return run

    ones = torch.ones(3)
    with recorded_graphs() as graphs:
        one = Replay()
        assert one(adding(0), (ones, ones))[0].tolist() == [2, 4, 6]  # warms up
        first, view = one(adding(1), (ones, ones))
        assert first.tolist() == [3, 5, 7]
        assert one.graph is not None
        assert graphs.made == graphs.replayed == 1
        weight.mul_(2)
        again, _ = one(adding(5), (2 * ones, ones))
        assert again.tolist() == [7, 13, 19]
        assert first.tolist() == [7, 13, 19]  # the same memory
        assert view.tolist() == [2, 2]
        assert (graphs.made, graphs.replayed) == (1, 2)


def test_what_cannot_be_captured_is_called_and_says_why() -> None:
    def run(x: Tensor) -> tuple[Tensor]:
        return (x[x > float(x.sum()) / 4],)

    with recorded_graphs() as graphs:
        one = Replay()
        for _ in range(3):
            assert one(run, (torch.arange(4.0),))[0].tolist() == [2, 3]
        said = "its pass cannot be captured: operation not permitted when stream is capturing: _local_scalar_dense"
        assert one.why_not == said
        assert graphs.made == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_does_as_the_stand_in_does() -> None:
    held, weight = torch.zeros(3, device="cuda"), torch.tensor([1.0, 2.0, 3.0], device="cuda")

    def run(x: Tensor) -> tuple[Tensor, ...]:
        held.copy_(x)
        return (x * weight + 1,)

    one = Replay()
    for number in range(5):
        assert one(run, (torch.full((3,), float(number), device="cuda"),))[0].tolist() == [
            number + 1,
            2 * number + 1,
            3 * number + 1,
        ]
    assert held.tolist() == [4, 4, 4]
    assert one.graph is not None
    waiting, four = Replay(), torch.arange(4.0, device="cuda")
    for _ in range(4):
        assert waiting(lambda x: (x[x > float(x.sum()) / 4],), (four,))[0].tolist() == [2, 3]
    assert waiting.why_not is not None
