"""The small vision-language model: a SigLIP encoder of 64 patches and a deep, narrow Llama, joined as in LLaVA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from mmdec.training.optim import token_weight
from mmdec.training.vlm.tokens import BEGIN, END, IMAGE, PAD


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. It is deep and narrow: the more layers the target has, the more time drafting saves."""

    image: int = 128  # pixels of a side of the square picture
    patch: int = 16  # pixels of a side of a patch
    vision_width: int = 192  # channels of the encoder's states
    vision_layers: int = 5
    vision_heads: int = 3
    vision_ffn: int = 768  # channels of the encoder's feed-forward layers
    width: int = 160  # channels of the language model's states
    layers: int = 12
    heads: int = 4
    head_dim: int = 40  # channels of a head
    ffn: int = 416  # channels of the language model's feed-forward layers
    positions: int = 1024  # the most tokens, image tokens included

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


def configuration(shape: Shape, units: list[str]) -> LlavaConfig:
    """Return the configuration of a model with the tokens `units`. The projector reads the encoder's last layer,
    without its norm. There is no class token."""
    return LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=shape.vision_width,
            intermediate_size=shape.vision_ffn,
            num_hidden_layers=shape.vision_layers,
            num_attention_heads=shape.vision_heads,
            image_size=shape.image,
            patch_size=shape.patch,
            vision_use_head=False,
        ),
        text_config=LlamaConfig(
            vocab_size=len(units),
            hidden_size=shape.width,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
            bos_token_id=units.index(BEGIN),
            eos_token_id=units.index(END),
            pad_token_id=units.index(PAD),
        ),
        image_token_index=units.index(IMAGE),
        image_seq_length=shape.patches,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def build_model(shape: Shape, units: list[str], seed: int) -> LlavaForConditionalGeneration:
    """Build a model with random weights. The position embeddings of patches begin as sines and cosines."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(configuration(shape, units))
    model.set_attn_implementation("eager")  # faster to train on a CPU than fused attention
    table = model.model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        table.copy_(sines(shape.image // shape.patch, shape.vision_width) * 0.2)
    return model


def sines(side: int, width: int) -> Tensor:
    """Return position embeddings (side * side, width) of `side` rows of `side` patches. A quarter of the channels each
    is for sine and cosine of the row, and for sine and cosine of the column."""
    quarter = width // 4
    speeds = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter)
    angles = torch.arange(side)[:, None] * speeds  # (rows or columns, a quarter of the channels)
    waves = torch.cat([angles.sin(), angles.cos()], -1)
    rows = waves[:, None].expand(side, side, -1)
    columns = waves[None].expand(side, side, -1)
    return F.pad(torch.cat([rows, columns], -1).reshape(side * side, -1), (0, width - 4 * quarter))


def see(model: LlavaForConditionalGeneration, pixels: Tensor, dtype: torch.dtype, layer: Layer | None = None) -> Tensor:
    """Run the vision encoder. pixels: (B, 3, H, W), -1 to 1. Returns: the projector's input (B, patches, vision width).

    dtype: dtype of matrix products; the residual stream stays in float32. layer: `vision_layer`, or its compiled
        version. Layers get their weights as arguments, so that one compiled function serves all of them.
    """
    tower = model.model.vision_tower
    patches = tower.embeddings.patch_embedding
    side = patches.kernel_size[0]
    squares = pixels.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5)
    states = F.linear(squares.flatten(3).flatten(1, 2).to(dtype), patches.weight.flatten(1).to(dtype)).float()
    states = states + patches.bias + tower.embeddings.position_embedding.weight
    heads = tower.config.num_attention_heads
    for block in tower.encoder.layers:
        attention = block.self_attn
        weights = [
            value
            for part in (
                block.layer_norm1, attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj,
                block.layer_norm2, block.mlp.fc1, block.mlp.fc2,
            )
            for value in (part.weight, part.bias)
        ]  # fmt: skip
        states = (layer or vision_layer)(states, heads, dtype, *weights)
    return states


def speak(
    model: LlavaForConditionalGeneration,
    embeddings: Tensor,
    mask: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    layer: Layer | None = None,
    watched: Sequence[int] = (),
    inside: int = -1,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Run the language model.

    embeddings: (B, L, H). mask: (B, 1, L, L), added to the scores. positions: (B, L). dtype, layer: as for `see`.
    watched: layers whose first head's attention is returned. inside: layer whose output is returned.

    Returns: hidden states (B, L, H) after the last norm; attention (B, L, L) of each layer in `watched`; the output (B,
        L, H) of layer `inside`.
    """
    language = model.model.language_model
    cosine, sine = language.rotary_emb(embeddings, position_ids=positions)
    heads = language.config.num_attention_heads
    seen: list[Tensor] = []
    middle: Tensor | None = None
    for number, block in enumerate(language.layers):
        attention, inner = block.self_attn, block.mlp
        weights = [
            part.weight
            for part in (
                block.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                block.post_attention_layernorm, inner.gate_proj, inner.up_proj, inner.down_proj,
            )
        ]  # fmt: skip
        if number in watched:
            norm, queries, keys = weights[:3]
            seen.append(first_attention(embeddings, mask, cosine, sine, heads, norm, queries, keys))
        embeddings = (layer or language_layer)(embeddings, mask, cosine, sine, heads, dtype, *weights)
        if number == inside:
            middle = embeddings
    return language.norm(embeddings), seen, middle


