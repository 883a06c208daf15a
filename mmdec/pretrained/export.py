"""Writes drafters in formats that inference engines read.

These are the format of the package speculators (vLLM, mlx-vlm), and the "flat" one (SGLang, llama.cpp; for heads that
of their authors). Each network is converted in its own folder (`DraftNetwork.exporter`).

| network | speculators | flat |
|---|---|---|
| EAGLE-3, P-EAGLE | `Eagle3DraftModel`, `PEagleDraftModel` | `midlayer.*`, as SafeAILab and SpecForge have it |
| DFlash | `DFlashDraftModel`; an LM head only where the network has its own | z-lab's, which has none |
| heads | - | that of Medusa, Hydra, ReDrafter or MLPSpeculator, by their kind |

No engine reads networks of other drafters. Each field for which engines have different defaults is written. If the
format cannot describe something that the network computes, the export raises InputError. Fields that only mmdec reads
(positions and embeddings at image tokens, the target's fingerprint) are under "mmdec" in config.json, which engines
ignore; from them mmdec restores the same network.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

from safetensors.torch import save_file
from transformers import AutoConfig

from mmdec.checks.arguments import check_path, check_whole
from mmdec.checks.weights import WEIGHTS_FILE, read_settings, report_damage
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.export import Exported, ExportTarget, Layout
from mmdec.errors import InputError
from mmdec.hub.find import HUB_ID, drafter_by_name, find_model, shipped_names
from mmdec.hub.provenance import CARD
from mmdec.hub.publish import atomic_folder, new_folder
from mmdec.pretrained.drafters import CONFIG_FILE, read_network

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MMDEC_FIELDS = ("positions", "pictures", "base", "target")  # fields of the configuration that only mmdec reads
DEFAULT_DRAFT_TOKENS = 3  # default number of tokens that an engine drafts in a round with EAGLE-3 or P-EAGLE


def export_drafter(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    to: Layout,
    *,
    model: str | os.PathLike[str] | None = None,
    num_speculative_tokens: int | None = None,
) -> Path:
    """Write a drafter's folder for other engines.

    Args:
        source: A drafter's folder in mmdec's or a published format, a Hugging Face id, or "<model>/<drafter>" for a
            shipped one.
        directory: The new folder. If writing fails, no folder is left.
        to: "speculators" (vLLM, mlx-vlm) or "flat" (SGLang, llama.cpp; for heads their authors' layout).
        model: The target: a folder, a shipped name or a Hugging Face id. Default: the one that the drafter was trained
            for.
        num_speculative_tokens: Number of tokens that an engine drafts in a round; only for "speculators". Default: 3;
            for a DFlash, as many as its block drafts.

    Returns:
        The folder.

    Raises:
        InputError: If no engine reads the network, if the format cannot describe it, or if the network belongs to
            another target.
    """
    if to not in LAYOUTS:
        raise InputError(f"`to` must be one of {', '.join(LAYOUTS)}, but is {to!r:.60}.")
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
    if not isinstance(network, DraftNetwork) or (exporter := network.exporter) is None:
        raise InputError(
            f"`source` must hold EAGLE-3, P-EAGLE, DFlash or heads, but '{path}' holds {network.system}, which no "
            "engine reads. Train one of these, or serve the model with mmdec."
        )
    served = _find_target(network, model)
    network.config = network.config.for_depth(served.depth)
    max_depth = network.max_depth
    if max_depth is not None and (num_speculative_tokens or 0) > max_depth:
        raise InputError(
            f"`num_speculative_tokens` must be at most {max_depth}, what a block drafts, but is "
            f"{num_speculative_tokens}. Leave it out."
        )
    count = num_speculative_tokens or max_depth or DEFAULT_DRAFT_TOKENS
    exported = exporter.convert(to, served, count)
    fields = {name: getattr(network.config, name) for name in MMDEC_FIELDS if hasattr(network.config, name)}
    with atomic_folder(target) as fresh:
        (fresh / CONFIG_FILE).write_text(
            json.dumps({**exported.described, "mmdec": fields}, indent=2) + "\n", encoding="utf-8"
        )
        save_file(dict(exported.state), fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / CARD).write_text(_card(network, exporter.name, exported, served, to, count), encoding="utf-8")
    return target


def _find_target(network: DraftNetwork, model: str | os.PathLike[str] | None) -> ExportTarget:
    """Find the target model and check its sizes.

    Args:
        model: A folder, shipped name or Hugging Face id; None: the model that the network was trained for.

    Raises:
        InputError: If the model is not found or does not fit the network.
    """
    named = os.fspath(model) if model is not None else network.config.target
    exists = named and (Path(named).is_dir() or named in shipped_names(None) or HUB_ID.fullmatch(named))
    if model is None and not exists:
        raise InputError(
            f"`model` must be given if the drafter does not say which model it was trained for, or says {named!r}, "
            "which is not found here. Name the target's folder or Hugging Face id."
        )
    folder = find_model(named, None, ["*.json"])
    read_settings(folder / CONFIG_FILE, "model")
    with report_damage(
        f"`model` must hold a model's {CONFIG_FILE}, but '{folder}' does not", "Name the target's folder."
    ):
        model_config = AutoConfig.from_pretrained(folder)
        text = model_config.get_text_config(decoder=True)
        sizes = {"channels": text.hidden_size, "tokens": text.vocab_size, "layers": text.num_hidden_layers}
    config = network.config
    expected_sizes = {
        "channels": config.target_size,
        "tokens": config.vocab_size,
        "layers": max((*config.layers, 0)) + 1,
    }
    for noun, size in sizes.items():
        if expected_sizes[noun] > size or (expected_sizes[noun] < size and noun != "layers"):
            raise InputError(
                f"`model` must have {expected_sizes[noun]} {noun} for this drafter, but '{named}' has {size}. "
                "Name the model that it was trained for."
            )
    return ExportTarget(named, list(model_config.architectures or []), text)


def _card(network: DraftNetwork, name: str, exported: Exported, served: ExportTarget, to: str, count: int) -> str:
    """Write the model card: what the drafter is, and how to use it in an engine."""
    text = f"# {name} for {served.name}\n\nWritten by `mmdec export drafter --to {to}`.\n"
    method = exported.method
    if to == "speculators":
        return (
            text
            + f"\n```\nvllm serve {served.name} --speculative-config '"
            + (json.dumps({"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": count}) + "'\n```\n")
        )
    if network.system == "heads":
        return text
    return text + (
        f"\n```\npython -m sglang.launch_server --model-path {served.name} --speculative-algorithm {method.upper()} "
        "--speculative-draft-model-path THIS_FOLDER\n```\n"
    )
