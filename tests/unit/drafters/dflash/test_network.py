"""DFlash's network: its configuration's rules and default layers."""

from __future__ import annotations

from typing import Any

import pytest

from mmdec.drafters.dflash.network import DFlashConfig, spread_layers
from mmdec.errors import InputError

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "vocab_size": 31,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (24, 5, (1, 6, 11, 16, 21)), (36, 1, (18,)), (4, 2, (1, 1)), (2, 3, (1, 0, 0))],
)
def test_default_layers_are_the_published_ones(depth: int, count: int, layers: tuple[int, ...]) -> None:
    """The first two are those of Qwen3-8B-DFlash and of SpecForge's Qwen2.5-0.5B."""
    assert spread_layers(depth, count) == layers
    assert DFlashConfig(**SHAPE, num_hidden_layers=count).for_depth(depth).layers == layers


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_size": 1}, "`block_size` must be at least 2"),
        ({"block_size": 1000}, "`block_size` must be an integer"),
        ({"mask_token": 31}, "`mask_token` must be a token below 31"),
        ({"draft_vocab_size": 32, "own_head": True}, "`draft_vocab_size` must be at most"),
        ({"draft_vocab_size": 9}, "the same without `own_head`"),
        ({"positions": "axes"}, "`positions` must be text or temporal"),
        ({"rope_scaling": "linear"}, "`rope_scaling` must be a mapping of settings"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers`"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        DFlashConfig(**SHAPE, **changes)
