"""Whisper's encoder without padding to 30 s: for 3 s of speech it computes the states of 3 s.

Names and sizes of the weights are those of transformers' `WhisperEncoder` (Radford et al. 2022, section 2.2), so that
its weights fit. The network here accepts any number of frames up to a window, and rows of several lengths in one batch.
A decoder needs the states of silence after the speech to know where its text ends; 1 s of silence costs little and has
most of the effect of silence up to 30 s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank

from mmdec.audio import SAMPLE_RATE
from mmdec.nn.conformer import lengths_to_mask
from mmdec.ops.onednn import attention, linear

HOP, WINDOW = 160, 400  # samples between two frames of features, and samples in one frame
STEP = 2 * HOP  # samples between two encoder states, each of which covers two frames
MARGIN = 1.0  # seconds of silence added after the recording
TAIL = 0.2  # seconds of that silence whose states a CTC head reads


@dataclass(frozen=True)
class WhisperEncoderConfig:
    """Sizes of the encoder; the defaults are those of openai/whisper-base (20.6 M parameters)."""

    mels: int = 80
    d_model: int = 512
    layers: int = 6
    heads: int = 8
    ffn: int = 2048
    positions: int = 1500  # encoder states in a window of 30 s

    @classmethod
    def of(cls, settings: dict[str, Any]) -> WhisperEncoderConfig:
        """Read the sizes from the content of a Whisper's config.json."""
        names = ("num_mel_bins", "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
        return cls(*(settings[name] for name in (*names, "max_source_positions")))


class WhisperEncoder(nn.Module):
    """Turns features into states. forward: features (B, mels, F), lengths (B,) in frames or None.

    F is at most twice the window's positions. A row's states are the same alone and in a batch with longer rows.
    top: how many of the last layers to leave out, together with the final norm: `TopLayers` runs these.
    Returns: states (B, S, D), their lengths (B,).
    """

    def __init__(self, config: WhisperEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mels, config.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.positions, config.d_model)
        self.layers = nn.ModuleList(
            [WhisperEncoderLayer(config.d_model, config.heads, config.ffn) for _ in range(config.layers)]
        )
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, features: Tensor, lengths: Tensor | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        frames = features.shape[-1]
        if lengths is None:
            lengths = torch.full((len(features),), frames, device=features.device)
        if bool((lengths < frames).any()):  # padding of shorter rows must be 0
            real = lengths_to_mask(lengths, frames)[:, None]
            x = F.gelu(self.conv1(features.masked_fill(~real, 0.0))).masked_fill(~real, 0.0)
        else:
            x = F.gelu(self.conv1(features))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        x = x + self.embed_positions.weight[: x.shape[1]]
        x = run_layers(self.layers[: len(self.layers) - top], x, lengths)
        return (x if top else self.layer_norm(x)), lengths


class TopLayers(nn.Module):
    """The last layers of an encoder and its norm, which can be trained together with a network that reads its states.

    forward: (B, S, D) from `WhisperEncoder.forward` with the same `top`, lengths (B,). Returns: states (B, S, D).
    """

    def __init__(self, config: WhisperEncoderConfig, top: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WhisperEncoderLayer(config.d_model, config.heads, config.ffn) for _ in range(top)])
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.layer_norm(run_layers(self.layers, x, lengths))

    def take(self, encoder: WhisperEncoder) -> TopLayers:
        """Copy the weights from an encoder's last layers. Returns: this object."""
        self.layers.load_state_dict(encoder.layers[-len(self.layers) :].state_dict())
        self.layer_norm.load_state_dict(encoder.layer_norm.state_dict())
        return self

    def give(self, encoder: WhisperEncoder) -> WhisperEncoder:
        """Return a copy of an encoder with these layers and this norm in place of its last ones."""
        changed = copy.deepcopy(encoder)
        changed.layers[-len(self.layers) :].load_state_dict(self.layers.state_dict())
        changed.layer_norm.load_state_dict(self.layer_norm.state_dict())
        return changed


