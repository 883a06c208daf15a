"""A copy of a model that reads drafts in half precision on a CPU, in which no token's logits depend on the others.

See `mmdec.kernels.tokenwise`. The copy shares weights and hooks. It computes what the model computes, but linear layers
and attention sum in an order that does not depend on the draft or the batch.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mmdec.kernels.float16_linear import HalfWeights
from mmdec.kernels.tokenwise import HALF_DTYPES, half_weights, linear
from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.hf_target import copy_modules, has_hooks, plain_linear

MAX_COPIED_BYTES = 2**32  # float16 weights of larger models are not copied, to save memory
ATTENTION = ("sdpa", TREE_ATTENTION)  # the implementations whose results the copy reproduces, up to rounding


@final
class TokenwiseLinear(nn.Linear):
    """torch's linear layer, with results that do not depend on the number of rows."""

    copied: bool  # whether a float16 weight may be copied

    @cached_property
    def half_copy(self) -> HalfWeights | None:
        """The copy of the weight, looked up at the layer's first product: the model's copy serves one call."""
        return half_weights(self.weight, self.bias) if self.copied else None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.half_copy)


@final
class TokenwiseConv1D(Conv1D):
    """transformers' linear layer of GPT-2 and its kin, whose weight is transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def is_half_on_cpu(model: nn.Module) -> bool:
    """Return whether a model computes in half precision on a CPU."""
    weight = next(model.parameters())
    return weight.dtype in HALF_DTYPES and weight.device.type == "cpu"


def tokenwise_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Copy a decoder-only model for the passes over drafts of one `generate` call.

    Returns:
        None if passes need no copy, because the model is not in half precision on a CPU; or if its attention is not
        computed by transformers' "sdpa" or by "mmdec_tree".
    """
    config: Any = model.config.get_text_config(decoder=True)
    if not is_half_on_cpu(model) or config._attn_implementation not in ATTENTION:
        return None
    if not model._supports_attention_backend:
        return None
    configs, copied = dict[int, Any](), sum(weight.nbytes for weight in model.parameters()) <= MAX_COPIED_BYTES

    def change(module: nn.Module, same: Any) -> None:
        if plain_linear(module):
            same.__class__, same.copied = TokenwiseLinear, copied
        if type(module) is Conv1D and not has_hooks(module):
            same.__class__ = TokenwiseConv1D
        if (given := vars(same).get("config")) is not None:
            if id(given) not in configs:
                configs[id(given)] = copy.copy(given)
                configs[id(given)]._attn_implementation_internal = TREE_ATTENTION
            same.config = configs[id(given)]

    return copy_modules(model, change)
