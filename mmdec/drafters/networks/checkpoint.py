"""What the readers of published draft networks share: sizes of layers, rotary positions and vocabulary tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdec.checks.weights import build_with_weights
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.registry import network_class
from mmdec.errors import InputError
from mmdec.hub.checkpoint import Checkpoint

FIRST_LAYER = "layers.0."
# tensors that are not read because mmdec computes them itself
COMPUTED_TENSORS = re.compile(r"verifier_(norm|lm_head)\..*|(.*\.)?rotary_emb\.inv_freq")
# RoPE types without scaling; M-RoPE equals RoPE for text, where its three positions are equal
PLAIN_ROPE = ("default", "mrope")
SCALED_ROPE = ("linear", "llama3", "yarn")


def check_no_system(system: str | None, name: str) -> None:
    """Raise InputError if the caller gives `system` for a format that says itself what it is.

    Args:
        name: The format's name.
    """
    if system is not None:
        raise InputError(
            f"`system` does not apply to a {name} checkpoint, whose layout already identifies it, but is "
            f"{system!r:.60}. Remove the argument."
        )


def build_network(
    name: str, sizes: dict[str, Any], state: Mapping[str, Tensor], checkpoint: Checkpoint
) -> DraftNetwork:
    """Make a draft network and load its weights, in the file's precision.

    Args:
        name: The drafter's name.
        sizes: Fields of the network's configuration.
        state: Tensors by name.
    """
    kind: Any = network_class(name)
    network: DraftNetwork = build_with_weights(
        lambda: kind(kind.config_class(**sizes)), state, checkpoint.argument, checkpoint.folder
    )
    return network.to(state["fc.weight"].dtype)


def published_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of the decoder layer.

    They are `transformer_layer_config` of the config (speculators), else `text_config`, else the whole config.
    """
    settings = dict(checkpoint.config)
    for name in ("text_config", "transformer_layer_config"):
        value = checkpoint.config.get(name)
        settings |= value if isinstance(value, dict) else {}
    return settings


