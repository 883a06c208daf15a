"""Checks whether the logits of a tree's nodes depend on the other nodes, as happens with quantised activations.

If activations are quantised with one scale for a whole pass, the scale changes with the other nodes and rows. Even with
one scale per token, small rounding differences become whole quantisation steps. Quantised weights do no harm if
activations are not quantised. The check is made once for each model whose classes of layers or weights may quantise
activations.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.checks.caller import warn_user
from mmdec.targets.hf_target import HfTarget
from mmdec.types import Draft, Needs, Verdict

# maximum difference of logits, relative to the largest logit: float32 noise is below 4e-5, quantised activations give
# more than 2e-2
MAX_DIFFERENCE = 1e-3
MAX_ROUNDING_STEPS = 32  # in half precision: the same maximum, in rounding steps of the dtype
# `torch.get_float32_matmul_precision()`, if lowered -> relative rounding step
ROUNDING_STEP = {"high": 2.0**-10, "medium": 2.0**-7}
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3)
TREE_PATH = (0, 1, 3, 6)  # nodes of the tree whose logits are compared: a path from the root down
CHAIN_PARENTS = (-1, 0, 1, 2, 3, 4, 5, 6)  # parents of the nodes, for models whose drafts must be chains
CHAIN_PATH = (0, 1, 2, 3)
# batch rows: 1 row of a tiny quantised model may show no difference; in 8 rows, at least 5 of 32 nodes did
BATCH_ROWS = 8
PROMPT_TOKENS = 4  # tokens of each batch row's prompt
ENCODER_FRAMES = 5  # encoder states per batch row, for encoder-decoder models

PLAIN_MODULES = ("torch.nn.modules.", "transformers.")
QUANTISER_MODULES = ("transformers.integrations.", "transformers.quantizers.")

# model -> {(classes of its modules and weights, dtype, device) -> whether siblings matter}
_known: WeakKeyDictionary[PreTrainedModel, dict[Any, bool]] = WeakKeyDictionary()
_lock = Lock()


def siblings_change_logits(model: PreTrainedModel, target: HfTarget) -> bool:
    """Return whether other nodes in a pass change a node's logits by more than rounding noise.

    If so, the first call for a model warns. If no class of layers or weights can quantise activations, False is
    returned without a measurement.
    """
    kinds = _kinds(model)
    if all(map(_is_plain, kinds)):
        return False
    state = (kinds, str(model.dtype), str(model.device))
    with _lock:
        results = _known.setdefault(model, {})
        if state not in results:
            deviation, bound = sibling_difference(model, target)
            results[state] = not deviation <= bound
            if results[state]:
                warn_user(
                    f"{type(model).__name__} scores a token differently if other rows or tokens share its pass, by "
                    f"{deviation:.1g} of its largest logit, probably because its activations are quantised. It "
                    "decodes without drafts. Quantise only the weights to have drafts.",
                    RuntimeWarning,
                )
        return results[state]


def _kinds(model: nn.Module) -> frozenset[type]:
    """Return the classes of the model's modules, of their weights and of replaced `forward`s.

    Quantising a model in place changes at least one of these classes.
    """
    kinds = set[type]()
    for part in model.modules():
        kinds.add(type(part))
        kinds.update(map(type, part._parameters.values()))
        if "forward" in vars(part):
            kinds.add(type(vars(part)["forward"]))
    return frozenset(kinds)


@cache
def _is_plain(kind: type) -> bool:
    """Return whether this is a class of torch or transformers that does not quantise activations."""
    if kind in (Tensor, nn.Parameter, type(None)):
        return True
    return kind.__module__.startswith(PLAIN_MODULES) and not kind.__module__.startswith(QUANTISER_MODULES)


@torch.inference_mode()
def sibling_difference(model: PreTrainedModel, target: HfTarget) -> tuple[float, float]:
    """Measure how much a node's logits change if only its path is scored instead of the whole tree.

    Returns:
        The largest difference over several rows, and the largest difference that rounding noise may cause; both
        relative to the largest logit.
    """
    device, order = target.device, torch.Generator().manual_seed(0)
    plain = _plain_tokens(model, target)
    tokens_drawn = plain[
        torch.randint(len(plain), (BATCH_ROWS, PROMPT_TOKENS + len(TREE_PARENTS)), generator=order)
    ].to(device)
    inputs: dict[str, Any] = {"input_ids": tokens_drawn[:, :PROMPT_TOKENS]}
    if target.reads_encoder:
        states = torch.randn(BATCH_ROWS, ENCODER_FRAMES, target.hidden_size, generator=order)
        inputs["encoder_outputs"] = (states.to(device, model.dtype),)
    tokens = tokens_drawn[:, PROMPT_TOKENS:]
    session = target.prefill(inputs, Needs()).session
    parents, path = (CHAIN_PARENTS, CHAIN_PATH) if target.needs_chains else (TREE_PARENTS, TREE_PATH)
    tree = target.score(session, _draft(tokens, parents)).logits
    session = target.prefill(inputs, Needs()).session
    differences_of_nodes, ones = list[Tensor](), torch.ones(BATCH_ROWS, dtype=torch.long, device=device)
    for node in path:
        in_path = target.score(session, _draft(tokens[:, node : node + 1], TREE_PARENTS[:1])).logits[:, 0].float()
        differences = (in_path - tree[:, node].float()).abs().amax(1) / in_path.abs().amax(1)
        differences_of_nodes.append(differences.max())
        target.commit(session, Verdict(ones[:, None] - 1, ones, ones == 0, ones[:, None], ones))
    step = max(torch.finfo(tree.dtype).eps, ROUNDING_STEP.get(torch.get_float32_matmul_precision(), 0.0))
    # `max` returns NaN if any difference is NaN, so that NaN is not overlooked
    largest = float(torch.stack(differences_of_nodes).max())
    return largest, max(MAX_DIFFERENCE, MAX_ROUNDING_STEPS * step)


def _draft(tokens: Tensor, parents: tuple[int, ...]) -> Draft:
    """Make a draft with the same tree shape in every batch row.

    Args:
        tokens: (B, N).
        parents: [n]: parent of node n, -1: root.
    """
    sizes = tokens.new_full((len(tokens),), len(parents))
    return Draft(tokens, tokens.new_tensor(parents).repeat(len(tokens), 1), sizes)


def _plain_tokens(model: PreTrainedModel, target: HfTarget) -> Tensor:
    """Return the ids of all tokens but the special ones that the configuration names (placeholders, EOS and others)."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value if isinstance(value, list) else [value])
    count = min(target.vocab_size, cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)
    return torch.tensor([token for token in range(count) if token not in special])
