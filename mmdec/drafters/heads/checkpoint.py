"""Reads heads in their published formats.

| format | recognised by | read as |
|---|---|---|
| Medusa-1 (FasterDecoding/Medusa) | `0.0.linear.*`, also under `medusa_head.` | medusa |
| Hydra, Hydra++ (zankner/Hydra) | `hydra_mlp.*`; Hydra++ has `prefix_embeding_layer.*` beside it | hydra |
| ReDrafter (apple/ml-recurrent-drafter) | `model_type`, or `rnn_u.*` and `rnn_w.*` | recurrent |
| MLPSpeculator (fms-extras, vLLM) | `model_type`, or `speculator.proj.0.weight` | mlp |

Medusa's and Hydra's code repeats one block, so their files hold the same block several times; it is read as several.
Heads that Hydra's config calls not grounded read no tokens, which makes them Medusa's. Hydra's files may also hold the
target's embedding, which the heads read from the target itself, and an embedding in `prefix_embeding_layer` that is
never used; nor is ReDrafter's `emb_norm`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mmdec.checks.weights import build_with_weights
from mmdec.drafters.heads.network import Heads, HeadsConfig
from mmdec.drafters.networks.checkpoint import COMPUTED_TENSORS, attention_sizes, check_no_system
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.hub.checkpoint import Checkpoint

HeadsLayout = Literal["medusa", "hydra", "redrafter", "mlp"]
MEDUSA_PREFIX = "medusa_head."
MEDUSA_BLOCK = re.compile(r"(?:medusa_head\.)?(\d{1,3})\.(\d{1,3})\.linear\.weight")
HYDRA_TENSOR = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.linear\.weight")
HYDRA_LAYER = "prefix_embeding_layer."  # as the published code spells it
UNREAD = {"input_embed_fn.weight", HYDRA_LAYER + "embed_tokens.weight", "emb_norm.weight"}
HYDRA_ARCHITECTURES = ("mlp", "prefix-mlp")
# whether there is a prefix layer -> number of a head's first block, step to the next one, and what an LM head's name
# has before "weight". Hydra++'s code has a dropout, which has a number but no tensors, before each block and LM head.
HYDRA_NUMBERS = {False: (0, 1, ""), True: (1, 2, "1.")}
HYDRA_HEAD_DIM = 128  # Vicuna's, whose number of attention heads Hydra++'s config.json lacks
REDRAFTER_MODEL_TYPE, MLP_MODEL_TYPE = "recurrent_drafting_drafter", "mlp_speculator"
REDRAFTER_BLOCK = re.compile(r"lm_head\.(\d{1,3})\.linear\.weight")
MLP_PREFIX = "speculator."
MLP_TENSOR = re.compile(r"(emb|proj|head|ln)\.(\d{1,3})\.(weight|bias)")


def recognises(described: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether a folder holds published heads.

    Args:
        described: The content of config.json.
        names: The tensors' names.
    """
    return _layout(described, names) is not None


def _layout(described: Mapping[str, Any], names: Iterable[str]) -> HeadsLayout | None:
    kind, names = described.get("model_type"), frozenset(names)
    if any(MEDUSA_BLOCK.fullmatch(name) for name in names):
        return "medusa"
    if any(HYDRA_TENSOR.fullmatch(name) for name in names):
        return "hydra"
    if kind == REDRAFTER_MODEL_TYPE or {"rnn_u.weight", "rnn_w.weight"} <= names:
        return "redrafter"
    return "mlp" if kind == MLP_MODEL_TYPE or MLP_PREFIX + "proj.0.weight" in names else None


