"""All drafters to test with vision-language models. Each is made from a model and the texts of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.drafters.flash.drafter import FlashDrafter
from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.registry import network_class
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict
from tests.support.random_drafter import RandomDrafter
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import KINDS, vision_model

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Reader:
    """A drafter that takes all features and embeddings of a target, checks their shapes, and drafts chains from the
    last features."""

    name = "reader"
    needs = Needs(layers=(0, -1), embeds=True)

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()

    def check(self, target: Target) -> None: ...

    def start(self, context: Context) -> list[Tensor]:
        rows, fresh = context.positions.shape[1:]
        assert context.tokens.shape == context.mask.shape
        assert fresh in (context.tokens.shape[1], context.tokens.shape[1] - context.past)
        assert context.embeds is not None
        assert context.media is not None
        assert context.visual.shape == (rows, fresh)
        for states in (context.embeds, *context.features.values()):
            assert states.shape[:2] == (rows, fresh)
            assert bool(states.isfinite().all())
        return [context.features[-1][:, -1]]

    def propose(self, state: list[Tensor], roots: Tensor, plan: Plan) -> Draft:
        best = self.head(state[0]).topk(min(plan.nodes, 3)).indices.tolist()
        depth = min(plan.depth, 2)
        return trees_from_lists(roots, [(row[:depth] or [], list(range(len(row[:depth])))) for row in best])

    def update(self, state: list[Tensor], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        last = verdict.path.ne(-1).sum(1) - 1
        nodes = verdict.path.gather(1, last[:, None])[:, 0]
        state[0] = scores.features[-1][torch.arange(len(nodes)), nodes]

    def select(self, state: list[Tensor], live: Tensor) -> None:
        state[0] = state[0][live]


def network_drafter(system: str, model: Any, **changes: Any) -> Any:
    """Build a drafter with a random draft network."""
    torch.manual_seed(0)
    kind = network_class(system)
    network = kind(kind.config_class.like(model.config.get_text_config(), **changes))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return FlashDrafter(network, *ends) if isinstance(network, FlashNetwork) else NetworkDrafter(network, *ends)


def eagle3(model: Any, **changes: Any) -> Any:
    """Build an EAGLE-3 drafter, with positions of three axes if the model has them."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    sections = tuple(rope.get("mrope_section") or ())
    axes: dict[str, Any] = {"positions": "axes", "mrope_section": sections} if sections else {}
    return network_drafter("eagle3", model, **{**axes, **changes})


def small(model: Any) -> Any:
    """Build a small language model with the model's vocabulary, to draft for it."""
    return language_model("llama", 2, **{**SMALL, "vocab_size": model.config.get_text_config().vocab_size})


def smaller(model: Any) -> Any:
    """Return a vision-language model of the same kind, to draft for the model; for the shipped one, the model
    itself."""
    kind = next((kind for kind in KINDS if vision_model(kind) is model), "shipped")
    return model if kind == "shipped" else vision_model(kind, 1)


# name -> a function of the model and the expected texts that makes the drafter
DRAFTERS: dict[str, Callable[[Any, list[list[int]]], Any]] = {
    "none": lambda model, wanted: None,
    "lookup": lambda model, wanted: "lookup",
    "recycling": lambda model, wanted: "recycling",
    "wild": lambda model, wanted: RandomDrafter(len(wanted[0]), wanted),
    "small": lambda model, wanted: small(model),
    "small-vlm": lambda model, wanted: smaller(model),
    "reader": lambda model, wanted: Reader(model),
    "eagle": lambda model, wanted: network_drafter("eagle", model),
    "eagle3": lambda model, wanted: eagle3(model, norm_output=True),
    "peagle": lambda model, wanted: eagle3(
        model, mask_token=3, num_hidden_layers=2, positions="temporal", pictures="projected"
    ),
    "dflash": lambda model, wanted: network_drafter(
        "dflash", model, block_size=4, mask_token=3, num_hidden_layers=2, positions="temporal"
    ),
    "heads": lambda model, wanted: network_drafter("heads", model, kind="hydra", heads=3, prefix_layer=True),
    "msd": lambda model, wanted: network_drafter("msd", model),
    "specvlm": lambda model, wanted: network_drafter("specvlm", model, pool_ratio=3, prune_ratio=4),
    "specvlm-concat": lambda model, wanted: network_drafter("specvlm", model, variant="concat"),
    "specvlm-weighted": lambda model, wanted: network_drafter("specvlm", model, variant="weighted"),
    "vispec": lambda model, wanted: network_drafter("vispec", model),
    "flash": lambda model, wanted: network_drafter("flash", model, slots=3, latents=2),
    "flash-tree": lambda model, wanted: network_drafter("flash", model, slots=3, latents=2, tree=True),
}