def first_attention(
    x: Tensor, mask: Tensor, cosine: Tensor, sine: Tensor, heads: int, norm: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """Return the attention weights (B, L, L) of a layer's first head, for x (B, L, H), the layer's input.

    mask: (B, 1, L, L), added to the scores. norm: (H,). queries, keys: the projections of all `heads` heads.
    """
    size = queries.shape[0] // heads
    y = F.rms_norm(x, (x.shape[-1],), norm, 1e-6)
    q, k = (turned(F.linear(y, w[:size])[:, None], cosine, sine)[:, 0] for w in (queries, keys))
    return (q @ k.transpose(1, 2) * size**-0.5 + mask[:, 0]).softmax(-1)


Layer = Callable[..., Tensor]


def vision_layer(x: Tensor, heads: int, dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """Apply one layer of SigLIP to P patches x (B, P, H). weights: norms, projections and biases, ordered as in
    `see`."""
    g1, b1, wq, bq, wk, bk, wv, bv, wo, bo, g2, b2, w1, c1, w2, c2 = weights
    width = x.shape[-1]
    y = F.layer_norm(x, (width,), g1, b1, 1e-6).to(dtype)
    q, k, v = (
        F.linear(y, w.to(dtype), b.to(dtype)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for w, b in ((wq, bq), (wk, bk), (wv, bv))
    )
    chances = ((q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5).softmax(-1).to(dtype)
    x = x + F.linear((chances @ v).transpose(1, 2).flatten(2), wo.to(dtype), bo.to(dtype)).to(x.dtype)
    y = F.layer_norm(x, (width,), g2, b2, 1e-6).to(dtype)
    y = F.gelu(F.linear(y, w1.to(dtype), c1.to(dtype)), approximate="tanh")
    return x + F.linear(y, w2.to(dtype), c2.to(dtype)).to(x.dtype)


def language_layer(
    x: Tensor, mask: Tensor, cosine: Tensor, sine: Tensor, heads: int, dtype: torch.dtype, *weights: Tensor
) -> Tensor:
    """Apply one layer of Llama, with as many key heads as query heads, to x (B, L, H). mask: added to the scores.
    cosine, sine: rotary positions. weights: norms and projections, ordered as in `speak`."""
    n1, wq, wk, wv, wo, n2, wg, wu, wd = weights
    width = x.shape[-1]
    y = F.rms_norm(x, (width,), n1, 1e-6).to(dtype)
    q, k, v = (F.linear(y, w.to(dtype)).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (wq, wk, wv))
    q, k = (turned(states, cosine.to(dtype), sine.to(dtype)) for states in (q, k))
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5 + mask
    chances = scores.softmax(-1).to(dtype)
    x = x + F.linear((chances @ v).transpose(1, 2).flatten(2), wo.to(dtype)).to(x.dtype)
    y = F.rms_norm(x, (width,), n2, 1e-6).to(dtype)
    y = F.silu(F.linear(y, wg.to(dtype))) * F.linear(y, wu.to(dtype))
    return x + F.linear(y, wd.to(dtype)).to(x.dtype)


def turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to states (B, heads, L, D) of heads with D channels; cosine and sine (B, L, D)."""
    half = states.shape[-1] // 2
    swapped = torch.cat([-states[..., half:], states[..., :half]], -1)
    return states * cosine[:, None] + swapped * sine[:, None]


class Whitening(nn.Module):
    """The projector's first layer in training. It whitens the encoder's states: mean 0, variance 1 in all directions.

    LLaVA's projector reads the encoder's residual stream directly. In a trained encoder, a few directions have almost
    all of its variance, and letters are not among them: the language model saw colours and places, but could not read.
    So the projector learns on whitened states. `fold` then merges whitening and layer into the exported model's first
    layer, which gives the same output from the encoder's plain states.
    """

    def __init__(self, width: int, out: int, shrink: float = 0.01) -> None:
        super().__init__()
        self.shrink = shrink
        self.first = nn.Linear(width, out)
        nn.init.orthogonal_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.register_buffer("middle", torch.zeros(width))  # the states' mean
        self.register_buffer("turn", torch.zeros(width, width))  # the whitening matrix; zeros until `measure`
        self.middle: Tensor
        self.turn: Tensor

    @property
    def measured(self) -> bool:
        return bool(self.turn.any())

    @torch.no_grad()
    def measure(self, states: Tensor, layer: nn.Linear | None = None) -> None:
        """Estimate mean and covariance of states (B, P, H), averaged over processes. layer: the first layer of a
        trained projector, whose outputs this layer then begins with."""
        flat = states.flatten(0, 1).double()
        moments = torch.cat([flat.mean(0, keepdim=True), flat.T @ flat / len(flat)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(moments)
            moments /= torch.distributed.get_world_size()
        middle, covariance = moments[0], moments[1:] - moments[0][:, None] * moments[0]
        sizes, directions = torch.linalg.eigh(covariance)
        sizes = sizes.clamp_min(0) + self.shrink * sizes.mean()
        self.middle.copy_(middle)
        self.turn.copy_(directions * sizes.rsqrt() @ directions.T)
        if layer is not None:
            self.first.weight.copy_(layer.weight.double() @ (directions * sizes.sqrt() @ directions.T))
            self.first.bias.copy_(layer.bias + layer.weight @ self.middle)

    def forward(self, states: Tensor) -> Tensor:
        """Apply whitening and the projector's first layer to P patches' states (B, P, H). Returns: (B, P, out)."""
        return self.first((states - self.middle) @ self.turn)

    @torch.no_grad()
    def fold(self, layer: nn.Linear) -> None:
        """Write whitening and weights into `layer`, which then gives the same output from states that are not
        whitened."""
        weight = self.first.weight @ self.turn
        layer.weight.copy_(weight)
        layer.bias.copy_(self.first.bias - weight @ self.middle)


class CellHeads(nn.Module):
    """Predicts what each cell of an image patch shows, as an auxiliary task. cells: number of cells in a patch. kinds:
    number of classes of each label of a cell."""

    def __init__(self, width: int, cells: int, kinds: tuple[int, ...]) -> None:
        super().__init__()
        self.cells, self.kinds = cells, kinds
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, cells * sum(kinds))

    def forward(self, states: Tensor) -> list[Tensor]:
        """Return, for each label, logits (B, P, cells, classes). states: (B, P, H) of the encoder."""
        scores = self.out(self.norm(states))
        return list(scores.unflatten(-1, (self.cells, sum(self.kinds))).split(self.kinds, -1))


def cell_loss(scores: Tensor, labels: Tensor, empty: float) -> Tensor:
    """Return the mean cross-entropy of logits `scores` (..., classes) with labels (...). Label 0, an empty cell, has
    the weight `empty`, other labels 1."""
    losses = F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten().long(), reduction="none")
    weights = torch.where(labels.flatten() == 0, empty, 1.0)
    return (losses * weights).sum() / weights.sum() * token_weight(weights.sum())