def read_published(
    checkpoint: Checkpoint, system: str | None, vocab_size: int | None, target_tokens: int | None
) -> DraftNetwork:
    """Make the network of a folder; see `mmdec.pretrained.published.PublishedFormat`."""
    check_no_system(system, "heads")
    if vocab_size is not None:
        raise checkpoint.error("be read without `vocab_size`", "holds LM heads for its own tokens", "Leave it out.")
    state = {
        name: value
        for name, value in checkpoint.state.items()
        if name not in UNREAD and not COMPUTED_TENSORS.fullmatch(name)
    }
    layout = _layout(checkpoint.config, state) or "mlp"
    fields, prefix, state = READERS[layout](replace(checkpoint, state=state))
    config = HeadsConfig(**fields, target=str(checkpoint.config.get("base_model_name_or_path") or ""))
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Heads(config).state_dict().items()}
    names = {name: prefix + published_name(name, layout, config) for name in shapes}
    for name, shape in shapes.items():
        published, wanted = names[name], " x ".join(map(str, shape))
        given = state.get(published)
        if given is None or given.shape != shape:
            raise checkpoint.error(
                f"hold '{published}' of {wanted}",
                "does not" if given is None else f"holds one of {' x '.join(map(str, given.shape))}",
                "Use config.json and weights of the same training run.",
            )
    foreign = sorted(state.keys() - set(names.values()))
    if foreign:
        raise checkpoint.error(
            "hold only tensors that these heads have",
            f"holds '{foreign[0]}', {len(foreign)} unknown in all",
            "Such heads cannot be read yet.",
        )
    own = {name: state[published] for name, published in names.items()}
    network = build_with_weights(lambda: Heads(config), own, checkpoint.argument, checkpoint.folder)
    return network.to(next(iter(own.values())).dtype)


def published_name(name: str, layout: HeadsLayout, config: HeadsConfig) -> str:
    """Return the published name of a tensor, without the prefix that some files have.

    Args:
        name: The tensor's name in `Heads`.
    """
    parts = name.split(".")
    if layout == "medusa":
        return ".".join(parts[2:] if parts[0] == "heads" else [parts[1], str(config.blocks), parts[2]])
    if layout == "hydra":
        first, stride, inner = HYDRA_NUMBERS[config.prefix_layer]
        if parts[0] == "heads":
            return ".".join(["hydra_mlp", parts[2], str(first + stride * int(parts[3])), *parts[4:]])
        return f"hydra_lm_head.{parts[1]}.{inner}{parts[2]}" if parts[0] == "lm_heads" else HYDRA_LAYER + name
    name = name.removeprefix("heads.")
    if layout == "mlp":
        return name.replace("lm_heads.", "head.", 1)
    return f"lm_head.{config.blocks}.weight" if name == "lm_heads.0.weight" else name.replace("blocks.", "lm_head.", 1)


# the configuration's fields, the tensors' prefix, and the tensors by name
Read = tuple[dict[str, Any], str, dict[str, Tensor]]


def _medusa(checkpoint: Checkpoint) -> Read:
    state = dict(checkpoint.state)
    prefix = MEDUSA_PREFIX if any(name.startswith(MEDUSA_PREFIX) for name in state) else ""
    places = [match.groups() for match in map(MEDUSA_BLOCK.fullmatch, state) if match]
    heads, blocks = (1 + max(int(place[axis]) for place in places) for axis in (0, 1))
    vocabulary, size = checkpoint.shape(f"{prefix}0.{blocks}.weight")
    fields: dict[str, Any] = {
        "kind": "medusa",
        "hidden_size": size,
        "vocab_size": vocabulary,
        "heads": heads,
        "blocks": blocks,
        "lm_heads": "each",
    }
    return fields, prefix, state


