"""Tests with a small random model whether a class of models gives a tree's nodes the same logits as each path alone.

The small model has two layers (one if the model has one), in float64 (or float32). It reads padded prompts of several
lengths, longer than its attention window. Then several trees are scored and partly accepted, one after another. Each
node's logits are compared with those of token-by-token decoding along its path. The logits differ much if the model
uses cache indices as positions, attends to fewer tokens than its cache holds, or mixes rows.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from mmdec.targets.recurrent_cache import cache_arguments, has_only_states, has_states
from mmdec.types import Draft, Needs, Target, Verdict

Scorer = Callable[[Any], Target]  # makes a target for a small model, without the checks that would call this test again
PROBE_LAYERS = 2
PROBE_WINDOW = 8
PROBE_VOCABULARY = 48
WINDOW_FIELDS = re.compile(r"window|sliding|chunk|local|block_size|blocks$|index_topk")
NOT_WINDOW_FIELDS = re.compile(
    r"^chunk_size$|chunk_size_feed_forward|experts|_layers$|_pattern$|dropout|mamba|lm_head|kernel|theta|mem_blocks"
)
PROBE_HEADS = 4
# field of a configuration -> its maximum in the small model; smaller values and 0 stay
MAX_PROBE_SIZES: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": PROBE_VOCABULARY,
    "vocab_size_per_layer_input": PROBE_VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "rotary_dim": 8,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 1,
    "kv_channels": 8,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "moe_latent_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
IDENTITY_FIELDS = {"model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}
# maximum difference of logits, relative to the largest logit; of 190 model classes, correct ones differed by less than
# 1e-6, and wrong ones by more than 0.2
MAX_DIFFERENCE = 1e-3
# maximum parameters of the small model; if it has more, the class is refused, to save time and memory
MAX_PARAMETERS = 3_000_000
WEIGHT_DEVIATION = 0.3  # standard deviation of the random weights, large enough that attention is not uniform
TREE_PARENTS = ((-1, 0, 0, 1, 1, 2), (-1, 0, 1, 0, 3))  # [round][node]: the node's parent, -1 at the root
TREE_LEAVES = ((3, 4, 5), (2, 4))  # [round]: nodes whose paths are compared; the path to the last of them is accepted
# `TREE_PARENTS` and `TREE_LEAVES` for models whose drafts must be chains
CHAIN_PARENTS = ((-1, 0, 1, 2, 3, 4), (-1, 0, 1), (-1,), (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8), (-1, 0, 1))
CHAIN_LEAVES = ((5, 2), (2,), (0,), (9, 8), (2, 1))
PROMPT_LENGTHS = ((13,), (12, 5, 9))  # [batch]: lengths of its prompts, in tokens


def tiny_config(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Make a configuration of the same class with two small layers.

    The fields in `MAX_PROBE_SIZES` become small. If there are several types of layers, two of them remain. A model of
    one layer keeps one, so that lists with an entry for each layer fit. Attention windows become `PROBE_WINDOW` tokens,
    so that a short text exceeds them. Boolean settings do not change.

    Args:
        changes: Fields to override.
    """
    fields = {name: value for name, value in config.to_dict().items() if name not in IDENTITY_FIELDS}
    names = dict(config.attribute_map)
    layers = getattr(config, "num_hidden_layers", PROBE_LAYERS)
    heads = getattr(config, "num_attention_heads", PROBE_HEADS)
    small: dict[str, Any] = {}
    for name, maximum in MAX_PROBE_SIZES.items():
        field = names.get(name, name)
        if isinstance(fields.get(field), int):
            small[field] = min(fields[field], maximum)
        elif field == "head_dim" and field in fields:
            small[field] = maximum  # set it if it is None, too; None means hidden_size / heads
    small[names.get("num_hidden_layers", "num_hidden_layers")] = min(layers, PROBE_LAYERS)
    if isinstance(heads, int):
        small[names.get("num_attention_heads", "num_attention_heads")] = PROBE_HEADS
    for name, value in fields.items():
        if name.endswith(("num_key_value_heads", "num_kv_heads", "multi_query_group_num")) and name not in small:
            small[name] = PROBE_HEADS if value is None or value == heads else min(value, 2)
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > PROBE_LAYERS:
            small[name] = _two_kinds(list(value))
        elif name == "per_layer_config" and isinstance(value, dict):
            small[name] = _own_sizes(value, fields)
        elif is_window(name, value):
            window = PROBE_WINDOW
            if name.endswith("blocks"):
                window = 1
            elif "block" in name:
                window = PROBE_WINDOW // 2
            small[name] = min(value, window)
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = {"pad_token_id": 0, "bos_token_id": 1}.get(name, 2)
    if isinstance(fields.get("eos_token_id"), (list, tuple)):
        small["eos_token_id"] = 2
    if isinstance(rope := fields.get("rope_parameters"), dict):
        small["rope_parameters"] = _shorten_factors(rope)
    return type(config)(**{**fields, **small, **changes})


