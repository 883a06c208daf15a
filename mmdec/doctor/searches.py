"""Searches for settings that a checkpoint folder may not state, and for a lost LM head.

The settings are the base of rotary positions, and the target's layers to read. An LM head is lost if it is not the
trained one.

A search minimises the drafter's mean surprise, -log of the probability, at the target's tokens. With few positions,
this tells more than the share of right tokens. The result is one `Variant`, a way to run the network with one setting
changed, which `examine.py` measures like any other. Its `tries` is the number of choices that the search tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from transformers import PreTrainedModel

from mmdec.checks.sampling import evenly_spaced
from mmdec.doctor.answers import NetworkRun, TargetAnswer, right_tokens, root_states, token_surprisals
from mmdec.doctor.conventions import (
    DEFAULT_ROPE_BASE,
    CheckpointFolder,
    Remedy,
    Variant,
    layer_rules,
    other_base,
    other_layers,
    reconfigure,
)

SEARCH_POSITIONS = 1024  # number of tokens of the texts that a search uses
# bases of rotary positions that are tried: 100 ... 5e8
ROPE_BASES = tuple(digit * 10.0**power for power, digit in product(range(2, 9), (1, 2, 5)))
GOLDEN_SECTION = (math.sqrt(5) - 1) / 2  # factor by which a step of golden-section search shortens the interval
GOLDEN_STEPS = 6  # steps of golden-section search between two bases of the grid: precise to 5 %
MAX_LAYER_SWEEPS = 3  # the most times that a search tries every layer for each of the features that the network reads
RIDGE_PENALTY = 1e-3  # ridge penalty of the fitted LM head, whose input states are scaled to length 1
MAX_FIT_TOKENS = 2048  # the most tokens of the texts on which an LM head is fitted
MAX_FEATURE_BYTES = 8 << 30  # maximum size of all layers' features
LAYERS_NOT_SEARCHED = (
    "The features of all layers need over 8 GiB, so that layers were not searched: fewer prompts allow it."
)
LOST_HEAD_RATIO = 2.0  # an LM head is lost if a fitted head is right at least this many times as often


def searchable_layers(model: PreTrainedModel, columns: int) -> set[int]:
    """Return all layers of a target; none if their features at `columns` tokens need over `MAX_FEATURE_BYTES`."""
    config = model.config.get_text_config(decoder=True)
    needed = columns * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    return {*range(config.num_hidden_layers)} if needed <= MAX_FEATURE_BYTES else set()


def search_variants(
    run: NetworkRun, folder: CheckpointFolder, model: PreTrainedModel, texts: Sequence[TargetAnswer]
) -> Iterator[Variant]:
    """Yield the best rotary base and the best layers that a search finds, unless they are already tried variants.

    Args:
        model: The target.
        texts: The target's answers; layers are searched only if the texts hold all layers' features.
    """
    mean = sum(text.positions for text in texts) / len(texts)
    some = evenly_spaced(texts, math.ceil(SEARCH_POSITIONS / mean))
    config = model.config.get_text_config(decoder=True)
    yield from _best_base(run, folder, config, some)
    yield from _best_layers(run, folder, config.num_hidden_layers, some)


def _surprisals(run: NetworkRun, texts: Sequence[TargetAnswer]) -> np.ndarray:
    """Compute the drafter's surprise, -log of the probability (n,), at the n positions whose tokens it can draft."""
    return torch.cat([token_surprisals(run, text) for text in texts]).numpy()


def _best_base(
    run: NetworkRun, folder: CheckpointFolder, target: object, texts: Sequence[TargetAnswer]
) -> Iterator[Variant]:
    """Yield the variant whose base of rotary positions has the least surprise.

    It is one of `ROPE_BASES`, or a base between two of them if that base is better by two standard errors.

    Args:
        target: The target's text config.
    """
    network, now = run.network, run.network.config.rope_theta
    costs: dict[float, np.ndarray] = {}

    def cost(theta: float) -> float:
        if theta not in costs:
            costs[theta] = _surprisals(replace(run, network=reconfigure(network, rope_theta=theta)), texts)
        return float(costs[theta].mean())

    rope = getattr(target, "rope_parameters", None) or {}
    bases = {now, DEFAULT_ROPE_BASE, float(rope.get("rope_theta") or DEFAULT_ROPE_BASE)}
    if not len(_surprisals(run, texts)):
        return
    best = min(sorted({*ROPE_BASES, *bases}), key=cost)
    grid = sorted(costs)
    at = grid.index(best)
    low, high = (math.log(grid[min(max(at + step, 0), len(grid) - 1)]) for step in (-1, 1))
    for _ in range(GOLDEN_STEPS):
        left, right = (
            float(f"{math.exp(x):.3g}")
            for x in (high - GOLDEN_SECTION * (high - low), low + GOLDEN_SECTION * (high - low))
        )
        low, high = (low, math.log(right)) if cost(left) <= cost(right) else (math.log(left), high)
    between = min(costs, key=cost)
    gain = costs[best] - costs[between]
    if gain.sum() > 2 * gain.std() * math.sqrt(len(gain)):
        best = between
    if best not in bases:
        yield other_base(run, folder, best, f"the best of {len(costs)} tried", len(costs))


