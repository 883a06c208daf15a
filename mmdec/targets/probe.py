"""Probes whether a decoder class scores trees like their paths, with two small random layers in float64 (or float32).

Trees of several shapes below ragged, padded prompts that are longer than any window are scored, committed and followed
by others. Each node's logits are compared with those of a plain loop over its path. A model that counts columns instead
of positions, looks back less far than its cache keeps, or mixes rows, gives a large difference.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from mmdec.targets.tiny import tiny
from mmdec.types import Draft, Needs, Target, Verdict

# maximum error, relative to the largest logit: 190 classes were tried; correct ones are below 1e-6, wrong ones above
# 0.2
BOUND = 1e-3
MOST = 3_000_000  # maximum parameters of two small layers
SPREAD = 0.3  # standard deviation of random weights, large enough for non-uniform attention
PARENTS = ((-1, 0, 0, 1, 1, 2), (-1, 0, 1, 0, 3))  # parents of each round's tree; rows differ in their tokens
LEAVES = ((3, 4, 5), (2, 4))  # leaves of each tree; the path to the last one is accepted
Scorer = Callable[[Any], Target]
LENGTHS = ((13,), (12, 5, 9))  # prompts of each batch


class TooLarge(Exception):
    """The class cannot be made small."""


def difference(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, target_of: Scorer) -> float:
    """The largest difference between a node's logits and those of its path alone, over the largest logit.

    Raises whatever the class raises. torch's random state is restored.
    """
    model = small_model(kind, config, attention)
    with torch.no_grad():
        try:
            return _worst(model.double(), target_of)
        except (RuntimeError, ValueError):
            return _worst(model.float(), target_of)


def small_model(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, seed: int = 0) -> Any:
    """A model with two small layers and random weights, on the CPU."""
    shape = tiny(config)
    shape._attn_implementation = attention
    shape._experts_implementation = "eager"  # other implementations do not support float64
    with torch.device("meta"):
        size = kind(copy.deepcopy(shape)).num_parameters()
    if size > MOST:
        raise TooLarge(f"two small layers have {size} parameters")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = kind(shape)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, SPREAD)
    return model.eval()


def _worst(model: Any, target_of: Scorer) -> float:
    target = target_of(model)
    return max(_batch(model, target, lengths) for lengths in LENGTHS)


def _batch(model: Any, target: Target, lengths: tuple[int, ...]) -> float:
    """The largest difference over the rounds of one batch of prompts."""
    rng, most = random.Random(len(lengths)), target.vocab_size - 1

    def draw(width: int) -> Tensor:
        return torch.tensor([[rng.randint(3, most) for _ in range(width)] for _ in lengths])

    ids = draw(max(lengths))
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    plain = _Plain(model, ids, mask)
    inputs = {"input_ids": ids} if len(lengths) == 1 else {"input_ids": ids, "attention_mask": mask}
    session, _, _, scores = target.prefill(inputs, Needs())
    worst = _apart(scores.logits[:, -1], plain.logits)
    text = ids
    for parents, leaves in zip(PARENTS, LEAVES, strict=True):
        tokens = draw(len(parents))
        draft = Draft(tokens, torch.tensor([parents] * len(lengths)), torch.full((len(lengths),), len(parents)))
        logits = target.score(session, draft).logits
        branch, path = plain, [0]
        for leaf in leaves:
            branch, path = plain.branch(), _path(parents, leaf)
            for node in path:
                branch.step(tokens[:, node])
                worst = max(worst, _apart(logits[:, node], branch.logits))
        plain, text = branch, torch.cat([text, tokens[:, path]], 1)
        ones = torch.ones(len(lengths), dtype=torch.long)
        target.commit(session, Verdict(torch.tensor([path] * len(lengths)), ones, ones == 0, ones[:, None], ones))
    # a model that sees later tokens scores its own text differently when it reads the whole text
    full = _Plain(model, text, torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - mask.shape[1])], 1))
    return max(worst, _apart(full.logits, plain.logits))


class _Plain:
    """The plain loop: a prompt, then token by token."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor) -> None:
        self.model, self.mask = model, mask
        self.cache = DynamicCache(config=model.config)
        self.position = mask.sum(1, keepdim=True) - 1
        self.logits = self._pass(ids, (mask.cumsum(1) - 1).clamp(min=0))

    def step(self, tokens: Tensor) -> None:
        """Process one token (B,) for each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self.position = self.position + 1
        self.logits = self._pass(tokens[:, None], self.position)

    def branch(self) -> _Plain:
        """An independent copy of the loop's state."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def _pass(self, ids: Tensor, positions: Tensor) -> Tensor:
        unmasked = bool(self.mask.all())  # `generate` drops such a mask
        return self.model(
            input_ids=ids,
            attention_mask=None if unmasked else self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def _path(parents: tuple[int, ...], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _apart(scores: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; infinite if any value is NaN."""
    apart = float((scores - expected).abs().max() / expected.abs().max())
    return apart if apart == apart else float("inf")
