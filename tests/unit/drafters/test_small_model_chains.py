"""Chains of a smaller model that end early: at an unlikely token, or where its positions end."""

from __future__ import annotations

import pytest
import torch

from mmdec.drafters.small_model import SmallModel
from mmdec.types import Plan
from tests.support.blended_toy import Toy, start
from tests.support.trees import is_chain


@pytest.mark.parametrize(("threshold", "size"), [(0.0, 7), (1e-9, 7), (0.02, None), (0.1, None), (0.3, None), (1.0, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_ends_with_its_first_unlikely_token(threshold: float, size: int | None, rows: int) -> None:
    toy, prompts, roots = Toy(), [[1, 2, 3], [4, 5, 6], [1, 1, 1]][:rows], [2, 5, 3][:rows]
    drafter = SmallModel(Toy())
    draft = drafter.propose(start(drafter, prompts, roots, 8), torch.tensor(roots), Plan(6, 6, threshold=threshold))
    texts = [[*prompt, root] for prompt, root in zip(prompts, roots, strict=True)]
    chances, length = [1.0] * rows, 1
    while length < 7 and (length == 1 or sum(chances) / rows >= threshold):
        length += 1
        for row, text in enumerate(texts):
            shares = toy.logits(text).softmax(-1)
            chances[row] *= float(shares.max())
            text.append(int(shares.argmax()))
    assert length == (size or length)
    assert draft.size.tolist() == [length] * rows
    assert draft.tokens.tolist() == [text[3 : 3 + length] for text in texts]
    assert is_chain(draft)


def test_a_chain_at_the_end_of_its_positions_is_a_shorter_chain() -> None:
    roots = torch.tensor([2])
    for threshold in (0.0, 1e-9):
        drafter = SmallModel(Toy(), positions=7)
        draft = drafter.propose(start(drafter, [[1, 2, 3]], [2], 8), roots, Plan(8, 8, threshold=threshold))
        assert is_chain(draft)
        assert int(draft.size[0]) == 5
