"""Writes drafters in formats that inference engines read: that of the package speculators (vLLM, mlx-vlm), and the
"flat" one (SGLang, llama.cpp).

| network | speculators | flat |
|---|---|---|
| EAGLE-3, P-EAGLE | `Eagle3DraftModel`, `PEagleDraftModel` | `midlayer.*`, as SafeAILab and SpecForge have it |
| DFlash | `DFlashDraftModel`; an LM head only where the network has its own | z-lab's, which has none |

No engine reads networks of other drafters. Each field for which engines have different defaults is written. If the
format cannot describe something that the network computes, the export raises InputError. Fields that only mmdec reads
(positions and embeddings at image tokens, the target's fingerprint) are under "mmdec" in config.json, which engines
ignore; from them mmdec restores the same network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from mmdec.checks.arguments import check_path, check_whole
from mmdec.checks.weights import WEIGHTS_FILE, read_settings, report_damage
from mmdec.drafters.dflash.network import DFlash
from mmdec.drafters.eagle.eagle3 import Eagle3, default_layers
from mmdec.drafters.eagle.network import DraftNetwork
from mmdec.errors import InputError
from mmdec.hub.find import HUB_ID, drafter_by_name, find_model, shipped_names
from mmdec.hub.publish import CARD, atomic_folder, new_folder
from mmdec.pretrained.drafters import CONFIG_FILE, read_network

Layout = Literal["speculators", "flat"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MMDEC_FIELDS = ("positions", "pictures", "base", "target")  # fields of the configuration that only mmdec reads
SPECULATORS_VERSION = (
    "0.9.0"  # version of the package speculators whose format is written; tests compare with its classes
)
DEFAULT_DRAFT_TOKENS = 3  # default number of tokens that an engine drafts in a round with EAGLE-3 or P-EAGLE
DEFAULT_MAX_POSITIONS = 32768  # maximum sequence length that is written, if the target's configuration has none


@dataclass(frozen=True)
class ExportTarget:
    """The target model for which a drafter is exported."""

    name: str  # the target's folder name or hub id, by which engines load it
    architectures: list[str]
    text: Any  # transformers' configuration of the target's text model

    @property
    def depth(self) -> int:
        return int(self.text.num_hidden_layers)


def export_drafter(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    to: Layout,
    *,
    model: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
) -> Path:
    """Write a drafter's folder for other engines.

    source: a drafter's folder in mmdec's or a published format, a hub id, or "<model>/<drafter>" for a shipped one.
    directory: the new folder. If writing fails, no folder is left.
    to: "speculators" (vLLM, mlx-vlm) or "flat" (SGLang, llama.cpp).
    model: the target: a directory, a shipped name or a hub id. Default: the one that the drafter was trained for.
    num_speculative_tokens: number of tokens that an engine drafts in a round; only for "speculators". Default: 3; for a
        DFlash, as many as its block drafts.
    Returns: the folder.
    Raises: InputError if no engine reads the network, if the format cannot describe it, or if the network belongs to
        another target.
    """
    if to not in LAYOUTS:
        raise InputError(f"`to` must be one of {', '.join(LAYOUTS)}, but is {to!r:.60}. Choose one.")
    if num_speculative_tokens is not None:
        check_whole("num_speculative_tokens", num_speculative_tokens, 1, 64, "3 is usual.")
        if to == "flat":
            raise InputError(
                "`num_speculative_tokens` must be left out for the flat layout, which has no place for it. Name it in "
                "the engine's own command."
            )
    target = new_folder(directory)
    path = drafter_by_name(source, "source") or check_path("source", source, "Name the drafter's folder.")
    network = read_network(path)
    if not isinstance(network, Eagle3 | DFlash):
        raise InputError(
            f"`source` must hold EAGLE-3, P-EAGLE or DFlash, but '{path}' holds {network.system}, which no engine "
            "reads. Train one of these, or serve the model with mmdec."
        )
    served = _find_target(network, model)
    cast(Any, network).config = network.config.for_depth(served.depth)
    state = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    write = _speculators if to == "speculators" else _flat_dflash if isinstance(network, DFlash) else _flat_eagle3
    most = network.config.drafts if isinstance(network, DFlash) else None
    if most is not None and (num_speculative_tokens or 0) > most:
        raise InputError(
            f"`num_speculative_tokens` must be at most {most}, what a block drafts, but is {num_speculative_tokens}. "
            "Leave it out."
        )
    count = num_speculative_tokens or most or DEFAULT_DRAFT_TOKENS
    state, config = write(cast(Any, network), state, served, count)
    own = {name: getattr(network.config, name) for name in MMDEC_FIELDS if hasattr(network.config, name)}
    with atomic_folder(target) as fresh:
        (fresh / CONFIG_FILE).write_text(json.dumps({**config, "mmdec": own}, indent=2) + "\n", encoding="utf-8")
        save_file(state, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / CARD).write_text(_card(network, served, to, count), encoding="utf-8")
    return target


def _find_target(network: DraftNetwork, model: str | os.PathLike[str] | None) -> ExportTarget:
    """Find the target model and check its sizes. model: a directory, shipped name or hub id; None: the model that the
    network was trained for. Raises InputError if the model is not found or does not fit the network."""
    named = os.fspath(model) if model is not None else network.config.target
    known = named and (Path(named).is_dir() or named in shipped_names(None) or HUB_ID.fullmatch(named))
    if model is None and not known:
        raise InputError(
            f"`model` must be given where the drafter does not say which model it was trained for, or says {named!r}, "
            "which is not found here. Name the target's folder or hub id."
        )
    folder = find_model(named, None, ["*.json"])
    read_settings(folder / CONFIG_FILE, "model")
    with report_damage(
        f"`model` must hold a model's {CONFIG_FILE}, but '{folder}' does not", "Name the target's folder."
    ):
        whole = AutoConfig.from_pretrained(folder)
        text = whole.get_text_config(decoder=True)
        sizes = {"channels": text.hidden_size, "tokens": text.vocab_size, "layers": text.num_hidden_layers}
    config = network.config
    own = {"channels": config.target_size, "tokens": config.vocab_size, "layers": max((*config.layers, 0)) + 1}
    for what, size in sizes.items():
        if own[what] > size or (own[what] < size and what != "layers"):
            raise InputError(
                f"`model` must have {own[what]} {what} for this drafter, but '{named}' has {size}. Name the model "
                "that it was trained for."
            )
    return ExportTarget(named, list(whole.architectures or []), text)


def _refuse(to: str, faults: Mapping[str, bool]) -> None:
    """Raise InputError if the network has a feature that the format cannot describe.

    to: the format's name. faults: description of a feature -> whether the network has it.
    """
    for fault, present in faults.items():
        if present:
            raise InputError(
                f"`to` must be a layout that can say what the network computes, but {to} has no place for {fault}. "
                f"Train without it{', or export to speculators' if to == 'flat' else ''}."
            )


def _speculators(
    network: Eagle3 | DFlash, state: dict[str, Tensor], served: ExportTarget, count: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert a network to speculators' format. Returns: the tensors by name, and the content of config.json.

    state: the network's tensors. served: the target. count: number of tokens that the engine drafts in a round.
    """
    config = network.config
    _refuse("speculators", {"the target's normed last states (layer -1)": -1 in config.layers})
    described: dict[str, Any] = {"draft_vocab_size": config.vocabulary, "dtype": _dtype(state)}
    if isinstance(network, DFlash):
        own = network.config
        _refuse("speculators", {"a plain embedding": own.plain_embedding, "a bias of fc": own.fc_bias})
        kind, name = "dflash", "DFlash"
        described |= {
            "aux_hidden_state_layer_ids": [layer + 1 for layer in own.layers],
            "block_size": own.block_size,
            "mask_token_id": own.mask_token,
            "sample_from_anchor": own.from_anchor,
            "sliding_window_non_causal": False,
        }
    else:
        _refuse_of_eagle3(network, "speculators")
        own3 = network.config
        parallel = own3.mask_token is not None
        kind, name = ("peagle", "PEagle") if parallel else ("eagle3", "Eagle3")
        described |= {
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in own3.layers],
            "embed_requires_grad": parallel,
            **_flags(network),
            **({"mask_token_id": own3.mask_token} if parallel else {}),
        }
    whole = config.target_size if config.target_size != config.hidden_size else None
    described |= {
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": whole,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(network, served),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": count,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": served.architectures, "name_or_path": served.name},
        },
    }
    return state, described


