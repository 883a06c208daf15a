"""The small-model drafter, on toy targets whose logits depend on every token before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core.budget import FixedBudget
from mmdec.core.tree import root_only
from mmdec.core.verify import ResidualRule, SamplingState
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.errors import InputError
from mmdec.targets.media import MediaTarget
from mmdec.targets.text import TextTarget
from mmdec.types import Draft, Needs, Plan, Scores, Verdict
from tests.support.blended_toy import PROMPTS, CyclingBudget, Toy, run, start
from tests.support.draft_networks import texts
from tests.support.draft_warps import at_temperature, warp_at
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import IMAGE, Picture, batch_of, vision_model
from tests.support.trees import is_chain


def paths(draft: Draft, row: int) -> list[list[int]]:
    """Tokens from the root to each node; checks the tree's form."""
    size, parents, tokens = int(draft.size[row]), draft.parents[row].tolist(), draft.tokens[row].tolist()
    assert parents[0] == -1
    result = [[tokens[0]]]
    for node in range(1, size):
        assert 0 <= parents[node] < node
        result.append([*result[parents[node]], tokens[node]])
    assert len({tuple(path) for path in result}) == size
    return result


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_targets_own_greedy_chain_is_always_accepted(nodes: int, rows: int) -> None:
    rounds = run(Toy(), SmallModelDrafter(Toy()), FixedBudget(nodes), PROMPTS[:rows], 24, eos=99)
    assert len(rounds) > 2
    for round_ in rounds[1:]:
        for drafted, accepted, done in zip(round_.drafted, round_.accepted, round_.done, strict=True):
            assert accepted == drafted or done
            assert drafted == nodes or done
    assert texts(rounds, rows) == texts(run(Toy(), None, FixedBudget(0), PROMPTS[:rows], 24, eos=99), rows)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_cache_follows_every_round(rows: int) -> None:
    small = Toy(7, seed=1)
    target, drafter = Toy(8, seed=2, blend=small, share=0.4), SmallModelDrafter(small, width=3)
    rounds = run(target, drafter, CyclingBudget(), PROMPTS[:rows], 40)
    plain = texts(run(Toy(8, seed=2, blend=small, share=0.4), None, FixedBudget(0), PROMPTS[:rows], 40), rows)
    assert texts(rounds, rows) == plain
    assert sum(sum(round_.accepted) for round_ in rounds) > 0
    assert any(a < d for round_ in rounds for a, d in zip(round_.accepted, round_.drafted, strict=True))
    session = small.session
    assert session is not None
    row = rounds[-1].rows[0]  # the last to leave; what its cache holds is a beginning of its text
    whole = PROMPTS[row] + plain[row]
    assert session.texts[0] == whole[: len(session.texts[0])]
    assert len(session.texts[0]) >= len(PROMPTS[row]) + 1


@pytest.mark.parametrize(("prompt", "answer", "silent"), [([1, 7], 2, True), ([1, 2], 7, True), ([1, 2], 2, False)])
def test_nothing_is_proposed_after_an_unknown_token(prompt: list[int], answer: int, silent: bool) -> None:
    drafter = SmallModelDrafter(Toy(7), width=3)
    draft = drafter.propose(start(drafter, [prompt], [answer], 8), torch.tensor([answer]), Plan(3, 3))
    assert int(draft.size[0]) == (1 if silent else 4)


def test_an_unknown_token_in_one_row_leaves_the_others_alone() -> None:
    small = Toy(7)
    memory, given = start(drafter := SmallModelDrafter(small), [[1, 2], [3, 4]], [5, 6], 8), torch.tensor([7, 2])
    zeros = torch.zeros_like(given)
    verdict = Verdict(zeros[:, None], given, given == 7, given[:, None], zeros + 1)
    drafter.update(memory, root_only(torch.tensor([5, 6])), Scores(torch.zeros(2, 1, 8)), verdict)
    drafter.select(memory, torch.tensor([1]))
    assert int(drafter.propose(memory, torch.tensor([2]), Plan(3, 3)).size[0]) == 4


def test_fully_accepted_drafts_enter_the_cache() -> None:
    small = Toy()
    run(Toy(), SmallModelDrafter(small), FixedBudget(3), [[1, 2]], 18, eos=99)
    assert small.session is not None
    # a round: the two pending tokens, the root and one node, the root and two nodes
    assert small.session.passes[:7] == [1, 2, 3, 2, 2, 3, 2]