def attention_sizes(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the first layer's attention, from tensor shapes and `settings`."""
    heads = settings.get("num_attention_heads")
    rows = checkpoint.shape(f"{FIRST_LAYER}self_attn.q_proj.weight")[0]
    if type(heads) is not int or heads < 1 or rows % heads:
        raise InputError(
            f"`{checkpoint.argument}` must say how many heads {rows} rows are, but `num_attention_heads` is "
            f"{heads!r:.60}. Use the config.json that belongs to the weights."
        )
    dim = rows // heads
    return {
        "intermediate_size": checkpoint.shape(f"{FIRST_LAYER}mlp.gate_proj.weight")[0],
        "num_attention_heads": heads,
        "num_key_value_heads": checkpoint.shape(f"{FIRST_LAYER}self_attn.k_proj.weight")[0] // dim,
        "head_dim": dim,
        "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
        "attention_bias": f"{FIRST_LAYER}self_attn.q_proj.bias" in checkpoint.state,
        "fc_bias": "fc.bias" in checkpoint.state,
    }


def read_rope(
    checkpoint: Checkpoint, settings: Mapping[str, Any], kinds: tuple[str, ...]
) -> tuple[float, dict[str, Any]]:
    """Return the base of the rotary positions (RoPE), and their scaling settings.

    Args:
        kinds: The supported RoPE types.

    Raises:
        InputError: For another type.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in kinds:
        raise InputError(
            f"`{checkpoint.argument}` must have rotations of a kind that is known ({', '.join(kinds)}), but "
            f"`rope_scaling` is {kind!r:.60}. Such networks cannot be read yet."
        )
    theta = rope.get("rope_theta") or settings.get("rope_theta") or 1e4
    return theta, {**{name: value for name, value in rope.items() if name != "rope_theta"}, "rope_type": kind}


def rename_tensors(checkpoint: Checkpoint, rename: Callable[[str], str] = str) -> Checkpoint:
    """Return a checkpoint with mmdec's names of the tensors, without those that mmdec computes itself.

    Args:
        rename: Called with a published name without "model." in front; returns mmdec's.
    """
    state = {rename(name.removeprefix("model.")): value for name, value in checkpoint.state.items()}
    return replace(
        checkpoint, state={name: value for name, value in state.items() if not COMPUTED_TENSORS.fullmatch(name)}
    )


def layered_fields(checkpoint: Checkpoint, settings: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return the fields that the configurations of EAGLE-3 and DFlash share.

    Args:
        settings: The result of `published_settings`.
        vocab_size: The target's vocabulary size; None: the size in the folder.
    """
    state = checkpoint.state
    theta, rope = read_rope(checkpoint, settings, (*PLAIN_ROPE, *SCALED_ROPE))
    sizes = [len(state[name]) for name in ("t2d", "embed_tokens.weight") if name in state]
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    return {
        **attention_sizes(checkpoint, settings),
        "hidden_size": checkpoint.shape("fc.weight")[0],
        "vocab_size": vocab_size or (sizes[0] if sizes else settings.get("vocab_size")),
        "num_hidden_layers": count_layers(state),
        "rope_theta": theta,
        "rope_scaling": rope if rope["rope_type"] in SCALED_ROPE else None,
        "own_embedding": "embed_tokens.weight" in state,
        "target": str(verifier.get("name_or_path") or ""),
    }


def mmdec_fields(described: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return those of these fields that `mmdec.pretrained.export` wrote under "mmdec" in config.json."""
    fields = described.get("mmdec")
    return {name: fields[name] for name in names if name in fields} if isinstance(fields, dict) else {}


def count_layers(state: Mapping[str, Tensor]) -> int:
    return 1 + max((int(match[1]) for match in map(re.compile(r"layers\.(\d+)\.").match, state) if match), default=-1)


def check_layer(checkpoint: Checkpoint, settings: Mapping[str, Any], others: tuple[str, ...] = ()) -> None:
    """Raise InputError unless the decoder layer is Llama's or Qwen3's, without a sliding window.

    Args:
        others: Further values of `model_type` that are allowed.
    """
    for name, fits, rule in (
        ("hidden_act", settings.get("hidden_act", "silu") == "silu", "silu"),
        ("layer_types", "sliding_attention" not in (settings.get("layer_types") or ()), "full attention in all layers"),
        ("partial_rotary_factor", settings.get("partial_rotary_factor") in (None, 1, 1.0), "1"),
        (
            "model_type",
            settings.get("model_type", "llama") in ("llama", "qwen3", "eagle3", "peagle", *others, ""),
            "llama or qwen3",
        ),
    ):
        if not fits:
            raise checkpoint.error(
                f"have `{name}` {rule}", f"has {settings.get(name)!r:.60}", "Such networks cannot be read yet."
            )


def with_vocabulary_tables(checkpoint: Checkpoint, sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by name, with checked tables between the draft vocabulary and the target's.

    The tables are `d2t` as offsets, and `t2d`. If both vocabularies are the same, they are left out.

    Args:
        sizes: Fields of the configuration.

    Raises:
        InputError: If the tables are missing, or contradict each other.
    """
    state, drafted, total = checkpoint.state, sizes["draft_vocab_size"], sizes["vocab_size"]
    draft_ids = torch.arange(drafted)
    offsets, is_drafted = state.get("d2t"), state.get("t2d")
    if type(total) is not int or total < drafted or (offsets is None and is_drafted is None and drafted < total):
        raise checkpoint.error(
            f"hold 'd2t' or 't2d' for {drafted} drafted tokens of {total}",
            "does not",
            "Fetch the tables of its training, or set `vocab_size` in config.json to the target's.",
        )
    if offsets is None:
        ids = draft_ids if is_drafted is None else is_drafted.nonzero()[:, 0]
    else:
        ids = offsets.long() + draft_ids
        if is_drafted is not None and not _tables_agree(ids, is_drafted) and _tables_agree(offsets.long(), is_drafted):
            ids = offsets.long()  # some files hold token ids instead of offsets
    fits = (
        ids.shape == draft_ids.shape and int(ids.min()) >= 0 and int(ids.max()) < total and len(ids.unique()) == drafted
    )
    if not fits or (is_drafted is not None and not _tables_agree(ids, is_drafted)):
        raise checkpoint.error(
            f"hold {drafted} different tokens below {total} in 'd2t', those of 't2d'", "does not", "Download it again."
        )
    if drafted == total and not torch.equal(ids, draft_ids):
        raise checkpoint.error("have a 'd2t' of zeros for a whole vocabulary", "does not", "Download it again.")
    if drafted == total:
        return {name: value for name, value in state.items() if name not in ("d2t", "t2d")}
    return {**state, "d2t": ids - draft_ids, "t2d": torch.zeros(total, dtype=torch.bool).index_fill(0, ids, True)}


def _tables_agree(ids: Tensor, is_drafted: Tensor) -> bool:
    """Return whether `ids` (D,) are exactly the indices where `is_drafted` (V,) bool is True."""
    inside = int(ids.min()) >= 0 and int(ids.max()) < len(is_drafted)
    return inside and int(is_drafted.sum()) == len(ids.unique()) and bool(is_drafted[ids].all())
