"""Checks whether a tree's nodes influence each other's scores, as dynamically quantised activations do.

A scale computed over a whole pass (dynamic quantisation) changes with the other nodes and rows. Even a scale per token
amplifies the rounding noise of another kernel to a whole quantisation step. Quantised weights alone do neither. The
check runs once for each model with layers or weights of kinds that may quantise activations.
"""

from __future__ import annotations

import warnings
from functools import cache
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.targets.hf_target import HfTarget
from mmdec.types import Draft, Needs, Verdict

# maximum error, relative to the largest logit: float32 noise is below 4e-5, quantised activations exceed 2e-2
BOUND = 1e-3
NOISE = 32  # maximum error in rounding steps of the model's precision, where this is more than BOUND (half precision)
# torch's setting for float32 products -> rounding step, if a caller lowered the precision
PRECISION = {"high": 2.0**-10, "medium": 2.0**-7}
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3)
PATH = (0, 1, 3, 6)  # the nodes whose scores are compared: a path from the root down
CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)  # parents of the nodes for a target whose drafts must be chains
CHAIN_PATH = (0, 1, 2, 3)
ROWS = 8  # with one row, a tiny quantised model may show no difference; with 8 rows, at least 5 of 32 scores differed
PROMPT = 4  # tokens of each row's prompt
FRAMES = 5  # number of states that an encoder-decoder's encoder gives

OWN = ("torch.nn.modules.", "transformers.")
QUANTISED = ("transformers.integrations.", "transformers.quantizers.")

# model -> results, by the model's state when measured
_known: WeakKeyDictionary[PreTrainedModel, dict[Any, bool]] = WeakKeyDictionary()
_lock = Lock()


def siblings_matter(model: PreTrainedModel, target: HfTarget) -> bool:
    """Measure whether other nodes in a pass change a node's scores by more than the noise of the model's precision.

    If so, the first call for a model warns. Models that have only plain layers and weights of torch and transformers
    are not measured.
    """
    kinds = _kinds(model)
    if all(map(_is_plain, kinds)):
        return False
    state = (kinds, str(model.dtype), str(model.device))
    with _lock:
        known = _known.setdefault(model, {})
        if state not in known:
            apart, bound = difference(model, target)
            known[state] = not apart <= bound
            if known[state]:
                warnings.warn(
                    f"{type(model).__name__} scores a token beside others otherwise than alone, by {apart:.1g} of its "
                    "largest logit, as quantised activations do: it decodes without drafts. Quantise the weights alone "
                    "to have them.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return known[state]


def _kinds(model: nn.Module) -> frozenset[type]:
    """List the classes of parts, weights and replaced `forward`s: quantising in place changes them."""
    kinds = set[type]()
    for part in model.modules():
        kinds.add(type(part))
        kinds.update(map(type, part._parameters.values()))
        if "forward" in vars(part):
            kinds.add(type(vars(part)["forward"]))
    return frozenset(kinds)


@cache
def _is_plain(kind: type) -> bool:
    """Return whether this is a plain class of torch or transformers, which does not quantise activations."""
    if kind in (Tensor, nn.Parameter, type(None)):
        return True
    return kind.__module__.startswith(OWN) and not kind.__module__.startswith(QUANTISED)


@torch.inference_mode()
def difference(model: PreTrainedModel, target: HfTarget) -> tuple[float, float]:
    """Measure how much a node's logits change if only its path is scored instead of the tree, over several rows.

    Returns: the largest difference, relative to the largest logit, and the largest difference that noise may cause.
    """
    device, order = target.device, torch.Generator().manual_seed(0)
    plain = _plain_tokens(model, target)
    drawn = plain[torch.randint(len(plain), (ROWS, PROMPT + len(PARENTS)), generator=order)].to(device)
    inputs: dict[str, Any] = {"input_ids": drawn[:, :PROMPT]}
    if target.reads_encoder:
        states = torch.randn(ROWS, FRAMES, target.hidden_size, generator=order)
        inputs["encoder_outputs"] = (states.to(device, model.dtype),)
    tokens = drawn[:, PROMPT:]
    session, *_ = target.prefill(inputs, Needs())
    parents, path = (CHAIN, CHAIN_PATH) if target.chains else (PARENTS, PATH)
    tree = target.score(session, _draft(tokens, parents)).logits
    session, *_ = target.prefill(inputs, Needs())
    found, ones = list[Tensor](), torch.ones(ROWS, dtype=torch.long, device=device)
    for node in path:
        alone = target.score(session, _draft(tokens[:, node : node + 1], PARENTS[:1])).logits[:, 0].float()
        differences = (alone - tree[:, node].float()).abs().amax(1) / alone.abs().amax(1)
        found.append(differences.max())
        target.commit(session, Verdict(ones[:, None] - 1, ones, ones == 0, ones[:, None], ones))
    step = max(torch.finfo(tree.dtype).eps, PRECISION.get(torch.get_float32_matmul_precision(), 0.0))
    apart = float(torch.stack(found).max())  # `max` returns NaN if any value is NaN
    return apart, max(BOUND, NOISE * step)


def _draft(tokens: Tensor, parents: tuple[int, ...]) -> Draft:
    """Make a draft with the same tree below every row's root."""
    sizes = tokens.new_full((len(tokens),), len(parents))
    return Draft(tokens, tokens.new_tensor(parents).repeat(len(tokens), 1), sizes)


def _plain_tokens(model: PreTrainedModel, target: HfTarget) -> Tensor:
    """List the tokens that the configuration does not name as special (placeholders, end-of-text and others)."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value if isinstance(value, list) else [value])
    count = min(target.vocab_size, cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)
    return torch.tensor([token for token in range(count) if token not in special])
