"""Whether a node of a tree is scored as its path alone is: asked once of the caller's own model, where it has layers or
weights of kinds that may quantise activations.

A scale that is taken from a whole pass (dynamic quantisation) changes with every other node and row; and even one for
each token rounds the noise of another kernel up to a step. Quantised weights alone do neither.
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

BOUND = 1e-3  # of the largest logit: in float32 up to 4e-5 are noise, quantised activations give 2e-2 and more
NOISE = 32  # in half precision the bound is as many of its steps
PRECISION = {"high": 2.0**-10, "medium": 2.0**-7}  # of float32 products, where a caller lowered it
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3)
PATH = (0, 1, 3, 6)  # from the root down
ROWS = 8  # a rounding that flips is rare in one row of a tiny model; of 8 rows at least 5 of 32 scores had one
PROMPT = 4  # tokens
FRAMES = 5  # of an encoder

OWN = ("torch.nn.modules.", "transformers.")
QUANTISED = ("transformers.integrations.", "transformers.quantizers.")

_known: WeakKeyDictionary[PreTrainedModel, dict[Any, bool]] = WeakKeyDictionary()  # by the state that was measured
_lock = Lock()


def siblings_matter(model: PreTrainedModel, target: HfTarget) -> bool:
    """Whether this model scores a node otherwise beside other nodes than alone, beyond the noise of its precision. The
    first time it says so, it warns. One of torch's and transformers' own layers and weights is not measured."""
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
    """Of all parts, their weights, and functions put in the place of a `forward`: they change where a model is
    quantised in place."""
    kinds = set[type]()
    for part in model.modules():
        kinds.add(type(part))
        kinds.update(map(type, part._parameters.values()))
        if "forward" in vars(part):
            kinds.add(type(vars(part)["forward"]))
    return frozenset(kinds)


@cache
def _is_plain(kind: type) -> bool:
    """Whether it is a layer or a weight that treats each token by itself."""
    if kind in (Tensor, nn.Parameter, type(None)):
        return True
    return kind.__module__.startswith(OWN) and not kind.__module__.startswith(QUANTISED)


@torch.inference_mode()
def difference(model: PreTrainedModel, target: HfTarget) -> tuple[float, float]:
    """The largest difference between a node's logits in a tree and after its path alone, over the largest logit; and
    what noise may amount to. Several rows, as many trees."""
    device, order = target.device, torch.Generator().manual_seed(0)
    plain = _plain_tokens(model, target)
    drawn = plain[torch.randint(len(plain), (ROWS, PROMPT + len(PARENTS)), generator=order)].to(device)
    inputs: dict[str, Any] = {"input_ids": drawn[:, :PROMPT]}
    if target.reads_encoder:
        states = torch.randn(ROWS, FRAMES, target.hidden_size, generator=order)
        inputs["encoder_outputs"] = (states.to(device, model.dtype),)
    tokens = drawn[:, PROMPT:]
    session, *_ = target.prefill(inputs, Needs())
    tree = target.score(session, _draft(tokens, PARENTS)).logits
    session, *_ = target.prefill(inputs, Needs())
    apart, ones = 0.0, torch.ones(ROWS, dtype=torch.long, device=device)
    for node in PATH:
        alone = target.score(session, _draft(tokens[:, node : node + 1], PARENTS[:1])).logits[:, 0].float()
        differences = (alone - tree[:, node].float()).abs().amax(1) / alone.abs().amax(1)
        apart = max(apart, float(differences.max()))
        target.commit(session, Verdict(ones[:, None] - 1, ones, ones == 0, ones[:, None], ones))
    step = max(torch.finfo(tree.dtype).eps, PRECISION.get(torch.get_float32_matmul_precision(), 0.0))
    return apart, max(BOUND, NOISE * step)


def _draft(tokens: Tensor, parents: tuple[int, ...]) -> Draft:
    """The same tree below every row's root."""
    sizes = tokens.new_full((len(tokens),), len(parents))
    return Draft(tokens, tokens.new_tensor(parents).repeat(len(tokens), 1), sizes)


def _plain_tokens(model: PreTrainedModel, target: HfTarget) -> Tensor:
    """Tokens that stand for themselves, and not for an image or an end."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value if isinstance(value, list) else [value])
    count = min(target.vocab_size, cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)
    return torch.tensor([token for token in range(count) if token not in special])
