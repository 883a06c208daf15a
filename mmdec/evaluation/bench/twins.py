"""Two models with the same weights, of which one passes differently: compared on drafts, then timed in turn."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.decode.tree import trees_from_lists
from mmdec.targets.registry import target_of
from mmdec.types import Draft, MmdecError, Needs, Verdict

# Of the relative difference, see `difference`. In bfloat16 28 layers of random weights turn roundings into a twentieth;
# one node with a wrong parent, behind a short prompt, is off by a half and more.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
ROUNDS = 4  # that are compared: the fast pass makes a graph at the third and replays it then


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with a configuration and a fast pass of its own, over the very weights of `model`."""
    network = cast(nn.Module, model)
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(model, cast(Any, shared))


def binary_tree(nodes: int, vocab_size: int, device: torch.device) -> Draft:
    """A draft (1, nodes) of random tokens: node n hangs below node (n - 1) // 2."""
    drawn = torch.randint(vocab_size, (nodes,), generator=torch.Generator().manual_seed(0))
    # Parents of the nodes below the root are node numbers, the root's being 0.
    parents = [node // 2 for node in range(nodes - 1)]
    return trees_from_lists(drawn[:1].to(device), [(drawn[1:].tolist(), parents)])


@final
class Run:
    """A model behind a prompt. Each call scores a draft, of which only the root is then accepted."""

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
        """inputs: of the target's `prefill`, one row."""
        self.target = target_of(model)
        self.session: Any = self.target.prefill(inputs, Needs())[0]

    @torch.inference_mode()
    def __call__(self, draft: Draft) -> Tensor:
        """Logits (1, N, V)."""
        scores = self.target.score(self.session, draft)
        root, following = torch.zeros_like(draft.tokens[:, :1]), draft.tokens[:, 0]
        verdict = Verdict(
            root, following, torch.zeros_like(following, dtype=torch.bool), root, torch.ones_like(following)
        )
        self.target.commit(self.session, verdict)
        return scores.logits


def compare(what: str, a: Run, b: Run, draft: Draft) -> float:
    """The largest relative difference of two runs' logits over some rounds. Raises MmdecError if it is too large."""
    worst = 0.0
    for _ in range(ROUNDS):
        result = a(draft)
        found, limit = difference(result, b(draft)), LIMITS[result.dtype]
        if not found <= limit:  # so is NaN
            raise MmdecError(
                f"{what}: logits of the two sides must differ by at most {limit:g} of their size, but differ by "
                f"{found:.3g}. No time was taken. Report this as a bug."
            )
        worst = max(worst, found)
    return worst


def difference(result: Tensor, reference: Tensor) -> float:
    """The Euclidean norm of the difference over that of the reference, for the node where this is largest."""
    apart = (result.float() - reference.float()).norm(dim=-1)
    return float((apart / reference.float().norm(dim=-1)).max())
