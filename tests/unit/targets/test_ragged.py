"""Tests that a pass over ragged drafts does not compute the padding in linear layers, and gives the same scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from mmdec.targets import decoder
from mmdec.targets.ragged import is_compiled, packed_linear
from mmdec.targets.text import TextTarget
from mmdec.types import Needs, Scores
from tests.support.tiny_text import language_model
from tests.support.trees import random_chains


class _CountNodes(TorchFunctionMode):
    """Counts the nodes of each linear layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = set[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear:
            self.counts.add(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


def score(model: Any, lengths: Sequence[int]) -> tuple[Scores, set[int]]:
    torch.manual_seed(1)
    ids = torch.randint(2, 40, (len(lengths), 9))
    target = TextTarget(model)
    session = target.prefill({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, Needs(layers=(1,))).session
    with _CountNodes() as counted:
        scores = target.score(session, random_chains(lengths))
    return scores, counted.counts


def test_linear_layers_compute_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 12, 3, 1]
    model = language_model("llama")
    packed, counts = score(model, lengths)
    assert counts == {sum(lengths)}
    assert packed.mean_nodes_per_row == 5  # 17 nodes of 4 rows, rounded up
    monkeypatch.setattr(decoder, "packed_linear", lambda draft: None)
    padded, counts = score(model, lengths)
    assert counts == {4 * 12}
    assert padded.mean_nodes_per_row is None
    for row, length in enumerate(lengths):
        assert torch.allclose(packed.logits[row, :length], padded.logits[row, :length], atol=1e-5)
        assert torch.allclose(packed.features[1][row, :length], padded.features[1][row, :length], atol=1e-5)


@pytest.mark.parametrize("lengths", [[12, 12, 12, 12], [5, 3], [9]])
def test_drafts_with_little_padding_are_not_packed(lengths: list[int]) -> None:
    assert packed_linear(random_chains(lengths)) is None


def test_compiled_models_are_not_packed() -> None:
    """A new set of sizes would compile the model again."""
    model = language_model("llama")
    assert not is_compiled(model)
    model.forward = torch.compile(model.forward, backend="eager")
    assert is_compiled(model)
    packed, _ = score(model, [1, 12, 3, 1])
    assert packed.mean_nodes_per_row is None


def test_gradients_flow_through_packed_layers() -> None:
    context = packed_linear(random_chains([1, 12, 3, 1]))
    assert context is not None
    states = torch.randn(4, 12, 6, requires_grad=True)
    weight = torch.randn(5, 6)
    with context:
        out: Tensor = linear(states, weight)
    out.sum().backward()
    assert states.grad is not None
    computed = states.grad.abs().sum(2) > 0
    assert computed.sum(1).tolist() == [1, 12, 3, 1]
