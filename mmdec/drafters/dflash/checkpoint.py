"""Reads DFlash networks in their published formats, and writes those that engines read.

| format | recognised by | its target |
|---|---|---|
| z-lab, SpecForge, NeMo (`block_size` beside `dflash_config` or in it) | `hidden_norm.weight` beside `fc.weight` | |
| transformers (Muse Glimmer's assistant) | `encoder.fc.weight` | |
| speculators | `speculators_model_type`; its own LM head | its verifier |

DSpark (speculators, NeMo), DFlash 2 (z-lab, NeMo) and Domino (SpecForge, NeMo) are DFlash with further tensors:
`markov_head` and `confidence_head`, `candidate_selector`, or `prefix_gru`.

`target_layer_ids` are outputs; the output of the last layer is taken after the final norm, as in transformers.
speculators' `aux_hidden_state_layer_ids` are boundaries: boundary k is the residual stream that enters layer k.

Engines read speculators' format, with an LM head only where the network has its own, and z-lab's ("flat"), which has
none. DSpark is written in the first, DFlash 2 and Domino in the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mmdec.drafters.dflash.heads import MARKOV_HEADS
from mmdec.drafters.dflash.network import DFlash
from mmdec.drafters.eagle.checkpoint import EAGLE3_TENSORS
from mmdec.drafters.networks.checkpoint import (
    build_network,
    check_layer,
    check_no_system,
    layered_fields,
    mmdec_fields,
    published_settings,
    rename_tensors,
    with_vocabulary_tables,
)
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.export import (
    Exported,
    Exporter,
    ExportTarget,
    Layout,
    export_dtype,
    export_state,
    layer_settings,
    refuse_features,
    speculators_settings,
)
from mmdec.hub.checkpoint import Checkpoint

DFLASH_TENSORS = {"hidden_norm.weight", "fc.weight"}  # a DFlash has both; used if the config names no drafter
MUSE_MODEL_TYPE = "muse_glimmer_assistant"  # model_type of the only DFlash class in transformers


def recognises(described: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Return whether a folder holds a DFlash.

    Args:
        described: The content of config.json.
        names: The tensors' names.
    """
    kind = described.get("speculators_model_type") or ""
    if kind or any(EAGLE3_TENSORS.fullmatch(name) for name in names):
        return kind in ("dflash", "dspark")
    named = "dflash_config" in described or "dflash" in _architectures(described) or _is_muse(described)
    return named or names >= DFLASH_TENSORS


def _architectures(described: Mapping[str, Any]) -> str:
    return " ".join(map(str, described.get("architectures") or ())).lower()


def _is_muse(described: Mapping[str, Any]) -> bool:
    return described.get("model_type") == MUSE_MODEL_TYPE


def read_published(
    checkpoint: Checkpoint, system: str | None, vocab_size: int | None, target_tokens: int | None
) -> DraftNetwork:
    """Make the network of a folder; see `mmdec.pretrained.published.PublishedFormat`."""
    check_no_system(system, "DFlash")
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    checkpoint = rename_tensors(checkpoint, lambda name: names.get(name, name))
    described = checkpoint.config if "vocab_size" in checkpoint.config else {"vocab_size": target_tokens}
    sizes = _sizes(replace(checkpoint, config={**checkpoint.config, **described}), vocab_size)
    return build_network("dflash", sizes, with_vocabulary_tables(checkpoint, sizes), checkpoint)


