"""Whisper's encoder without padding to 30 s: for 3 s of speech it computes 3 s of states.

Names and sizes of the weights are those of transformers' `WhisperEncoder` (Radford et al. 2022, section 2.2), so that
weights of that class can be loaded. This network accepts any number of frames up to a window of 30 s, and rows of
different lengths in one batch. A decoder needs states of silence after the speech to know where its text ends. 1 s of
silence takes little time and has most of the effect of silence up to 30 s.
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

from mmdec.io.audio import SAMPLE_RATE
from mmdec.kernels.onednn import attention, linear
from mmdec.nn.conformer import lengths_to_mask

HOP_SAMPLES, FRAME_SAMPLES = 160, 400  # in samples: hop and window of the features' frames
STATE_SAMPLES = 2 * HOP_SAMPLES  # in samples: distance of two encoder states; each state covers two frames
SILENCE_MARGIN = 1.0  # seconds of silence that are added after a recording
STATES_TAIL = 0.2  # seconds of this silence whose states a CTC head reads


@dataclass(frozen=True)
class UnpaddedEncoderConfig:
    """Sizes of the encoder; the defaults are those of openai/whisper-base (20.6 M parameters)."""

    mels: int = 80
    d_model: int = 512
    layers: int = 6
    heads: int = 8
    ffn: int = 2048
    positions: int = 1500  # encoder states in a window of 30 s

    @classmethod
    def of(cls, settings: dict[str, Any]) -> UnpaddedEncoderConfig:
        """Read the sizes from a Whisper's config.json.

        Args:
            settings: The content of this file.
        """
        names = ("num_mel_bins", "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
        return cls(*(settings[name] for name in (*names, "max_source_positions")))


class UnpaddedEncoder(nn.Module):
    """Converts log-mel features to states. A row's states are the same alone and in a batch with longer rows."""

    def __init__(self, config: UnpaddedEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mels, config.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.positions, config.d_model)
        self.layers = nn.ModuleList(
            [UnpaddedEncoderLayer(config.d_model, config.heads, config.ffn) for _ in range(config.layers)]
        )
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, features: Tensor, lengths: Tensor | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        """Encode log-mel features.

        Args:
            features: (B, mels, F), F at most twice the window's positions.
            lengths: (B,), numbers of frames; None: all rows have F.
            top: Number of last layers to leave out, together with the final norm; a `TopLayers` applies these.

        Returns:
            States (B, S, D), and their numbers (B,).
        """
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
    """The last layers of an encoder and its final norm, to be trained together with a network that reads the states."""

    def __init__(self, config: UnpaddedEncoderConfig, top: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [UnpaddedEncoderLayer(config.d_model, config.heads, config.ffn) for _ in range(top)]
        )
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Apply the layers to states (B, S, D) from `UnpaddedEncoder.forward` with the same `top`.

        Args:
            x: The states.
            lengths: (B,), numbers of states.
        """
        return self.layer_norm(run_layers(self.layers, x, lengths))

    def take(self, encoder: UnpaddedEncoder) -> TopLayers:
        """Copy the weights of an encoder's last layers into this object, and return it."""
        self.layers.load_state_dict(encoder.layers[-len(self.layers) :].state_dict())
        self.layer_norm.load_state_dict(encoder.layer_norm.state_dict())
        return self

    def give(self, encoder: UnpaddedEncoder) -> UnpaddedEncoder:
        """Return a copy of an encoder whose last layers and final norm are replaced by those of this object."""
        changed = copy.deepcopy(encoder)
        changed.layers[-len(self.layers) :].load_state_dict(self.layers.state_dict())
        changed.layer_norm.load_state_dict(self.layer_norm.state_dict())
        return changed


def run_layers(layers: Iterable[nn.Module], x: Tensor, lengths: Tensor) -> Tensor:
    """Apply layers to x (B, S, D).

    Args:
        lengths: (B,), numbers of states; positions beyond them are masked.
    """
    mask = None
    if bool((lengths < x.shape[1]).any()):
        mask = lengths_to_mask(lengths, x.shape[1])[:, None, None]  # shape (B, 1, 1, S)
    for layer in layers:
        x = layer(x, mask)
    return x


