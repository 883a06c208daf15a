"""Tests which options of heads fit together."""

from __future__ import annotations

from typing import Any

import pytest

from mmdec.drafters.heads.network import HeadsConfig
from mmdec.errors import InputError


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "beam"}, "`kind` must be one of medusa, hydra"),
        ({"lm_heads": "two"}, "`lm_heads` must be one of target"),
        ({"heads": 65}, "`heads`"),
        ({"blocks": 0}, "`blocks`"),
        ({"kind": "recurrent"}, "but 64 channels enter it"),
        ({"kind": "mlp", "inner_size": 24}, "but 24 channels enter it"),
        ({"lm_head_bias": True}, "without `lm_head_bias`"),
        ({"kind": "recurrent", "lm_heads": "each"}, "must be one or target"),
        ({"attention": True}, "`attention` must be false for the kind hydra"),
        ({"kind": "mlp", "inner_size": 32, "attention": True}, "must be false for the kind mlp"),
        ({"kind": "medusa", "attention": 1}, "`attention` must be true or false"),
        ({"kind": "medusa", "previous_head": True}, "must be false for the kind medusa"),
        ({"kind": "mlp", "previous_head": True}, "must be false for the kind mlp"),
        ({"inner_size": -1}, "`inner_size`"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        HeadsConfig(hidden_size=32, vocab_size=99, **options)
