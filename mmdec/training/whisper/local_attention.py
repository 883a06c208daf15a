"""A fresh Whisper encoder that attends locally from its first step, and keeps its positions readable in training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

FIRST_SCALE = 1.3  # of the first layer's queries and keys: some five positions wide
LATER_SCALE = 3.0  # of the other layers'


@torch.no_grad()
def protect_positions(model: WhisperForConditionalGeneration) -> None:
    """Let nothing but positions be written to the channels that `init_local_attention` reads.

    The layers' outputs grow to ten times the positions, and drown them for the layers that follow: measured, they no
    longer looked nearby after a few hundred steps. So nothing else is written there, what is written elsewhere has a
    mean of zero (a layer norm would subtract it from the positions, too), and the later layers' norms add nothing.
    """
    encoder: Any = model.model.encoder  # torch types a layer's parts as tensors or modules
    width, half = model.config.d_model, model.config.d_model // 2
    pairs = min(width // model.config.encoder_attention_heads // 2, half)
    kept = torch.zeros(width, dtype=torch.bool, device=encoder.embed_positions.weight.device)
    kept[:pairs] = kept[half : half + pairs] = True
    encoder.conv2.weight[kept] = 0
    encoder.conv2.bias[kept] = 0
    for depth, layer in enumerate(encoder.layers):
        if depth:
            layer.self_attn_layer_norm.bias[kept] = 0
        for output in (layer.self_attn.out_proj, layer.fc2):
            for values in (output.weight, output.bias):
                values[~kept] -= values[~kept].mean(0)
                values[kept] = 0


@torch.no_grad()
def init_local_attention(model: WhisperForConditionalGeneration) -> None:
    """Let each head of a fresh encoder look at one position near its own, as a convolution would.

    Positions are sinusoids, so a query and a key that read the same frequencies, one of them turned, meet where their
    positions differ by that turn. Content takes over in training; learning locality from noise would take most of it.
    """
    encoder: Any = model.model.encoder  # torch types a layer's parts as tensors or modules
    width, heads = model.config.d_model, model.config.encoder_attention_heads
    half, size = width // 2, width // heads
    pairs = min(size // 2, half)
    speeds = torch.exp(-math.log(10000) / (half - 1) * torch.arange(pairs))  # Whisper's highest frequencies
    for depth, layer in enumerate(encoder.layers):
        query: Tensor = layer.self_attn.q_proj.weight
        key: Tensor = layer.self_attn.k_proj.weight
        scale = LATER_SCALE if depth else FIRST_SCALE
        for head in range(heads):
            turn = speeds * (head - heads // 2) * 2 * (depth + 1)
            for pair in range(pairs):
                sine, cosine = head * size + 2 * pair, head * size + 2 * pair + 1
                for weight, angle in ((query, turn[pair]), (key, torch.zeros(()))):
                    weight[sine] *= 0.3
                    weight[cosine] *= 0.3
                    weight[sine, pair] += scale * angle.cos()
                    weight[sine, half + pair] += scale * angle.sin()
                    weight[cosine, pair] -= scale * angle.sin()
                    weight[cosine, half + pair] += scale * angle.cos()
