"""A speech encoder: a convolutional subsampler, then Conformer blocks with relative positions.

The subsampler shortens the input by a factor of 4. The architecture is that of fairseq's `s2t_conformer` (Gulati et al.
2020, with the Transformer-XL relative positions of Dai et al. 2019). Weights of fairseq and fairseq2 can be converted:
the three encoders have the same tensors in the same shapes, under other names. The names here are fairseq's without
`encoder.`. In fairseq2 the encoder is `s2t_conformer` with `use_relative_pos=True`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.errors import InputError
from mmdec.nn.transformer import PooledDropout

FRONT_NAMES: dict[str, str] = {  # mmdec's name of a module outside the blocks -> fairseq2's name
    "subsample.conv_layers.0": "encoder_frontend.feature_extractor.layers.0.conv",
    "subsample.conv_layers.1": "encoder_frontend.feature_extractor.layers.1.conv",
    "linear": "encoder_frontend.proj",
}
BLOCK_NAMES: dict[str, str] = {  # mmdec's name of a module or tensor in a Conformer block -> fairseq2's name
    "ffn1.layer_norm": "ffn1_layer_norm",
    "ffn1.w_1": "ffn1.inner_proj",
    "ffn1.w_2": "ffn1.output_proj",
    "self_attn_layer_norm": "self_attn_layer_norm",
    "self_attn.linear_q": "self_attn.q_proj",
    "self_attn.linear_k": "self_attn.k_proj",
    "self_attn.linear_v": "self_attn.v_proj",
    "self_attn.linear_out": "self_attn.output_proj",
    "self_attn.linear_pos": "self_attn.sdpa.r_proj",
    "self_attn.pos_bias_u": "self_attn.sdpa.u_bias",
    "self_attn.pos_bias_v": "self_attn.sdpa.v_bias",
    "conv_module.layer_norm": "conv_layer_norm",
    "conv_module.pointwise_conv1": "conv.pointwise_conv1",
    "conv_module.depthwise_conv": "conv.depthwise_conv",
    "conv_module.batch_norm": "conv.batch_norm",
    "conv_module.pointwise_conv2": "conv.pointwise_conv2",
    "ffn2.layer_norm": "ffn2_layer_norm",
    "ffn2.w_1": "ffn2.inner_proj",
    "ffn2.w_2": "ffn2.output_proj",
    "final_layer_norm": "layer_norm",
}
_OUR_BLOCK = r"conformer_layers\.(\d+)\."


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the speech encoder; the defaults are DASpeech's (33.5 M parameters)."""

    features: int = 80  # mel bands of the input
    channels: int = 1024  # channels of the subsampler's first convolution, before its GLU
    d_model: int = 256  # channels of the states
    ffn: int = 2048  # inner channels of the feed-forward networks
    heads: int = 4
    layers: int = 12
    kernel: int = 31  # states that the depthwise convolution spans; odd
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise InputError(f"`kernel` must be odd, but is {self.kernel}. An even one would change the length.")
        if self.d_model % self.heads or self.d_model % 2:
            raise InputError(
                f"`d_model` must be even and divide into {self.heads} heads, but is {self.d_model}. Change one of them."
            )


def lengths_to_mask(lengths: Tensor, size: int) -> Tensor:
    """Make the mask (B, size) bool of rows with `lengths` (B,): True at a row's positions, False at padding."""
    return torch.arange(size, device=lengths.device)[None] < lengths[:, None]


def _halve_lengths(lengths: Tensor) -> Tensor:
    """Return the numbers of frames (B,) after one convolution of width 5, stride 2 and padding 2.

    Args:
        lengths: (B,), the numbers before the convolution.
    """
    return torch.div(lengths - 1, 2, rounding_mode="floor") + 1


