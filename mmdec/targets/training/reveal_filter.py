"""Trains the network of `LearnedFilter`, which tells final predictions from others (Bao et al. 2025, arXiv 2509.25188).

The truth is what the careful order, one token a step, ends with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from mmdec.core.canvas import Policy, Predictions, RevealFilter, TopK, reveal_block
from mmdec.errors import InputError
from mmdec.targets.masked_diffusion import CanvasLayout, open_session

STEPS, LEARNING_RATE = 500, 0.01


class _Recorder(Policy):
    """The careful order, which notes each step's confidence, best tokens and masked positions."""

    def __init__(self) -> None:
        self.order, self.steps = TopK(), list[tuple[Tensor, Tensor, Tensor]]()

    def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
        self.steps.append((predictions.confidence[0].float(), predictions.tokens[0], masked[0]))
        return self.order.reveal(predictions, masked)


def fit_filter(
    model: PreTrainedModel, layout: CanvasLayout, prompts: Sequence[Tensor], blocks: int = 1, seed: int = 0
) -> RevealFilter:
    """Train a filter on a model's own answers.

    Args:
        model: A masked diffusion model.
        layout: How it was trained.
        prompts: (P,) token ids each.
        blocks: Number of blocks of each answer.
        seed: Random seed for the filter's initial weights.

    Raises:
        InputError: If there is no prompt.
    """
    if not prompts:
        raise InputError("`prompts` must hold at least one prompt, but is empty. Give some hundreds.")
    confidence, right, masked = list[Tensor](), list[Tensor](), list[Tensor]()
    for prompt in prompts:
        session = open_session(model, layout, prompt, blocks)
        for _ in range(blocks):
            recorder, start = _Recorder(), len(session.text)
            for _ in reveal_block(session, layout.mask_token, recorder):
                pass
            final = session.text[start:]
            for confident, tokens, hidden in recorder.steps:
                confidence.append(confident)
                right.append(tokens == final)
                masked.append(hidden)
    inputs, truth, weight = torch.stack(confidence).clone(), torch.stack(right).float(), torch.stack(masked).float()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = RevealFilter(layout.block_length).to(inputs.device)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE)
    with torch.enable_grad():
        for _ in range(STEPS):
            losses = binary_cross_entropy_with_logits(network(inputs), truth, weight, reduction="sum")
            optimizer.zero_grad()
            (losses / weight.sum()).backward()
            optimizer.step()
    return network.eval()
