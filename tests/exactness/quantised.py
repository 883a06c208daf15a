"""Models in 8 bits: by torch's dynamic quantisation, which also quantises activations, or with weights alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn


def dynamic(model: Any, in_place: bool = False) -> Any:
    """Quantise activations and weights of all linear layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchao replaces this function
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")  # torch warns of it once in a process
        model = model if in_place else copy.deepcopy(model)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8, inplace=True)


class Weights(nn.Module):
    """A linear layer whose weights have 8 bits and whose activations are not quantised."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("levels", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.levels * self.scale, self.bias)  # type: ignore[operator]


def weights_alone(model: Any) -> Any:
    """Quantise the weights of all linear layers."""
    model = copy.deepcopy(model)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, Weights(child))
    return model