class UnpaddedEncoderLayer(nn.Module):
    """A pre-norm Transformer encoder layer: self-attention, then a feed-forward network."""

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
    """Self-attention without causal mask; the key projection has no bias."""

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
        query, key, value = (part.transpose(1, 2) for part in parts)  # shape (B, H, S, D / H)
        if mask is None:
            y = attention(query * query.shape[-1] ** -0.5, key, value)
        else:
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return linear(y.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)


def sound_features(
    sounds: Sequence[Tensor], config: UnpaddedEncoderConfig, margin: float = SILENCE_MARGIN, tail: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-mel features of recordings, each at its own length.

    Args:
        sounds: 16 kHz samples (T,) of each recording; recordings longer than 30 s are cut.
        margin: Seconds of silence that are added after each.
        tail: Seconds of this silence that count as part of the recording; None: all.

    Returns:
        Features (B, mels, F); numbers of frames (B,); numbers of encoder states (B,) that belong to each recording.
    """
    max_samples = config.positions * STATE_SAMPLES

    def size(sound: Tensor, behind: float) -> int:
        return min(-(-(len(sound) + round(behind * SAMPLE_RATE)) // STATE_SAMPLES) * STATE_SAMPLES, max_samples)

    padded = [F.pad(sound[:max_samples], (0, max(size(sound, margin) - len(sound), 0))) for sound in sounds]
    device = padded[0].device
    frames = torch.tensor([len(sound) // HOP_SAMPLES for sound in padded], device=device)
    counts = torch.tensor(
        [size(sound, margin if tail is None else tail) // STATE_SAMPLES for sound in sounds], device=device
    )
    rows = [whisper_mel(sound[None], config.mels)[0] for sound in padded]
    longest = max(row.shape[-1] for row in rows)
    return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in rows]), frames, counts


def read_states(
    encoder: UnpaddedEncoder,
    sounds: Sequence[Tensor],
    margin: float = SILENCE_MARGIN,
    tail: float | None = None,
    top: int = 0,
) -> tuple[Tensor, Tensor]:
    """Encode recordings, each at its own length.

    Args:
        sounds: 16 kHz samples (T,) of each.
        margin: Seconds of silence that are added after each.
        tail: Seconds of this silence that count as part of the recording; None: all.
        top: Number of the encoder's last layers to leave out.

    Returns:
        States (B, S, D), 50 per second, and their number in each row (B,).
    """
    features, frames, own_counts = sound_features(sounds, encoder.config, margin, tail)
    weight = encoder.conv1.weight
    states, counts = encoder(features.to(weight), frames.to(weight.device), top)
    counts = counts.minimum(own_counts.to(counts.device))
    return states[:, : int(counts.max())], counts


def sinusoid_positions(config: UnpaddedEncoderConfig) -> Tensor:
    """Compute the position embeddings (positions, d) of all Whisper encoders: first the sines, then the cosines."""
    half = config.d_model // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10_000) / (half - 1)))
    angles = torch.arange(config.positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def whisper_mel(samples: Tensor, mels: int = 80) -> Tensor:
    """Compute Whisper's log-mel features (B, mels, T / 160) of 16 kHz samples (B, T).

    They are log10 of mel energies, limited to 80 dB below the maximum, and scaled to about -1 to 1.

    References:
        Radford et al. 2022 (Whisper), section 2.2.
    """
    window = torch.hann_window(FRAME_SAMPLES, device=samples.device)
    power = torch.stft(samples, FRAME_SAMPLES, HOP_SAMPLES, window=window, return_complex=True)[..., :-1].abs() ** 2
    energies = (_filters(mels, samples.device) @ power).clamp(min=1e-10).log10()
    loudest = energies.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(energies, loudest - 8.0) + 4.0) / 4.0


@lru_cache(maxsize=8)
def _filters(mels: int, device: torch.device) -> Tensor:  # (mels, 201)
    bank = mel_filter_bank(1 + FRAME_SAMPLES // 2, mels, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    with torch.inference_mode(False):  # no inference tensor, because the cached table is used in training, too
        return torch.from_numpy(bank).float().T.contiguous().to(device)