def test_trees_equal_eagles() -> None:
    toy = Toy(8, seed=3)
    memory = start(drafter := SmallModelDrafter(toy, width=3), [[1, 2], [3, 4]], [5, 6], 8)
    draft = drafter.propose(memory, torch.tensor([5, 6]), Plan(8, 3))
    assert draft.probs is None
    for row, text in enumerate([[1, 2], [3, 4]]):
        pool: dict[tuple[int, ...], float] = {}
        beam: dict[tuple[int, ...], float] = {(5 + row,): 0.0}
        for _ in range(3):
            layer = {}
            for path, value in beam.items():
                logprobs, tokens = toy.logits(text + list(path)).log_softmax(-1).topk(3)
                layer |= {(*path, t): value + c for t, c in zip(tokens.tolist(), logprobs.tolist(), strict=True)}
            pool |= layer
            beam = dict(sorted(layer.items(), key=lambda item: -item[1])[:3])
        expected = sorted(pool, key=lambda path: -pool[path])[:8]
        result = [tuple(path) for path in paths(draft, row)[1:]]
        assert sorted(result) == sorted(expected)
        heavy = max((path for path in result), key=len)
        assert len(heavy) <= 4
        # of two siblings the likelier comes first
        for earlier, later in pairwise(result):
            assert len(earlier) != len(later) or earlier[:-1] != later[:-1] or pool[earlier] >= pool[later]


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize(("nodes", "depth"), [(0, 0), (1, 1), (4, 4), (5, 9), (7, 2), (12, 3), (40, 2)])
def test_drafts_are_trees_within_the_plan(nodes: int, depth: int, temperature: float | None) -> None:
    drafter = SmallModelDrafter(Toy(6, seed=4), width=4)
    memory = start(drafter, [[1, 2], [3, 4], [5, 0]], [0, 1, 2], 6)
    generator = torch.Generator().manual_seed(5)
    warp = None if temperature is None else warp_at(temperature)
    draft = drafter.propose(memory, torch.tensor([0, 1, 2]), Plan(nodes, depth, warp, generator))
    for row in range(3):
        result = paths(draft, row)
        assert len(result) <= nodes + 1
        assert max(map(len, result)) <= depth + 1
        if depth >= nodes:
            assert len(result) == nodes + 1
    assert draft.tokens[:, 0].tolist() == [0, 1, 2]
    if depth >= nodes:
        assert is_chain(draft)


@pytest.mark.parametrize(("nodes", "depth"), [(3, 3), (9, 3)])
def test_drawn_children_come_with_their_distribution(nodes: int, depth: int) -> None:
    toy = Toy(6, seed=6)
    memory = start(drafter := SmallModelDrafter(toy), [[1, 2], [3, 4]], [0, 1], 9)  # the target knows 9 tokens
    generator = torch.Generator().manual_seed(7)
    draft = drafter.propose(memory, torch.tensor([0, 1]), Plan(nodes, depth, warp_at(1.5), generator))
    assert draft.probs is not None
    assert draft.probs.shape == (*draft.tokens.shape, 9)
    for row, text in enumerate([[1, 2], [3, 4]]):
        parents = draft.parents[row].tolist()
        for node, path in enumerate(paths(draft, row)):
            expected = (toy.logits(text + path) / 1.5).softmax(-1)
            if node in parents[1:]:
                torch.testing.assert_close(draft.probs[row, node, :6], expected)
            assert not draft.probs[row, node, 6:].any()


def test_children_are_drawn_without_replacement_in_order() -> None:
    toy = Toy(4, seed=8)
    drafter = SmallModelDrafter(toy)
    q = toy.logits([1, 2, 3]).softmax(-1).tolist()
    generator = torch.Generator().manual_seed(9)
    rows, calls = 100, 60
    seen: Counter[tuple[int, int]] = Counter()
    zeros = torch.zeros(rows, dtype=torch.long)
    for _ in range(calls):
        memory = start(drafter, [[1, 2]] * rows, [3] * rows, 4)
        draft = drafter.propose(memory, zeros + 3, Plan(2, 1, warp_at(1.0), generator))
        seen.update((first, second) for _, first, second in draft.tokens.tolist())
    total = rows * calls
    chi = 0.0
    for first in range(4):
        for second in range(4):
            expected = total * q[first] * q[second] / (1 - q[first]) if first != second else 0.0
            if expected == 0:
                assert seen[first, second] == 0
            else:
                chi += (seen[first, second] - expected) ** 2 / expected
    assert chi < 31  # 11 degrees of freedom: one in a thousand


