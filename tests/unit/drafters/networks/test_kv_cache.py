"""Tests that a drafter's memory continues in the same chat, and in no other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.kv_cache import DraftState
from tests.support.draft_networks import Watched, overfitted, tree_growing
from tests.support.tiny_text import language_model

MODEL = language_model()
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 60}
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
MORE = torch.tensor([[11, 12, 13]])


def run_turn(drafter: Any, ids: Tensor, cache: DynamicCache, model: Any = MODEL, **more: Any) -> mmdec.Generation:
    inputs: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
    return mmdec.generate(model, inputs, drafter, num_speculative_tokens=4, **{**OPTIONS, **more})


def plain(ids: Tensor, **more: Any) -> Tensor:
    return MODEL.generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **more})  # type: ignore[operator]


def fresh() -> DynamicCache:
    return DynamicCache(config=MODEL.config)


def accepted(out: mmdec.Generation) -> int:
    return sum(sum(round_.accepted) for round_ in out.rounds)


@pytest.mark.parametrize("system", ["eagle", "msd"])
def test_a_second_turn_continues_the_memory_of_the_first(system: str) -> None:
    first = plain(PROMPT)
    ids = torch.cat([first, MORE], 1)
    whole = plain(ids)
    trained = overfitted(system, MODEL, whole)

    cache = fresh()
    assert torch.equal(run_turn(trained, PROMPT, cache).sequences, first)
    bare = copy.deepcopy(cache)  # the same columns, no memory
    warm = run_turn(trained, ids, cache)
    cold = run_turn(trained, ids, bare)
    assert torch.equal(warm.sequences, whole)
    assert torch.equal(cold.sequences, whole)
    assert accepted(warm) >= accepted(cold)
    assert warm.tokens_per_round > 3  # it has seen the whole text, as in its training


def test_the_memory_holds_the_whole_text_once() -> None:
    watched, cache, ids = Watched(tree_growing("eagle", MODEL)), fresh(), PROMPT
    for index in range(3):
        ids = run_turn(watched, ids, cache).sequences
        memory = watched.memories[-1]
        assert memory.columns == [cache.get_seq_length()] == [ids.shape[1] - 1]
        assert memory is watched.memories[0]
        assert (watched.previous_state[index] is None) == (index == 0)
        ids = torch.cat([ids, MORE], 1)


def test_drafts_of_a_second_turn_are_those_of_a_run_over_everything() -> None:
    """The memory equals that of one long run."""
    watched, cache = Watched(tree_growing("eagle", MODEL)), fresh()
    ids = torch.cat([run_turn(watched, PROMPT, cache).sequences, MORE], 1)
    drafted = [round_.drafted for round_ in run_turn(watched, ids, cache).rounds]
    keys = watched.memories[-1].cache.accepted()[0]
    single = Watched(tree_growing("eagle", MODEL))
    assert [round_.drafted for round_ in run_turn(single, ids, fresh()).rounds] == drafted
    torch.testing.assert_close(keys, single.memories[-1].cache.accepted()[0], atol=1e-4, rtol=1e-4)


def test_a_cache_that_does_not_fit_starts_a_new_memory() -> None:
    drafter = tree_growing("eagle", MODEL)
    other = tree_growing("eagle", MODEL, seed=1)

    def second(change: Any = None, by: NetworkDrafter = drafter) -> list[DraftState]:
        """Memories of two turns, with something between them."""
        cache, watched = fresh(), Watched(drafter)
        ids = run_turn(watched, PROMPT, cache).sequences
        ids = ids if change is None else change(ids, cache)
        again = Watched(by)
        ids = torch.cat([ids, MORE], 1)
        assert torch.equal(run_turn(again, ids, cache).sequences, plain(ids))
        return [*watched.memories, *again.memories]

    same = second()
    assert same[0] is same[1]

    def cropped(ids: Tensor, cache: DynamicCache) -> Tensor:
        cache.crop(-3)
        return ids[:, :-3]

    def write_more(ids: Tensor, cache: DynamicCache) -> Tensor:
        return run_turn(None, torch.cat([ids, MORE], 1), cache).sequences

    def written_anew(ids: Tensor, cache: DynamicCache) -> Tensor:
        """Write as many columns as before, of another text."""
        cache.crop(-5)
        return run_turn(None, torch.cat([ids[:, :-5], MORE], 1), cache, max_new_tokens=2).sequences

    for change in (cropped, write_more, written_anew):
        memories = second(change)
        assert memories[0] is not memories[1]
    memories = second(by=other)
    assert memories[0] is not memories[1]


def test_no_memory_is_kept_without_a_cache_or_in_a_batch() -> None:
    watched = Watched(tree_growing("eagle", MODEL))
    cache = fresh()
    ids = run_turn(watched, PROMPT.expand(2, -1), cache).sequences
    run_turn(watched, torch.cat([ids, MORE.expand(2, -1)], 1), cache)
    run_turn(watched, PROMPT, fresh())
    assert watched.previous_state == [None] * 3


def test_memory_left_by_an_error_is_dropped() -> None:
    watched, cache = Watched(tree_growing("eagle", MODEL)), fresh()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of luck")

    watched.update = fails
    with pytest.warns(RuntimeWarning, match="out of luck"):
        ids = run_turn(watched, PROMPT, cache).sequences
    again = Watched(watched.drafter)
    run_turn(again, torch.cat([ids, MORE], 1), cache)
    assert again.previous_state == [None]