def _hydra(checkpoint: Checkpoint) -> Read:
    """Read Hydra's heads, or Hydra++'s, which have a decoder layer before them."""
    described, state = checkpoint.config, dict(checkpoint.state)
    architecture, offset = described.get("hydra_head_arch", "mlp"), described.get("hidden_state_offset", 0)
    if architecture not in HYDRA_ARCHITECTURES or offset != 0:
        raise checkpoint.error(
            f"have a `hydra_head_arch` of {' or '.join(HYDRA_ARCHITECTURES)} and a `hidden_state_offset` of 0",
            f"has {architecture!r:.60} and {offset!r:.60}",
            "Such heads cannot be read yet.",
        )
    places = [match.groups() for match in map(HYDRA_TENSOR.fullmatch, state) if match]
    heads = 1 + max(int(level) for level, _ in places)
    blocks = sorted({int(block) for _, block in places})
    has_layer = any(name.startswith(HYDRA_LAYER) for name in state)
    first, _, inner = HYDRA_NUMBERS[has_layer]
    size = checkpoint.shape(f"hydra_mlp.0.{first}.linear.weight")[0]
    output = f"hydra_lm_head.0.{inner}"
    fields: dict[str, Any] = {
        "kind": "hydra" if f"hydra_mlp.0.{first}.res_connection.weight" in state else "medusa",
        "hidden_size": size,
        "vocab_size": checkpoint.shape(output + "weight")[0],
        "heads": heads,
        "blocks": len(blocks),
        "lm_heads": "each",
        "lm_head_bias": output + "bias" in state,
        "prefix_layer": has_layer,
    }
    if has_layer:
        layer = {name.removeprefix(HYDRA_LAYER): value for name, value in state.items()}
        rows = len(state.get(HYDRA_LAYER + "layers.0.self_attn.q_proj.weight", ()))
        settings = {"num_attention_heads": max(1, rows // HYDRA_HEAD_DIM), **described}
        sizes = attention_sizes(replace(checkpoint, state=layer), settings)
        fields |= {name: value for name, value in sizes.items() if name != "fc_bias"}
        fields["rope_theta"] = float(described.get("rope_theta", 1e4))
    return fields, "", state


def _redrafter(checkpoint: Checkpoint) -> Read:
    state, described = dict(checkpoint.state), checkpoint.config
    blocks = 1 + max((int(match[1]) for match in map(REDRAFTER_BLOCK.fullmatch, state) if match), default=-1)
    vocabulary, inner = checkpoint.shape(f"lm_head.{blocks}.weight")
    summed = "rnn_w.weight" not in state
    size = described.get("hidden_size") if summed else checkpoint.shape("rnn_w.weight")[0]
    if type(size) is not int or size < 1:
        raise checkpoint.error("name its `hidden_size` in config.json", f"has {size!r:.60}", "Set it as in training.")
    fields = {
        "kind": "recurrent",
        "hidden_size": size,
        "vocab_size": vocabulary,
        "blocks": blocks,
        "lm_heads": "one",
        "inner_size": inner,
        "summed": summed,
    }
    return fields, "", state


def _mlp(checkpoint: Checkpoint) -> Read:
    """Read an MLPSpeculator. Tied weights, which some files hold once per level, are read once."""
    described, given = checkpoint.config, checkpoint.state
    prefix = MLP_PREFIX if any(name.startswith(MLP_PREFIX) for name in given) else ""
    inner, size = checkpoint.shape(prefix + "proj.0.weight")
    heads, tied = described.get("n_predict"), bool(described.get("tie_weights"))
    if type(heads) is not int or heads < 1:
        raise checkpoint.error("name its `n_predict` in config.json", f"has {heads!r:.60}", "Set it as in training.")
    state: dict[str, Tensor] = {}
    for name, value in given.items():
        match = MLP_TENSOR.fullmatch(name.removeprefix(prefix))
        shared = name
        if tied and match:  # some files hold a copy of the shared tensors for each level
            shared = f"{prefix}{match[1]}.{min(int(match[2]), int(match[1] == 'proj'))}.{match[3]}"
            if shared != name and not (shared in given and torch.equal(given[shared], value)):
                raise checkpoint.error(
                    f"hold one tensor for '{shared}' and '{name}', as `tie_weights` says",
                    "holds two",
                    "Use config.json and weights of the same training run.",
                )
        state[shared] = value
    fields = {
        "kind": "mlp",
        "hidden_size": size,
        "vocab_size": checkpoint.shape(prefix + "emb.0.weight")[0],
        "heads": heads,
        "lm_heads": "one" if tied else "each",
        "inner_size": inner,
        "tied": tied,
        "scale_input": bool(described.get("scale_input")),
    }
    return fields, prefix, state


READERS: dict[HeadsLayout, Callable[[Checkpoint], Read]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "redrafter": _redrafter,
    "mlp": _mlp,
}
