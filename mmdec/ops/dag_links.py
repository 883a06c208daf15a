"""Links of a directed acyclic graph in their two layouts, and the checks that every DAG operation shares.

dense:  (B, L, L), entry [i, j] = log probability of the jump i -> j; -inf where there is none.
banded: (B, L, T), entry [i, d] = log probability of the jump i -> i + 1 + d; entries that leave the graph are ignored.
Jumps go forward only: dense entries with j <= i are ignored everywhere, whatever they hold.
"""

import torch
from torch import Tensor

from mmdec.types import InputError

NEG_INF = float("-inf")


def banded_to_dense(links: Tensor) -> Tensor:
    """(B, L, T) -> (B, L, L). Differentiable; jumps longer than T become -inf."""
    if links.dim() != 3 or links.size(2) < 1:
        raise InputError(
            f"`links` must be banded, (B, L, T) with T >= 1, but has shape {tuple(links.shape)}. "
            "Entry [b, i, d] is the jump i -> i + 1 + d."
        )
    batch, size, width = links.shape
    jump = _jumps(size, links.device)  # (L, L)
    index = jump.clamp(0, width - 1).expand(batch, size, size)
    return links.gather(2, index).masked_fill((jump < 0) | (jump >= width), NEG_INF)


def dense_to_banded(links: Tensor, width: int) -> Tensor:
    """(B, L, L) -> (B, L, width). Differentiable. Longer jumps are dropped; those that leave the graph are -inf."""
    if links.dim() != 3 or links.size(1) != links.size(2):
        raise InputError(f"`links` must be dense, (B, L, L), but has shape {tuple(links.shape)}. Transpose or pad it.")
    if width < 1:
        raise InputError(f"`width` must be at least 1, but is {width}. It is the longest jump kept.")
    batch, size, _ = links.shape
    target = torch.arange(size, device=links.device)[:, None] + 1 + torch.arange(width, device=links.device)  # (L, T)
    index = target.clamp(max=size - 1).expand(batch, size, width)
    return links.gather(2, index).masked_fill(target >= size, NEG_INF)


def checked_links(links: Tensor, batch: int, size: int, banded: bool, *, unrolled: bool = True) -> Tensor:
    """Links as dense (B, L, L), after checking their shape against a graph of `size` vertices; as they are without
    `unrolled`."""
    if not links.is_floating_point():
        raise InputError(f"`links` must hold floating-point log-probabilities, but is {links.dtype}. Convert it.")
    if banded:
        if links.dim() != 3 or tuple(links.shape[:2]) != (batch, size):
            raise InputError(
                f"`links` must have shape ({batch}, {size}, T) when banded, but has {tuple(links.shape)}. "
                "Batch and graph size are those of the emissions."
            )
        return banded_to_dense(links) if unrolled else links
    if tuple(links.shape) != (batch, size, size):
        raise InputError(
            f"`links` must have shape ({batch}, {size}, {size}), but has {tuple(links.shape)}. "
            "Batch and graph size are those of the emissions; pass banded=True for banded links."
        )
    return links


def checked_lengths(name: str, lengths: Tensor, batch: int, longest: int, device: torch.device) -> Tensor:
    """Lengths (B,) as int64 on `device`, after checking 1 <= length <= longest."""
    if tuple(lengths.shape) != (batch,) or lengths.is_floating_point():
        raise InputError(
            f"`{name}` must be {batch} integers, but is {lengths.dtype} of shape {tuple(lengths.shape)}. "
            "Pass one length for each sample of the batch."
        )
    if batch:
        low, high = (int(value) for value in torch.stack(lengths.aminmax()).tolist())
        if low < 1 or high > longest:
            raise InputError(
                f"`{name}` must be between 1 and {longest}, but ranges from {low} to {high}. "
                "Check the padding of the batch."
            )
    return lengths.to(device=device, dtype=torch.long)


def forward_links(links: Tensor, graph_lengths: Tensor) -> Tensor:
    """Dense links (B, L, L) with -inf wherever no jump is possible: backwards, in place, from or to padding."""
    return forget_impossible_(links.clone(), graph_lengths)


def forget_impossible_(scores: Tensor, graph_lengths: Tensor) -> Tensor:
    """In place, scores (B, L, L) of jumps become -inf where no jump is possible."""
    size = scores.size(1)
    # A jump from inside to a later inside vertex; i < j < length makes a test of i needless.
    outside = torch.arange(size, device=scores.device) >= graph_lengths[:, None]  # (B, L)
    backward = torch.ones(size, size, dtype=torch.bool, device=scores.device).tril_()
    return scores.masked_fill_(backward | outside[:, None, :], NEG_INF)


def _jumps(size: int, device: torch.device) -> Tensor:
    """(L, L): j - i - 1, the band of the jump i -> j; negative where it goes backwards or stays."""
    vertex = torch.arange(size, device=device)
    return vertex[None, :] - vertex[:, None] - 1