@pytest.mark.parametrize(("nodes", "depth"), [(5, 3), (12, 4), (9, 1)])
def test_the_shape_of_a_sampled_tree_does_not_depend_on_its_tokens(nodes: int, depth: int) -> None:
    drafter = SmallModelDrafter(Toy(9, seed=10))
    memory = start(drafter, [[1, 2]] * 50, [0] * 50, 9)
    generator = torch.Generator().manual_seed(11)
    draft = drafter.propose(memory, torch.zeros(50, dtype=torch.long), Plan(nodes, depth, warp_at(2.0), generator))
    assert len({tuple(tokens) for tokens in draft.tokens.tolist()}) == 50
    assert len({tuple(parents) for parents in draft.parents.tolist()}) == 1
    assert draft.size.tolist() == [nodes + 1] * 50


def test_a_narrow_distribution_gives_fewer_children_to_its_node_alone() -> None:
    """After token 0 the distribution has a single token."""
    drafter = SmallModelDrafter(Toy(4, seed=10))

    def warp(logits: Tensor, paths: Sequence[Sequence[Sequence[int]]] = ()) -> Tensor:
        probs = logits.float().softmax(-1)
        for row, nodes in enumerate(paths):
            for node, path in enumerate(nodes):
                if path[-1:] == [0]:
                    probs[row, node] = torch.eye(4)[2]
        return probs

    memory = start(drafter, [[1, 2]] * 200, [0] * 200, 4)
    draft = drafter.propose(
        memory, torch.zeros(200, dtype=torch.long), Plan(7, 2, warp, torch.Generator().manual_seed(1))
    )
    assert draft.probs is not None
    counts: dict[int, set[tuple[int, int]]] = {}
    for row in range(200):
        result = paths(draft, row)
        firsts = [path for path in result if len(path) == 2]
        for rank, (_, token) in enumerate(firsts):
            below = sum(path[1:2] == [token] and len(path) == 3 for path in result)
            counts.setdefault(rank, set()).add((int(token == 0), below))
    assert counts[0] == {(0, 3), (1, 1)}
    assert all({has for has, _ in values} == {0, 1} and len(values) <= 2 for values in counts.values())


@pytest.mark.parametrize(("nodes", "depth"), [(2, 2), (5, 2)])
def test_drawn_trees_keep_the_targets_distribution(nodes: int, depth: int) -> None:
    small = Toy(3, seed=12)
    target = Toy(3, seed=13, blend=small, share=0.5)
    rows, runs = 200, 6
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for number in range(runs):
        rule = ResidualRule(SamplingState(number, at_temperature(0.8)))
        rounds = run(target, SmallModelDrafter(small), FixedBudget(nodes, depth), [[1, 2]] * rows, 3, rule, eos=99)
        accepted += sum(sum(round_.accepted) for round_ in rounds)
        seen.update(tuple(row) for row in texts(rounds, rows))
    chi = 0.0
    for outcome in product(range(3), repeat=3):
        probability = 1.0
        for place, token in enumerate(outcome):
            probability *= float(target.logits([1, 2, *outcome[:place]]).softmax(-1)[token])
        chi += (seen[outcome] - rows * runs * probability) ** 2 / (rows * runs * probability)
    assert chi < 55  # 26 degrees of freedom: one in a thousand
    assert accepted > rows * runs / 2


def test_pairs_that_cannot_work_are_refused() -> None:
    drafter = SmallModelDrafter(Toy(8))
    drafter.check(Toy(8))
    drafter.check(Toy(9))
    with pytest.raises(InputError, match="at most the target's 7 tokens, but toy-0 has 8"):
        drafter.check(Toy(7))
    elsewhere = Toy(8)
    elsewhere.device = torch.device("meta")
    with pytest.raises(InputError, match="on the target's device, meta"):
        drafter.check(elsewhere)
    with pytest.raises(InputError, match="`width` must be at least 1"):
        SmallModelDrafter(Toy(), width=0)


# --- positions -------------------------------------------------------------------------------------------------------


def gpt2(positions: int, seed: int = 0) -> Any:
    return language_model("gpt2", seed, num_hidden_layers=1, max_position_embeddings=positions)