def _flat_eagle3(
    network: Eagle3, state: dict[str, Tensor], served: ExportTarget, count: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert an EAGLE-3 to the format of SafeAILab and SpecForge. Returns: the tensors by name, and the content of
    config.json.

    state: the network's tensors. served: the target. count: not used, because this format has no field for the number
        of drafted tokens.
    """
    config = network.config
    _refuse_of_eagle3(network, "flat")
    default = config.layers == default_layers(served.depth)
    # SGLang adds 1 to all layer ids if the first one is 1; vLLM does not, so vLLM would read other layers
    _refuse(
        "flat",
        {
            "norms of queries and keys, which SGLang ignores": config.qk_norm,
            "reading the target's first layer": not default and config.layers[0] == 0,
            "the target's normed last states (layer -1)": -1 in config.layers,
        },
    )
    if (
        not config.has_draft_vocabulary
    ):  # without a draft vocabulary: some engines need the tables d2t and t2d even then
        state = {
            **state,
            "d2t": torch.zeros(config.vocab_size, dtype=torch.long),
            "t2d": torch.ones(config.vocab_size, dtype=torch.bool),
        }
    state = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in state.items()}
    boundaries = [layer + 1 for layer in config.layers]
    ids = {} if default else {"eagle_aux_hidden_state_layer_ids": boundaries}
    parallel = config.mask_token is not None
    return state, {
        **_layer(network, served),
        "architectures": ["PEagleDraftModel" if parallel else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocabulary,
        "target_hidden_size": config.target_size,
        "torch_dtype": _dtype(state),
        "dtype": _dtype(state),
        **_flags(network),
        **ids,
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc, **ids},
        **({"mask_token_id": config.mask_token} if parallel else {}),
    }


def _flat_dflash(
    network: DFlash, state: dict[str, Tensor], served: ExportTarget, count: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert a DFlash to z-lab's format. Returns: the tensors by name, and the content of config.json.

    state: the network's tensors. served: the target. count: not used, because this format has no field for the number
        of drafted tokens.
    """
    config, last = network.config, served.depth - 1
    _refuse(
        "flat",
        {
            "an LM head of the network's own": config.own_head,
            "an embedding of the network's own": config.own_embedding,
            "a plain embedding": config.plain_embedding,
            "a token drafted by the root's own state": config.from_anchor,
            "the last layer's states before the final norm": last in config.layers,
            "a bias of fc": config.fc_bias,
        },
    )
    ids = [last if layer < 0 else layer for layer in config.layers]
    return state, {
        **_layer(network, served),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token, "target_layer_ids": ids, "block_size": config.block_size},
        "num_target_layers": served.depth,
        "torch_dtype": _dtype(state),
        "dtype": _dtype(state),
    }


