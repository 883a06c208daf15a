"""Compressors shorten an image's sequence of visual tokens for the drafter.

They are SpecVLM's (arXiv 2509.11815, section 3.2) and FLASH's latent attention (arXiv 2505.12728, section 3.2).

Letters in shapes: V visual tokens of one image before compression, M states after it, H channels. Each image is
compressed separately and may have any length. What a paper does not specify is an option, and the option's docstring
says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.errors import InputError

Grid = tuple[int, int]  # number of rows and of columns in which an image's visual tokens are arranged
Pruning = Literal["random", "strided"]


@dataclass(frozen=True)
class CompressedImage:
    """The result of compressing V visual tokens of an image to M states."""

    states: Tensor  # (M, H), the compressed states
    positions: Tensor  # (M,) int64: index 0 .. V - 1 of the visual token whose position each state takes
    # (V,) in [0, 1]: the largest weight of each visual token in any of the states; 0: the token was dropped
    visual_weights: Tensor


@final
class Prune(nn.Module):
    """Keeps one of every `ratio` visual tokens and drops the others.

    Args:
        how: Which tokens are kept. "random": in training, other tokens in each call; in evaluation, always the same
            indices for images of the same length, so that an image always gives the same draft. (The paper drops tokens
            at random, and does not say what inference does.) "strided": every `ratio`-th token (not in the paper).
    """

    def __init__(self, ratio: int, how: Pruning = "random") -> None:
        super().__init__()
        self.ratio, self.how = _ratio(ratio), how

    def forward(self, states: Tensor) -> CompressedImage:
        """Keep ceil(V / ratio) of the states (V, H), in their order."""
        indices = self.indices(len(states)).to(states.device)
        return CompressedImage(states[indices], indices, states.new_zeros(len(states)).index_fill(0, indices, 1.0))

    def indices(self, length: int) -> Tensor:
        """Choose the tokens to keep.

        Args:
            length: V, the number of tokens.

        Returns:
            Their indices (M,), ascending.
        """
        count = -(-length // self.ratio)
        if self.how == "strided":
            return torch.arange(count) * self.ratio
        # a random generator of its own, so that the random numbers of sampling stay the same with and without a draft
        generator = None if self.training else torch.Generator().manual_seed(0)
        return torch.randperm(length, generator=generator)[:count].sort().values


@final
class Pool(nn.Module):
    """Averages neighbouring visual tokens.

    If an image has rows * columns tokens, windows are rectangles of this grid, else sections of the sequence.

    Args:
        ratio: Mean number of tokens in a window.
        grid: (rows, columns); None: unknown.
    """

    def __init__(self, ratio: int, grid: Grid | None = None) -> None:
        super().__init__()
        self.ratio, self.grid = _ratio(ratio), grid

    def forward(self, states: Tensor) -> CompressedImage:
        """Average states (V, H) to about V / ratio states. Each gets the position in the middle of its window."""
        weights = self.weights(len(states)).to(states)  # shape (M, V)
        middles = (weights * torch.arange(len(states), device=states.device)).sum(1)
        positions = (middles + 0.5).long()  # torch would round both 1.5 and 2.5 to 2, but positions must differ
        return CompressedImage(weights @ states, positions, weights.amax(0))

    def weights(self, length: int) -> Tensor:
        """Make the matrix (M, length) of the averaging weights; each row belongs to one window.

        Args:
            length: V, the number of tokens.
        """
        if self.grid is None or self.grid[0] * self.grid[1] != length:
            return _windows(length, -(-length // self.ratio))
        rows, columns = self.grid
        down = max(1, round(rows / math.sqrt(self.ratio)))
        across = max(1, round(length / self.ratio / down))
        return torch.kron(_windows(rows, down), _windows(columns, min(across, columns)))


@final
class Convolution(nn.Module):
    """A one-dimensional convolution over the visual tokens, with kernel and stride `ratio`.

    Its initial weights compute the mean of each window (not in the paper, which only says "vanilla"). If the number of
    tokens is not a multiple of `ratio`, the last token is repeated.

    Args:
        size: Number of channels.
        ratio: Kernel and stride.
        depthwise: One filter for each channel: size * ratio weights instead of size^2 * ratio.
    """

    def __init__(self, size: int, ratio: int, depthwise: bool = False) -> None:
        super().__init__()
        self.ratio = _ratio(ratio)
        self.conv = nn.Conv1d(size, size, ratio, stride=ratio, groups=size if depthwise else 1)
        with torch.no_grad():
            mean = torch.ones(size, 1) if depthwise else torch.eye(size)
            self.conv.weight.copy_(mean[..., None].expand_as(self.conv.weight) / ratio)
            nn.init.zeros_(self.conv.bias) if self.conv.bias is not None else None

    def forward(self, states: Tensor) -> CompressedImage:
        """Convolve states (V, H) to (ceil(V / ratio), H)."""
        length, count = len(states), -(-len(states) // self.ratio)
        filled = states
        if count * self.ratio > length:
            filled = torch.cat([states, states[-1:].expand(count * self.ratio - length, -1)])
        if self.conv.groups > 1:  # torch's own depthwise convolution is many times slower
            assert self.conv.bias is not None
            out, taps = self.conv.bias.expand(count, -1), self.conv.weight[:, 0].T.contiguous()
            for tap in range(self.ratio):
                out = torch.addcmul(out, filled[tap :: self.ratio], taps[tap])
        else:
            out = self.conv(filled.T[None])[0].T
        positions = torch.arange(count, device=states.device) * self.ratio + (self.ratio - 1) // 2
        return CompressedImage(out, positions.clamp(max=length - 1), states.new_full((length,), 1 / self.ratio))


@final
class Resampler(nn.Module):
    """Compresses an image to Q states by cross-attention with Q learned queries.

    The states get the image's last Q positions. The class is SpecVLM's "simplified Q-Former" with 2 object queries, and
    ViSpec's adaptor. The queries are parameters themselves, so there is no query projection.
    """

    def __init__(self, size: int, queries: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        if size % heads:
            raise InputError(f"`heads` must divide {size} channels, but is {heads}. Choose a divisor.")
        self.heads = heads
        self.q = nn.Parameter(torch.randn(queries, heads, size // heads) * (size // heads) ** -0.5)
        self.k_proj, self.v_proj = nn.Linear(size, size, bias=bias), nn.Linear(size, size, bias=bias)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, states: Tensor, fc: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None) -> CompressedImage:
        """Compress an image's states (V, H) to Q states (Q, H).

        To save time, the queries are multiplied by the key projection's matrix, so that keys need not be computed. The
        value projection is applied to the Q weighted means only.

        Args:
            states: (V, H), or (V, J) with `fc`.
            fc: (matrix (H, J), function) of an affine map from J to H channels. Give it if the states are (V, J) and
                have not passed this map yet. The map is then applied to the Q weighted means, not to the V tokens. Both
                orders give the same result, because attention weights sum to 1.
        """
        heads = self.heads
        reading = torch.einsum("qhd,hdc->hqc", self.q, self.k_proj.weight.unflatten(0, (heads, -1)))
        if fc is not None:
            reading = reading @ fc[0]
        # the keys' bias is left out: it adds the same score to all tokens, which does not change a softmax
        weights = (reading @ states.T * self.q.shape[-1] ** -0.5).softmax(-1)  # shape (heads, Q, V)
        mixed = weights @ states if fc is None else fc[1](weights @ states)  # shape (heads, Q, H)
        values = torch.einsum("hqc,hdc->qhd", mixed, self.v_proj.weight.unflatten(0, (heads, -1))).flatten(1)
        out = self.o_proj(values if self.v_proj.bias is None else values + self.v_proj.bias)
        return CompressedImage(
            out, last_positions(len(states), len(out), states.device), weights.detach().mean(0).amax(0)
        )


@final
class LatentAttention(nn.Module):
    """FLASH's compressor: softmax(C F^T) F, with learned latents C and the states F.

    It has no scale, projection or extra loss. If an image has fewer tokens than there are latents, only the first
    latents are used, one for each token (not in the paper).
    """

    def __init__(self, size: int, latents: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, size) * size**-0.5)

    def forward(self, states: Tensor) -> CompressedImage:
        """Compress states (V, H) to (min(number of latents, V), H). The positions are spread evenly over the image."""
        length, count = len(states), min(len(self.latents), len(states))
        weights = (self.latents[:count] @ states.T).softmax(-1)
        positions = (2 * torch.arange(count, device=states.device) + 1) * length // (2 * count)
        return CompressedImage(weights @ states, positions, weights.detach().amax(0))


@final
class TextOnly(nn.Module):
    """Drops the image. The drafter then knows of the image only through the target's hidden states at text tokens."""

    def forward(self, states: Tensor) -> CompressedImage:
        """Drop all of an image's states (V, H).

        Returns:
            An empty tensor (0, H).
        """
        none = torch.zeros(0, dtype=torch.long, device=states.device)
        return CompressedImage(states[:0], none, states.new_zeros(len(states)))