def _best_layers(
    run: NetworkRun, folder: CheckpointFolder, depth: int, texts: Sequence[TargetAnswer]
) -> Iterator[Variant]:
    """Yield the variant whose layers have the least surprise.

    The search begins at the best known rule, and changes one layer at a time.

    Args:
        depth: The target's number of layers.
    """
    recorded = texts[0].context.features.keys()
    if run.network.conventions().layer_ids is None or min(run.layers) < 0 or not recorded >= {*range(depth)}:
        return
    costs: dict[tuple[int, ...], float] = {}

    def cost(ids: tuple[int, ...]) -> float:
        if ids not in costs:
            surprises = _surprisals(replace(run, network=reconfigure(run.network, layers=ids)), texts)
            costs[ids] = float(surprises.mean()) if len(surprises) else 0.0
        return costs[ids]

    rules = layer_rules(run, depth)
    best = min((run.layers, *rules), key=cost)
    for _ in range(MAX_LAYER_SWEEPS):
        before = best
        for place in range(len(best)):
            best = min((best, *((*best[:place], layer, *best[place + 1 :]) for layer in range(depth))), key=cost)
        if best == before:
            break
    if best != run.layers and best not in rules:
        yield other_layers(run, folder, best, f"the best of {len(costs)} tried", tries=len(costs))


def fit_head(run: NetworkRun, texts: Sequence[TargetAnswer]) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Compare the network's own LM head with a head that is fitted to its states on the other half of the texts.

    The fitted head is a ridge regression on the tokens in its dual form: one system with as many equations as
    positions.

    Returns:
        For each text (N,), 1 where the first drafted token is right, else 0: with the network's own head, and with the
        fitted head. None for a network without a head of its own, and for a single text.
    """
    if run.network.own_head is None or len(texts) < 2:
        return None
    own_hits = [right_tokens(run, text, 1)[0].numpy().astype(float) for text in texts]
    states = [normalize(root_states(run, text).float(), dim=-1) for text in texts]
    answers = [torch.tensor(text.answer[1:], device=part.device) for text, part in zip(texts, states, strict=True)]
    fitted_hits = list[np.ndarray]()
    predict = [_fit(states[half::2], answers[half::2]) for half in (0, 1)]
    for number, (part, answer) in enumerate(zip(states, answers, strict=True)):
        fitted_hits.append((predict[1 - number % 2](part) == answer).cpu().numpy().astype(float))
    return own_hits, fitted_hits


def _fit(states: Sequence[Tensor], answers: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Fit a ridge regression from the texts' states (N, H) to their tokens (N,).

    Returns:
        A function from states (n, H) to tokens (n,).
    """
    x, y = torch.cat([*states]), torch.cat([*answers])
    chosen = torch.tensor(evenly_spaced(range(len(x)), MAX_FIT_TOKENS), device=x.device)
    x, (tokens, index) = x[chosen], y[chosen].unique(return_inverse=True)
    products = x @ x.T + RIDGE_PENALTY * torch.eye(len(x), device=x.device)
    weights = x.T @ torch.linalg.solve(products, one_hot(index).float())  # shape (H, tokens)
    return lambda states: tokens[(states @ weights).argmax(-1)]


def head_remedy(run: NetworkRun) -> tuple[str, Remedy]:
    """Return what the report calls a lost LM head, and how to correct the checkpoint folder.

    The report calls it "the model's rows" or "its own".
    """
    network: Any = run.network
    rows = run.output.weight
    ids = network.draft_vocabulary.all_token_ids(rows.device)
    fits = network.lm_head.weight.shape[1] == rows.shape[1] and int(ids.max()) < len(rows)
    copied = fits and torch.equal(network.lm_head.weight, rows[ids].to(network.lm_head.weight))
    cause = "does not belong to the other tensors, or they are not trained."
    if copied:
        cause = "holds the model's rows: the file is incomplete, or a converter put them there."
    text = f"`lm_head.weight` {cause} Put the published `lm_head.weight` there, and examine the folder again."
    return "the model's rows" if copied else "its own", Remedy(text=text)