def run_layers(layers: Iterable[nn.Module], x: Tensor, lengths: Tensor) -> Tensor:
    """Run x (B, S, D) through layers; positions beyond a row's length (B,) are masked."""
    mask = None
    if bool((lengths < x.shape[1]).any()):
        mask = lengths_to_mask(lengths, x.shape[1])[:, None, None]  # (B, 1, 1, S)
    for layer in layers:
        x = layer(x, mask)
    return x


class WhisperEncoderLayer(nn.Module):
    """Self-attention and feed-forward network, each after its norm (pre-norm)."""

    def __init__(self, d_model: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        wide = linear(self.final_layer_norm(x), self.fc1.weight, self.fc1.bias, "gelu")
        return x + linear(wide, self.fc2.weight, self.fc2.bias)


class SelfAttention(nn.Module):
    """Every position attends to every position; keys have no bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        products = (linear(x, layer.weight, layer.bias) for layer in (self.q_proj, self.k_proj, self.v_proj))
        parts = (product.unflatten(-1, (self.heads, -1)) for product in products)
        query, key, value = (part.transpose(1, 2) for part in parts)  # (B, H, S, D / H)
        if mask is None:
            y = attention(query * query.shape[-1] ** -0.5, key, value)
        else:
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return linear(y.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)


def sound_features(
    sounds: Sequence[Tensor], config: WhisperEncoderConfig, margin: float = MARGIN, tail: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the features of recordings, each at its own length.

    sounds: 16 kHz samples (T,) each; longer ones are cut to a window. margin: seconds of silence added after each.
    tail: how many seconds of that silence count as part of the recording; None: all.
    Returns: features (B, mels, F); frames (B,); states (B,): how many encoder states belong to each recording.
    """
    most = config.positions * STEP

    def size(sound: Tensor, behind: float) -> int:
        return min(-(-(len(sound) + round(behind * SAMPLE_RATE)) // STEP) * STEP, most)

    padded = [F.pad(sound[:most], (0, max(size(sound, margin) - len(sound), 0))) for sound in sounds]
    device = padded[0].device
    frames = torch.tensor([len(sound) // HOP for sound in padded], device=device)
    wanted = torch.tensor([size(sound, margin if tail is None else tail) // STEP for sound in sounds], device=device)
    rows = [whisper_mel(sound[None], config.mels)[0] for sound in padded]
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in rows]), frames, wanted


def read_states(
    encoder: WhisperEncoder,
    sounds: Sequence[Tensor],
    margin: float = MARGIN,
    tail: float | None = None,
    top: int = 0,
) -> tuple[Tensor, Tensor]:
    """Encode recordings, 16 kHz samples (T,) each at its own length. margin, tail: seconds of silence, see
    `sound_features`.

    top: how many of the last layers to leave out.
    Returns: states (B, S, D), 50 a second, and their number in each row (B,).
    """
    features, frames, wanted = sound_features(sounds, encoder.config, margin, tail)
    weight = encoder.conv1.weight
    states, counts = encoder(features.to(weight), frames.to(weight.device), top)
    counts = counts.minimum(wanted.to(counts.device))
    return states[:, : int(counts.max())], counts


def sinusoid_positions(config: WhisperEncoderConfig) -> Tensor:
    """Compute the position embeddings (positions, d) of every Whisper's encoder, sines then cosines."""
    half = config.d_model // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10_000) / (half - 1)))
    angles = torch.arange(config.positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def whisper_mel(samples: Tensor, mels: int = 80) -> Tensor:
    """Compute the encoder's features (B, mels, T / 160) of 16 kHz samples (B, T): log10 of mel energies, cut off at
    80 dB below the loudest, scaled to about -1 to 1 (Radford et al. 2022, section 2.2)."""
    window = torch.hann_window(WINDOW, device=samples.device)
    power = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    energies = (_filters(mels, samples.device) @ power).clamp(min=1e-10).log10()
    loudest = energies.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(energies, loudest - 8.0) + 4.0) / 4.0


@lru_cache(maxsize=8)
def _filters(mels: int, device: torch.device) -> Tensor:  # (mels, 201)
    bank = mel_filter_bank(1 + WINDOW // 2, mels, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    with torch.inference_mode(False):  # a table made while decoding must also work in training
        return torch.from_numpy(bank).float().T.contiguous().to(device)