def _sizes(checkpoint: Checkpoint, vocab_size: int | None) -> dict[str, Any]:
    """Return the fields of DFlash's configuration.

    Args:
        vocab_size: The target's vocabulary size; None: the size in the folder.
    """
    described, settings = checkpoint.config, published_settings(checkpoint)
    size, width = checkpoint.shape("fc.weight")
    # the default of transformers' class for Muse Glimmer
    windows = {"layer_types": ["sliding_attention"]} if _is_muse(described) else {}
    check_layer(checkpoint, {**windows, **settings}, (MUSE_MODEL_TYPE,))
    dflash_settings = described.get("dflash_config")
    options = {**settings, **(dflash_settings if isinstance(dflash_settings, dict) else {})}
    for name in ("block_size", "mask_token_id"):
        if type(options.get(name)) is not int:
            raise checkpoint.error(
                f"name its `{name}` in config.json, at the top or in `dflash_config`",
                f"has {options.get(name)!r:.60}",
                "Set it as in training.",
            )
    layers = _layers(checkpoint, options)
    if width % size or (layers and width != len(layers) * size):
        raise checkpoint.error(
            f"have an fc of {len(layers) or 'some'} x {size} channels, one for each layer that is read",
            f"has one of {width}",
            "Use config.json and weights of the same training run.",
        )
    fields = layered_fields(checkpoint, settings, vocab_size)
    if _is_muse(described) and not settings.get("rope_parameters"):
        fields["rope_theta"] = 5e5  # the default RoPE base of transformers' class for Muse Glimmer
    if type(fields["vocab_size"]) is not int:
        raise checkpoint.error(
            "say how many tokens its target has", "has no `vocab_size`", "Convert it with `--vocab-size`."
        )
    head = "lm_head.weight" in checkpoint.state
    return {
        **fields,
        "draft_vocab_size": checkpoint.shape("lm_head.weight")[0] if head else fields["vocab_size"],
        "layers": layers,
        "block_size": options["block_size"],
        "mask_token": options["mask_token_id"],
        "positions": "temporal",
        "own_head": head,
        "plain_embedding": _is_muse(described),
        **_head(checkpoint, options),
        **mmdec_fields(described, ("positions", "base", "target")),
    }