@pytest.mark.parametrize("lengths", [(4,), (4, 9, 6), (20, 3)], ids=str)
@pytest.mark.parametrize("nodes", [1, 7, (12, 3), (20, 12)])
@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_neither_model_exceeds_its_positions(nodes: Any, lengths: tuple[int, ...]) -> None:
    """The small model has 16 positions and falls silent, the large one 40 and ends by its own tokens before."""
    large, small = gpt2(40), gpt2(16, 1)
    ids, mask = torch.full((len(lengths), max(lengths)), 3), torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = torch.arange(3, 3 + length)
        mask[row, max(lengths) - length :] = 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    end: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_length": 41}
    expected = large.generate(**inputs, **end)  # type: ignore[operator]
    asked: list[int] = []
    handle = small.transformer.wpe.register_forward_pre_hook(lambda module, given: asked.append(int(given[0].max())))
    drafter = small if max(lengths) <= 16 else gpt2(16, 1)
    assert torch.equal(mmdec.generate(large, inputs, drafter, num_speculative_tokens=nodes, **end).sequences, expected)
    handle.remove()
    if max(lengths) <= 16:
        assert max(asked) == 15  # to its last position, and no further
    for beyond in (60, 300):  # the text ends before its table does, but not by its length
        stopped = {**end, "max_length": beyond, "eos_token_id": expected[:, -3:].unique().tolist()}
        again = mmdec.generate(large, inputs, large, num_speculative_tokens=nodes, **stopped).sequences
        assert torch.equal(again, large.generate(**inputs, **stopped))  # type: ignore[operator]


@torch.no_grad()
def test_a_text_model_does_not_read_picture_columns() -> None:
    """Its draft is what it says itself of the text without the placeholders, in ragged rows, one without a picture."""
    model = vision_model("llava")
    small = language_model("llama", 2, vocab_size=IMAGE)  # the placeholder is no token of its own
    rows: list[list[Any]] = [[[7, 8], Picture.random(1), [9, 10, 11]], [[12, 13, 14]]]
    output = MediaTarget(model).prefill(batch_of("llava", rows), Needs())
    context, draft, scores = output.context, output.draft, output.scores
    drafter = SmallModelDrafter(TextTarget(small))
    state = drafter.start(context)
    roots, zeros = torch.tensor([20, 21]), torch.zeros(2, dtype=torch.long)
    drafter.update(state, draft, scores, Verdict(zeros[:, None], roots, zeros.bool(), roots[:, None], zeros + 1))
    result = drafter.propose(state, roots, Plan(4, 4))
    for row, text in enumerate([[1, 7, 8, 9, 10, 11, 20], [1, 12, 13, 14, 21]]):
        for token in result.tokens[row, 1:].tolist():
            assert token == int(small(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)


@pytest.mark.parametrize(("threshold", "size"), [(0.0, 7), (1e-9, 7), (0.02, None), (0.1, None), (0.3, None), (1.0, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_ends_with_its_first_unlikely_token(threshold: float, size: int | None, rows: int) -> None:
    toy, prompts, roots = Toy(), [[1, 2, 3], [4, 5, 6], [1, 1, 1]][:rows], [2, 5, 3][:rows]
    drafter = SmallModelDrafter(Toy())
    draft = drafter.propose(start(drafter, prompts, roots, 8), torch.tensor(roots), Plan(6, 6, threshold=threshold))
    texts = [[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)]
    probabilities, length = [1.0] * rows, 1
    while length < 7 and (length == 1 or sum(probabilities) / rows >= threshold):
        length += 1
        for row, text in enumerate(texts):
            shares = toy.logits(text).softmax(-1)
            probabilities[row] *= float(shares.max())
            text.append(int(shares.argmax()))
    assert length == (size or length)
    assert draft.size.tolist() == [length] * rows
    assert draft.tokens.tolist() == [text[3 : 3 + length] for text in texts]
    assert is_chain(draft)


def test_a_chain_at_the_end_of_its_positions_is_a_shorter_chain() -> None:
    roots = torch.tensor([2])
    for threshold in (0.0, 1e-9):
        drafter = SmallModelDrafter(Toy(), positions=7)
        draft = drafter.propose(start(drafter, [[1, 2, 3]], [2], 8), roots, Plan(8, 8, threshold=threshold))
        assert is_chain(draft)
        assert int(draft.size[0]) == 5