def image_spans(visual: Tensor, grid: Grid | None = None) -> list[tuple[int, int]]:
    """Find the images in a prompt.

    Args:
        visual: (L,) bool, True at visual tokens.
        grid: (rows, columns) of every image's tokens, if known; it separates images that follow each other without text
            between them.

    Returns:
        (begin, end) of each image, as indices of tokens.
    """
    edges = torch.diff(F.pad(visual.to(torch.int8), (1, 1))).nonzero()[:, 0].tolist()
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    size = 0 if grid is None else grid[0] * grid[1]
    if not size:
        return runs
    parts: list[tuple[int, int]] = []
    for begin, end in runs:
        step = size if (end - begin) % size == 0 else end - begin
        parts += [(first, first + step) for first in range(begin, end, step)]
    return parts


def separate_positions(positions: Tensor, length: int) -> Tensor:
    """Make positions distinct by moving them as little as possible, because two states cannot have the same position.

    Args:
        positions: (M,), ascending, M <= length.
        length: All new positions are below it.

    Returns:
        (M,).
    """
    separated: list[int] = []
    for index, position in enumerate(positions.tolist()):
        lowest = separated[-1] + 1 if separated else 0
        separated.append(min(max(position, lowest), length - (len(positions) - index)))
    return torch.tensor(separated, dtype=torch.long, device=positions.device)


def last_positions(length: int, count: int, device: torch.device) -> Tensor:
    """Return the last `count` positions of an image with `length` tokens; an image with fewer repeats its first one."""
    return torch.arange(length - count, length, device=device).clamp(min=0)


def _windows(length: int, count: int) -> Tensor:
    """Make the matrix (count, length) that averages `length` tokens in `count` windows of about equal size."""
    index = torch.arange(count)
    begins, ends = index * length // count, -(-(index + 1) * length // count)
    line = torch.arange(length)
    inside = (line >= begins[:, None]) & (line < ends[:, None])
    return inside / (ends - begins)[:, None]


def _ratio(ratio: int) -> int:
    if ratio < 1:
        raise InputError(f"`ratio` must be at least 1, but is {ratio}. 1 keeps all tokens.")
    return ratio
