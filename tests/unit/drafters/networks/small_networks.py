"""Small random draft networks, and their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.registry import network_class

SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "vocab_size": 31,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


WIDTH = 1100  # columns before the first step: more than the first table of rotary positions has


def network(system: str, **changes: Any) -> DraftNetwork:
    torch.manual_seed(0)
    kind = network_class(system)
    made = kind(kind.config_class(**{**SHAPE, **changes})).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
        else:
            nn.init.normal_(weight, std=0.3)
    return made