def is_window(name: str, value: Any) -> bool:
    """Return whether a field of a configuration may limit how many tokens back a token attends."""
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return number and bool(WINDOW_FIELDS.search(name)) and not NOT_WINDOW_FIELDS.search(name)


def _shorten_factors(rope: dict[str, Any]) -> dict[str, Any]:
    """Shorten the lists of factors of rotary positions, one factor for each frequency, to the small head size."""
    factor_count = int(MAX_PROBE_SIZES["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
    shortened = {name: value[:factor_count] if isinstance(value, list) else value for name, value in rope.items()}
    return {name: _shorten_factors(value) if isinstance(value, dict) else value for name, value in shortened.items()}


def _own_sizes(settings: dict[Any, dict[str, Any]], model_fields: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Choose sizes of the small model's second layer, for models whose layers have different sizes.

    Args:
        settings: Layer index -> the fields in which this layer differs.
        model_fields: Fields of the whole model.

    Returns:
        The small model's layer index -> fields. The ratio of each field to that of other layers stays the same.
    """
    kinds: list[Any] = model_fields.get("layer_types") or []
    other = next((index for index, kind in enumerate(kinds) if kind != kinds[0]), 1)
    layer_fields = next((fields for index, fields in settings.items() if int(index) == other), {})
    sized = {
        name: value for name, value in layer_fields.items() if MAX_PROBE_SIZES.get(name) and model_fields.get(name)
    }
    return (
        {1: {name: max(1, MAX_PROBE_SIZES[name] * value // model_fields[name]) for name, value in sized.items()}}
        if sized
        else {}
    )


def _two_kinds(kinds: list[Any]) -> list[Any]:
    """Choose two entries for the small model's two layers.

    Args:
        kinds: Each layer's entry. The two differ if not all are equal.
    """
    second = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
    return [kinds[0], second]


class TooLarge(Exception):
    """Raised if even a small model of the class has too many parameters."""


def tree_path_difference(
    kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, scorer: Scorer
) -> float:
    """Return the largest difference between a node's logits in a tree and in its path alone.

    It is relative to the largest logit. torch's random state is restored.

    Args:
        kind: The model class.
        attention: Name of the attention implementation.
        scorer: Makes a target for the small model. Errors of the model class are passed on.
    """
    model = tiny_model(kind, config, attention)
    with torch.no_grad():
        with suppress(RuntimeError, ValueError):
            # float64 may give NaN: "eager" attention's softmax is in float32, where the mask of a padding row overflows
            if isfinite(worst := _max_difference(model.double(), scorer)):
                return worst
        return _max_difference(model.float(), scorer)


def tiny_model(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str, seed: int = 0) -> Any:
    """Make a model with two small layers and random weights, on the CPU."""
    shape = tiny_config(config)
    shape._attn_implementation = attention
    shape._experts_implementation = "eager"  # other implementations do not support float64
    with torch.device("meta"):
        size = kind(copy.deepcopy(shape)).num_parameters()
    if size > MAX_PARAMETERS:
        raise TooLarge(f"two small layers have {size} parameters")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = kind(shape)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, WEIGHT_DEVIATION)
    return model.eval()


def _max_difference(model: Any, scorer: Scorer) -> float:
    target = scorer(model)
    return max(_batch_difference(model, target, lengths) for lengths in PROMPT_LENGTHS)


def _batch_difference(model: Any, target: Target, lengths: tuple[int, ...]) -> float:
    """Decode one batch of the small model in rounds.

    Args:
        lengths: Lengths of the batch's prompts, in tokens.

    Returns:
        The largest relative difference between logits in a tree and in a path alone.
    """
    rng, last_token = random.Random(len(lengths)), target.vocab_size - 1

    def draw(width: int) -> Tensor:
        return torch.tensor([[rng.randint(3, last_token) for _ in range(width)] for _ in lengths])

    ids = draw(max(lengths))
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    plain = _Plain(model, ids, mask)
    inputs = {"input_ids": ids} if len(lengths) == 1 else {"input_ids": ids, "attention_mask": mask}
    output = target.prefill(inputs, Needs())
    session, scores = output.session, output.scores
    worst = _relative_difference(scores.logits[:, -1], plain.logits)
    text = ids
    drafts = (CHAIN_PARENTS, CHAIN_LEAVES) if has_states(model.config) else (TREE_PARENTS, TREE_LEAVES)
    for parents, leaves in zip(*drafts, strict=True):
        tokens = draw(len(parents))
        draft = Draft(tokens, torch.tensor([parents] * len(lengths)), torch.full((len(lengths),), len(parents)))
        logits = target.score(session, draft).logits
        branch, path = plain, [0]
        for leaf in leaves:
            branch, path = plain.branch(), _path(parents, leaf)
            for node in path:
                branch.step(tokens[:, node])
                worst = max(worst, _relative_difference(logits[:, node], branch.logits))
        plain, text = branch, torch.cat([text, tokens[:, path]], 1)
        ones = torch.ones(len(lengths), dtype=torch.long)
        target.commit(session, Verdict(torch.tensor([path] * len(lengths)), ones, ones == 0, ones[:, None], ones))
    if has_states(model.config):  # recurrent layers read a whole text by a scan, which may differ
        return worst
    # a model without a causal mask gives other logits if it reads the whole text at once
    full = _Plain(model, text, torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - mask.shape[1])], 1))
    return max(worst, _relative_difference(full.logits, plain.logits))


class _Plain:
    """Decodes without drafts, as a reference: it reads the prompt, then one token at a time.

    It holds the cache and the last logits (B, V).
    """

    def __init__(self, model: Any, ids: Tensor, mask: Tensor) -> None:
        self.model, self.mask = model, mask
        self.cache = DynamicCache(config=model.config)
        self.position = mask.sum(1, keepdim=True) - 1
        self.logits = self._pass(ids, (mask.cumsum(1) - 1).clamp(min=0))

    def step(self, tokens: Tensor) -> None:
        """Process one token (B,) for each batch row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self.position = self.position + 1
        self.logits = self._pass(tokens[:, None], self.position)

    def branch(self) -> _Plain:
        """Return a copy with a cache of its own, which can process other tokens than the original."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def _pass(self, ids: Tensor, positions: Tensor) -> Tensor:
        arguments = cache_arguments(self.model, self.cache, positions)
        # no mask if it is all ones, or after the prompt of a model without attention: as `generate` does
        unmasked = bool(self.mask.all()) or (has_only_states(self.model.config) and ids.shape[1] < self.mask.shape[1])
        return self.model(
            input_ids=ids,
            attention_mask=None if unmasked else self.mask,
            **arguments,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def _path(parents: tuple[int, ...], node: int) -> list[int]:
    """Return the nodes on the path from the root to `node`.

    Args:
        parents: [n]: parent of node n, -1 at the root.
    """
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _relative_difference(scores: Tensor, expected: Tensor) -> float:
    """Return how much two logits differ; infinity if there is a NaN.

    It is the largest absolute difference divided by the largest expected value.
    """
    largest = float((scores - expected).abs().max() / expected.abs().max())
    return largest if largest == largest else float("inf")


def possible_window_fields(
    kind: type[PreTrainedModel], config: type[PreTrainedConfig], fields: dict[str, Any]
) -> list[str]:
    """Return the names of integer fields that may be attention windows.

    They are needed only for a class from outside transformers, whose fields may have any name; else the list is empty.

    Args:
        fields: The configuration's fields.
    """
    if kind.__module__.startswith("transformers.models."):
        return []
    sizes = {*MAX_PROBE_SIZES, *config.attribute_map, *config.attribute_map.values()}
    numbers = [name for name, value in fields.items() if type(value) is int and value > PROBE_WINDOW]
    return [name for name in numbers if name not in sizes and not name.endswith("_token_id")]