def _refuse_of_eagle3(network: Eagle3, to: str) -> None:
    config = network.config
    _refuse(
        to,
        {
            "projected embeddings of image columns (engines embed the placeholder)": config.pictures == "projected",
            "a bias of fc": config.fc_bias,
            "a bias of some of attention's projections": config.attention_bias != config.output_bias,
        },
    )


def _flags(network: Eagle3) -> dict[str, bool]:
    """Return EAGLE-3's options about norms. All are written, because vLLM and speculators have different defaults for
    `norm_before_residual`."""
    names_of = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(network.config, name) for name in names_of}


def _layer(network: Eagle3 | DFlash, served: ExportTarget) -> dict[str, Any]:
    """Return the settings of the decoder layers, named as in a Llama's or Qwen3's config.json. The RoPE settings have
    both their old and their new names, because an engine may read either."""
    config = network.config
    qwen3 = isinstance(network, DFlash) or network.config.qk_norm
    rope: dict[str, Any] = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    if isinstance(network, Eagle3) and network.config.mrope_section:
        interleaved = network.config.mrope_interleaved
        rope |= {
            "type": "default" if interleaved else "mrope",
            "mrope_section": list(network.config.mrope_section),
            "mrope_interleaved": interleaved,
        }
    scaled = len(rope) > 2
    ids = {name: getattr(served.text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": "qwen3" if qwen3 else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": network.depth,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": getattr(served.text, "max_position_embeddings", None) or DEFAULT_MAX_POSITIONS,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * network.depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        **ids,
    }


def _dtype(state: Mapping[str, Tensor]) -> str:
    return str(state["fc.weight"].dtype).removeprefix("torch.")


def _card(network: Eagle3 | DFlash, served: ExportTarget, to: str, count: int) -> str:
    """Write the model card: what the drafter is, and how to use it in an engine."""
    name = (
        "DFlash" if isinstance(network, DFlash) else "P-EAGLE" if network.config.mask_token is not None else "EAGLE-3"
    )
    text = f"# {name} for {served.name}\n\nWritten by `mmdec export drafter --to {to}`.\n"
    method = {"EAGLE-3": "eagle3", "P-EAGLE": "eagle3", "DFlash": "dflash"}[name]
    if to == "speculators":
        return (
            text
            + f"\n```\nvllm serve {served.name} --speculative-config '"
            + (json.dumps({"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": count}) + "'\n```\n")
        )
    return text + (
        f"\n```\npython -m sglang.launch_server --model-path {served.name} --speculative-algorithm {method.upper()} "
        "--speculative-draft-model-path THIS_FOLDER\n```\n"
    )