def _head(checkpoint: Checkpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DFlash's configuration that describe its sequential head.

    Sizes are those of config.json, else those of the tensors.

    Args:
        options: The settings, including those of `dflash_config`.
    """
    state = checkpoint.state

    def size(name: str, tensor: str, axis: int) -> Any:
        return options[name] if name in options else checkpoint.shape(tensor)[axis]

    def holds(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in state)

    architectures = _architectures(checkpoint.config)
    dspark = options.get("speculators_model_type") == "dspark" or "dspark" in architectures or holds("markov_head.")
    fields = {"from_anchor": bool(options.get("sample_from_anchor", dspark))}
    if dspark:
        rank = size("markov_rank", "markov_head.markov_w1.weight", 1)
        confident = options.get("enable_confidence_head", holds("confidence_head."))
        fields |= {"confidence": bool(confident)}
        fields |= {"confidence_reads_token": bool(rank and options.get("confidence_head_with_markov", True))}
        return {**fields, "head": options.get("markov_head_type", "vanilla"), "head_rank": rank} if rank else fields
    if options.get("projector_type") == "domino" or holds("prefix_gru."):
        return {
            "head": "domino",
            "from_anchor": bool(options.get("shift_label")),
            "head_rank": size("emb_dim", "embed_proj.0.weight", 0),
            "head_state": size("gru_hidden_dim", "prefix_gru.weight_hh_l0", 1),
            "plain_prefix": options.get("pure_draft_prefix_len", 0),
        }
    if holds("candidate_selector.") or "dflash2" in architectures:
        taps = options.get("conv_kernel_size", 2)
        if taps != 2:
            raise checkpoint.error(
                "have `conv_kernel_size` 2", f"has {taps!r:.60}", "Such networks cannot be read yet."
            )
        return {
            **fields,
            "head": "dflash2",
            "head_rank": size("selector_rank", "candidate_selector.predecessor_codebook", 1),
            "head_candidates": options.get("selector_top_k", 16),
            "convolution_group": options.get("conv_group_size", 16),
        }
    return fields


def _layers(checkpoint: Checkpoint, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the target layers whose outputs a DFlash reads; () for the default layers.

    Args:
        options: The settings, including those of `dflash_config`.
    """
    name = "aux_hidden_state_layer_ids" if "speculators_model_type" in checkpoint.config else "target_layer_ids"
    minimum, ids = int(name.startswith("aux")), options.get(name)
    if ids is None and not minimum:
        return ()
    if not isinstance(ids, list) or any(type(number) is not int or number < minimum for number in ids):
        raise checkpoint.error(
            f"have whole numbers of at least {minimum} in `{name}`", f"has {ids!r:.60}", "Set them as in training."
        )
    last = None if minimum else options.get("num_target_layers")
    return tuple(-1 if last == number + 1 else number - minimum for number in ids)


def dflash_exporter(network: DFlash) -> Exporter:
    """Return what converts a DFlash."""
    name = {"none": "DFlash", "dflash2": "DFlash 2", "domino": "Domino"}.get(network.config.head, "DSpark")
    return Exporter(name, partial(_convert, network))


def _convert(network: DFlash, to: Layout, served: ExportTarget, count: int) -> Exported:
    state, layer = export_state(network), layer_settings(network, served, "qwen3", {})
    config = network.config
    if to == "flat":
        return Exported(
            state, _flat(network, state, layer, served), "dflash2" if config.head == "dflash2" else "dflash"
        )
    refuse_features(
        to,
        {
            "the target's normed last states (layer -1)": -1 in config.layers,
            "a plain embedding": config.plain_embedding,
            "a bias of fc": config.fc_bias,
            f"a head of {network.exporter.name}": config.head in ("dflash2", "domino"),
        },
    )
    fields: dict[str, Any] = {
        "aux_hidden_state_layer_ids": [index + 1 for index in config.layers],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": False,
    }
    if config.head == "none" and not config.confidence:
        described = speculators_settings(network, state, layer, served, "dflash", "DFlash", count, fields)
        return Exported(state, described, "dflash")
    fields |= {
        "markov_rank": config.head_rank if config.head != "none" else 0,
        "markov_head_type": config.head if config.head != "none" else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.head != "none" and config.confidence_reads_token,
    }
    described = speculators_settings(network, state, layer, served, "dspark", "DSpark", count, fields)
    return Exported(state, described, "dspark")


def _flat(
    network: DFlash, state: Mapping[str, Tensor], layer: Mapping[str, Any], served: ExportTarget
) -> dict[str, Any]:
    """Return the content of config.json in z-lab's format."""
    config, last = network.config, served.depth - 1
    refuse_features(
        "flat",
        {
            "an LM head of the network's own": config.own_head,
            "an embedding of the network's own": config.own_embedding,
            "a plain embedding": config.plain_embedding,
            "a token drafted by the root's own state": config.from_anchor and config.head != "domino",
            "a head of DSpark's": config.head in MARKOV_HEADS or config.confidence,
            "the last layer's states before the final norm": last in config.layers,
            "a bias of fc": config.fc_bias,
        },
    )
    ids = [last if index < 0 else index for index in config.layers]
    settings = {"mask_token_id": config.mask_token, "target_layer_ids": ids, "block_size": config.block_size}
    if config.head == "dflash2":
        settings |= {"conv_kernel_size": 2, "conv_group_size": config.convolution_group}
        settings |= {"selector_rank": config.head_rank, "selector_top_k": config.head_candidates}
    elif config.head == "domino":
        settings |= {"projector_type": "domino", "emb_dim": config.head_rank, "gru_hidden_dim": config.head_state}
        settings |= {"pure_draft_prefix_len": config.plain_prefix, "shift_label": config.from_anchor}
    return {
        **layer,
        "architectures": ["DFlash2DraftModel" if config.head == "dflash2" else "DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": settings,
        "num_target_layers": served.depth,
        "torch_dtype": export_dtype(state),
        "dtype": export_dtype(state),
    }