class Subsampler(nn.Module):
    """Shortens features (B, N, 80) to (B, ~N/4, d).

    Two convolutions of width 5 and stride 2 are each followed by a GLU.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.conv_layers = nn.ModuleList(
            [
                nn.Conv1d(config.features, config.channels, 5, stride=2, padding=2),
                nn.Conv1d(config.channels // 2, config.d_model * 2, 5, stride=2, padding=2),
            ]
        )

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features.transpose(1, 2)  # shape (B, 80, N)
        x = x.masked_fill(~lengths_to_mask(lengths, x.shape[2])[:, None], 0.0)  # not a product: 0 * NaN is NaN
        for conv in self.conv_layers:
            x = F.glu(conv(x), dim=1)
            lengths = _halve_lengths(lengths)
            # padding must be 0: the next convolution mixes neighbouring frames, so it would mix padding into a
            # recording's last frames
            x = x * lengths_to_mask(lengths, x.shape[2])[:, None].to(x.dtype)
        return x.transpose(1, 2), lengths


class FeedForward(nn.Module):
    """A pre-norm feed-forward network. The Conformer block multiplies the network's output by one half."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.w_1 = nn.Linear(config.d_model, config.ffn)
        self.w_2 = nn.Linear(config.ffn, config.d_model)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.silu(self.w_1(self.layer_norm(x))))
        return self.dropout(self.w_2(x))


