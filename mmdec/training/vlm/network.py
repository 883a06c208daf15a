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
    """Sizes of the network. It is deep and narrow, because speculative decoding saves more time the more layers the
    target has."""

    image: int = 128  # height and width of a picture in pixels
    patch: int = 16  # height and width of an image patch in pixels
    vision_width: int = 192  # channels of the encoder's states
    vision_layers: int = 5
    vision_heads: int = 3
    vision_ffn: int = 768  # channels of the encoder's feed-forward layers
    width: int = 160  # channels of the language model's states
    layers: int = 12
    heads: int = 4
    head_dim: int = 40  # channels of a head
    ffn: int = 416  # channels of the language model's feed-forward layers
    positions: int = 1024  # maximum number of tokens in a text, image tokens included

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


def configuration(shape: Shape, units: list[str]) -> LlavaConfig:
    """Return the model's configuration. units: the tokens, ordered by id. The projector reads the output of the
    encoder's last layer, without the final norm. There is no class token."""
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
    """Build the model with random weights. The position embeddings of the image patches are initialised with
    sinusoids."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(configuration(shape, units))
    model.set_attn_implementation("eager")  # faster to train on a CPU than fused attention
    table = model.model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        table.copy_(sines(shape.image // shape.patch, shape.vision_width) * 0.2)
    return model


def sines(side: int, width: int) -> Tensor:
    """Make two-dimensional sinusoidal position embeddings (side * side, width) for a grid of side x side patches. Each
    quarter of the channels is one of: sine of the row, cosine of the row, sine of the column, cosine of the column."""
    quarter = width // 4
    speeds = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter)
    angles = torch.arange(side)[:, None] * speeds  # shape (rows or columns, a quarter of the channels)
    waves = torch.cat([angles.sin(), angles.cos()], -1)
    rows = waves[:, None].expand(side, side, -1)
    columns = waves[None].expand(side, side, -1)
    return F.pad(torch.cat([rows, columns], -1).reshape(side * side, -1), (0, width - 4 * quarter))


def see(model: LlavaForConditionalGeneration, pixels: Tensor, dtype: torch.dtype, layer: Layer | None = None) -> Tensor:
    """Run the vision encoder. Returns: the input of the projector (B, patches, vision width).

    pixels: (B, 3, H, W), from -1 to 1. dtype: dtype of matrix products; the residual stream stays in float32.
    layer: the function that computes one layer: `vision_layer` or its compiled version. This function gets the weights
        as arguments, so that a single compiled function serves all layers.
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

    embeddings: (B, L, H), the inputs. mask: (B, 1, L, L), added to the attention scores. positions: (B, L).
    dtype: dtype of matrix products. layer: the function that computes one layer: `language_layer` or its compiled
        version.
    watched: indices of layers whose first head's attention weights are returned. inside: index of a layer whose output
        is returned.
    Returns: hidden states (B, L, H) after the last norm; attention weights (B, L, L) of each layer in `watched`; the
        output (B, L, H) of layer `inside`, or None.
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
    """Return the attention weights (B, L, L) of a layer's first head.

    x: (B, L, H), the layer's input. mask: (B, 1, L, L), added to the scores. cosine, sine: rotary position embeddings.
        heads: number of heads.
    norm: (H,), weight of the layer's input norm. queries, keys: weights of the projections for all heads.
    """
    size = queries.shape[0] // heads
    y = F.rms_norm(x, (x.shape[-1],), norm, 1e-6)
    q, k = (turned(F.linear(y, w[:size])[:, None], cosine, sine)[:, 0] for w in (queries, keys))
    return (q @ k.transpose(1, 2) * size**-0.5 + mask[:, 0]).softmax(-1)


Layer = Callable[..., Tensor]


def vision_layer(x: Tensor, heads: int, dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """Apply one SigLIP encoder layer to the states x (B, P, H) of P patches.

    dtype: dtype of matrix products. weights: weight and bias of: first norm; query, key, value and output projections;
        second norm; the two feed-forward layers.
    """
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
    """Apply one Llama decoder layer (without grouped-query attention) to x (B, L, H).

    mask: (B, 1, L, L), added to the attention scores. cosine, sine: rotary position embeddings. dtype: dtype of matrix
        products.
    weights: those of: input norm; query, key, value and output projections; second norm; gate, up and down projections.
    """
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
    """Apply rotary position embeddings to queries or keys (B, heads, L, D). cosine, sine: (B, L, D)."""
    half = states.shape[-1] // 2
    swapped = torch.cat([-states[..., half:], states[..., :half]], -1)
    return states * cosine[:, None] + swapped * sine[:, None]


class Whitening(nn.Module):
    """The projector's first layer during training. It first whitens the encoder's states: mean 0, variance 1 in all
    directions. It holds the mean of the states, the whitening matrix, and the linear layer.

    LLaVA's projector reads the encoder's residual stream directly. In a trained encoder, a few directions have nearly
    all of the variance, and the directions that distinguish letters are not among these. Without whitening, the
    language model learned colours and positions, but not to read. `fold` merges whitening and linear layer into the
    first layer of the exported model, which gives the same output without whitening.
    """

    def __init__(self, width: int, out: int, shrink: float = 0.01) -> None:
        super().__init__()
        self.shrink = shrink
        self.first = nn.Linear(width, out)
        nn.init.orthogonal_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.register_buffer("middle", torch.zeros(width))  # mean of the encoder's states
        # the whitening matrix; zeros until `measure` was called
        self.register_buffer("turn", torch.zeros(width, width))
        self.middle: Tensor
        self.turn: Tensor

    @property
    def measured(self) -> bool:
        return bool(self.turn.any())

    @torch.no_grad()
    def measure(self, states: Tensor, layer: nn.Linear | None = None) -> None:
        """Estimate the mean and covariance of the encoder's states (B, P, H), averaged over processes, and set the
        whitening.

        layer: the first layer of a trained projector; the linear layer is set so that the outputs stay the same as
            without whitening. None: a new projector.
        """
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
        """Whiten states (B, P, H) of P patches and apply the linear layer. Returns: (B, P, out)."""
        return self.first((states - self.middle) @ self.turn)

    @torch.no_grad()
    def fold(self, layer: nn.Linear) -> None:
        """Set the weights of `layer` so that it gives, from states without whitening, the same output as `forward`."""
        weight = self.first.weight @ self.turn
        layer.weight.copy_(weight)
        layer.bias.copy_(self.first.bias - weight @ self.middle)


class CellHeads(nn.Module):
    """Auxiliary task of the encoder: linear classifiers that predict what each cell of an image patch shows.

    cells: number of cells in a patch. kinds: number of classes of each label that a cell has.
    """

    def __init__(self, width: int, cells: int, kinds: tuple[int, ...]) -> None:
        super().__init__()
        self.cells, self.kinds = cells, kinds
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, cells * sum(kinds))

    def forward(self, states: Tensor) -> list[Tensor]:
        """Classify the cells. states: (B, P, H) of the encoder. Returns: for each label of a cell, logits (B, P, cells,
        classes)."""
        scores = self.out(self.norm(states))
        return list(scores.unflatten(-1, (self.cells, sum(self.kinds))).split(self.kinds, -1))


def cell_loss(scores: Tensor, labels: Tensor, empty: float) -> Tensor:
    """Return the weighted mean cross-entropy. scores: logits (..., classes). labels: (...), 0 for an empty cell. empty:
    loss weight of empty cells; other cells have weight 1."""
    losses = F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten().long(), reduction="none")
    weights = torch.where(labels.flatten() == 0, empty, 1.0)
    return (losses * weights).sum() / weights.sum() * token_weight(weights.sum())