class RelativeAttention(nn.Module):
    """Self-attention with Transformer-XL relative positions.

    The score of two states is the sum of a content score and a position score; each score has a learned bias on the
    query.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        d = config.d_model
        self.heads = config.heads
        self.linear_q = nn.Linear(d, d)
        self.linear_k = nn.Linear(d, d)
        self.linear_v = nn.Linear(d, d)
        self.linear_out = nn.Linear(d, d)
        self.linear_pos = nn.Linear(d, d, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(config.heads, d // config.heads))
        self.pos_bias_v = nn.Parameter(torch.empty(config.heads, d // config.heads))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Apply attention to x (B, S, d).

        Args:
            positions: (2S-1, d), embeddings of the distances S-1 down to -(S-1).
            mask: Additive (B, 1, 1, S), which hides padding.

        Returns:
            (B, S, d).
        """
        b, s, d = x.shape
        h = self.heads
        q = self.linear_q(x).view(b, s, h, -1)
        k = self.linear_k(x).view(b, s, h, -1).permute(0, 2, 3, 1)  # shape (B, H, D, S)
        v = self.linear_v(x).view(b, s, h, -1).transpose(1, 2)
        p = self.linear_pos(positions).view(2 * s - 1, h, -1).permute(1, 2, 0)  # shape (H, D, 2S-1)
        content = (q + self.pos_bias_u.to(q.dtype)).transpose(1, 2) @ k  # shape (B, H, S, S)
        position = (q + self.pos_bias_v.to(q.dtype)).transpose(1, 2) @ p  # shape (B, H, S, 2S-1)
        # Row i needs the scores of the distances i - j. A skewed view of the padded tensor selects them without
        # `gather`.
        position = F.pad(position, (1, 0)).view(b, h, 2 * s, s)[:, :, 1:].reshape(b, h, s, 2 * s - 1)[..., :s]
        scores = (content + position).float() / math.sqrt(d // h) + mask
        weights = self.dropout(scores.softmax(-1).to(v.dtype))
        return self.linear_out((weights @ v).transpose(1, 2).reshape(b, s, d))


class ConvolutionModule(nn.Module):
    """The convolution module of a Conformer.

    It is a pointwise convolution, GLU, depthwise convolution, BatchNorm, swish and a pointwise convolution.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        d = config.d_model
        self.layer_norm = nn.LayerNorm(d)
        self.pointwise_conv1 = nn.Conv1d(d, 2 * d, 1, bias=False)
        self.depthwise_conv = nn.Conv1d(d, d, config.kernel, padding=config.kernel // 2, groups=d, bias=False)
        self.batch_norm = nn.BatchNorm1d(d)
        self.pointwise_conv2 = nn.Conv1d(d, d, 1, bias=False)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Convolve x (B, S, d).

        Args:
            keep: (B, S, 1), 1 at real positions and 0 at padding.

        Returns:
            (B, S, d).
        """
        x = self.layer_norm(x) * keep.to(x.dtype)
        # computed as a linear layer, which is faster on a CPU than a convolution of width 1
        x = F.glu(F.linear(x, self.pointwise_conv1.weight.squeeze(-1)), dim=-1)
        x = self.depthwise_conv(x.transpose(1, 2))
        x = F.silu(self.batch_norm(x)).transpose(1, 2)
        return self.dropout(F.linear(x, self.pointwise_conv2.weight.squeeze(-1)))


class ConformerLayer(nn.Module):
    """One Conformer block: half feed-forward, attention, convolution, half feed-forward, layer norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.ffn1 = FeedForward(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.self_attn = RelativeAttention(config)
        self.conv_module = ConvolutionModule(config)
        self.ffn2 = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, keep: Tensor) -> Tensor:
        x = x + 0.5 * self.ffn1(x)
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), positions, mask))
        x = x + self.conv_module(x, keep)
        x = x + 0.5 * self.ffn2(x)
        return self.final_layer_norm(x)


def relative_positions(size: int, d_model: int, device: torch.device) -> Tensor:
    """Make sinusoidal embeddings (2*size-1, d_model) of the distances size-1 ... -(size-1).

    Sine and cosine channels alternate.
    """
    distance = torch.arange(size - 1, -size, -1, dtype=torch.float32, device=device)[:, None]
    rate = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float32, device=device) * (-math.log(1e4) / d_model))
    angles = distance * rate
    return torch.stack([angles.sin(), angles.cos()], dim=-1).view(2 * size - 1, d_model)


class SpeechEncoder(nn.Module):
    """Encodes filterbank features with a Conformer.

    References:
        DASpeech (Fang et al., NeurIPS 2023, section 3.1); there is no norm after the last layer.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.subsample = Subsampler(config)
        self.linear = nn.Linear(config.d_model, config.d_model)
        self.conformer_layers = nn.ModuleList([ConformerLayer(config) for _ in range(config.layers)])
        self.dropout = PooledDropout(config.dropout)

    def forward(
        self, features: Tensor, lengths: Tensor, middle: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encode a batch of recordings.

        Args:
            features: (B, N, 80) float.
            lengths: (B,), numbers of frames.
            middle: Number (from 1) of a layer whose output is also returned, for an auxiliary loss; None: no such
                layer.

        Returns:
            States (B, S, d) with S = N/4 rounded up; their lengths (B,); the output (B, S, d) of layer `middle`, or
            None.
        """
        x, lengths = self.subsample(features, lengths)
        x = math.sqrt(self.config.d_model) * x
        real = lengths_to_mask(lengths, x.shape[1])
        mask = torch.zeros(real.shape, device=x.device).masked_fill(~real, -1e9)[:, None, None]
        keep = real[..., None].to(torch.float32)
        positions = relative_positions(x.shape[1], self.config.d_model, x.device)
        x = self.dropout(self.linear(x))
        positions = positions.to(x.dtype)  # converted, because the encoder may run in half or double precision
        tapped: Tensor | None = None
        for index, layer in enumerate(self.conformer_layers, start=1):
            x = layer(x, positions, mask, keep)
            if index == middle:
                tapped = x
        return x, lengths, tapped


def from_fairseq2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of fairseq2's `s2t_conformer` to names of mmdec's `SpeechEncoder`.

    Tensors of the decoder are left out.
    """
    encoder = {name: value for name, value in state.items() if name.startswith(("encoder.", "encoder_frontend."))}
    names = _names(encoder, r"encoder\.layers\.(\d+)\.", _fairseq2_name)
    return _check_state(_rename(encoder, {theirs: ours for ours, theirs in names.items()}, "a fairseq2 s2t_conformer"))


def to_fairseq2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of mmdec's `SpeechEncoder` to fairseq2's names (`encoder_frontend.*` and `encoder.*`)."""
    return _rename(_check_state(state), _names(state, _OUR_BLOCK, _fairseq2_name), "a SpeechEncoder")


def from_fairseq(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of fairseq's `s2t_conformer` or of DASpeech to names of mmdec's `SpeechEncoder`.

    Other tensors are left out.
    """
    encoder = {name: value for name, value in state.items() if name.startswith("encoder.")}
    names = _names(encoder, r"encoder\.conformer_layers\.(\d+)\.", "encoder.".__add__)
    return _check_state(_rename(encoder, {theirs: ours for ours, theirs in names.items()}, "a fairseq s2t_conformer"))


def encoder_config(state: Mapping[str, Tensor], dropout: float = 0.1) -> EncoderConfig:
    """Read the encoder's sizes from the shapes of its tensors.

    Args:
        state: Tensors by mmdec's names.
        dropout: The dropout rate, which tensors do not show.

    Raises:
        InputError: If a tensor is missing.
    """
    block = "conformer_layers.0."
    try:
        return EncoderConfig(
            features=state["subsample.conv_layers.0.weight"].shape[1],  # the weight is (channels, features, 5)
            channels=state["subsample.conv_layers.0.weight"].shape[0],
            d_model=state["linear.weight"].shape[0],
            ffn=state[block + "ffn1.w_1.weight"].shape[0],
            heads=state[block + "self_attn.pos_bias_u"].shape[0],
            layers=_layers(state, _OUR_BLOCK),
            kernel=state[block + "conv_module.depthwise_conv.weight"].shape[2],
            dropout=dropout,
        )
    except (KeyError, IndexError) as error:
        raise InputError(
            "`state` must be that of a SpeechEncoder, but its sizes cannot be read from its tensors "
            f"({type(error).__name__}: {error}). Pass a whole state, from one model."
        ) from error


def _fairseq2_name(ours: str) -> str:
    block = re.match(_OUR_BLOCK, ours)
    rest = ours[block.end() :] if block else ours
    names = BLOCK_NAMES if block else FRONT_NAMES
    prefix = f"encoder.layers.{block[1]}." if block else ""
    if rest in names:
        return prefix + names[rest]
    module, _, tensor = rest.rpartition(".")
    return f"{prefix}{names[module]}.{tensor}"


def _layers(names: Iterable[str], block: str) -> int:
    """Count the Conformer blocks by the tensors' names.

    The result is at least 1, so that an empty state dict leads to an error about missing weights.

    Args:
        block: A regular expression that captures a block's number.
    """
    return max(1, len({layer[1] for name in names if (layer := re.match(block, name))}))


def _names(state: Mapping[str, Tensor], block: str, rename: Callable[[str], str]) -> dict[str, str]:
    """Map mmdec's tensor names to the other library's names, for as many Conformer blocks as `state` has.

    Args:
        block: A regular expression that captures a block's number in a name of `state`.
        rename: Function from mmdec's name to the other name.
    """
    with torch.device("meta"):
        ours = SpeechEncoder(EncoderConfig(layers=_layers(state, block))).state_dict()
    return {name: rename(name) for name in ours}


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str], kind: str) -> dict[str, Tensor]:
    """Rename the tensors of `state`.

    Args:
        names: Old name -> new name.
        kind: What the tensors belong to, for the error.

    Raises:
        InputError: Unless the old names are exactly the keys of `state`.
    """
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    if missing or unexpected:
        parts = [f"lacks {_list_names(missing)}"] if missing else []
        parts += [f"has the unexpected {_list_names(unexpected)}"] if unexpected else []
        raise InputError(
            f"`state` must hold the tensors of {kind} encoder with relative positions, but {' and '.join(parts)}. "
            "Pass the state of such an encoder, under the names it was saved with."
        )
    return {new: state[old] for old, new in names.items()}


def _check_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check that names and shapes of the tensors fit a `SpeechEncoder`, else raise InputError.

    Args:
        state: Tensors by mmdec's names, which are returned unchanged.
    """
    names = _names(state, _OUR_BLOCK, str)
    state = _rename(state, names, "a SpeechEncoder")
    with torch.device("meta"):
        expected = SpeechEncoder(encoder_config(state)).state_dict()
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InputError(
                f"`state` must have shapes that fit one encoder, but {name} is {tuple(value.shape)} "
                f"where the others ask for {tuple(expected[name].shape)}. Pass a whole state, from one model."
            )
    return state


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
