"""Checks of a DAG's links (B, L, L), shared by all DAG operations.

Entry [i, j] is the log-probability of the jump i -> j, -inf if there is none. Jumps go forward only: entries with j <=
i are ignored everywhere, whatever they hold.
"""

import torch
from torch import Tensor

from mmdec.types import InputError

NEG_INF = float("-inf")


def checked_links(links: Tensor, batch: int, size: int) -> Tensor:
    """Check that links are (B, L, L) for graphs with `size` vertices, and return them."""
    if not links.is_floating_point():
        raise InputError(f"`links` must hold floating-point log-probabilities, but is {links.dtype}. Convert it.")
    if tuple(links.shape) != (batch, size, size):
        raise InputError(
            f"`links` must have shape ({batch}, {size}, {size}), but has {tuple(links.shape)}. "
            "Batch and graph size are those of the emissions."
        )
    return links


def checked_lengths(name: str, lengths: Tensor, batch: int, longest: int, device: torch.device) -> Tensor:
    """Check 1 <= length <= longest, and return the lengths (B,) as int64 on `device`."""
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
    """Links (B, L, L) with -inf for impossible jumps: backward, in place, from or to padding."""
    return forget_impossible_(links.clone(), graph_lengths)


def forget_impossible_(scores: Tensor, graph_lengths: Tensor) -> Tensor:
    """Set scores (B, L, L) of impossible jumps to -inf, in place."""
    size = scores.size(1)
    # i < j < length holds for jumps between inner vertices: i needs no test of its own
    outside = torch.arange(size, device=scores.device) >= graph_lengths[:, None]  # (B, L)
    backward = torch.ones(size, size, dtype=torch.bool, device=scores.device).tril_()
    return scores.masked_fill_(backward | outside[:, None, :], NEG_INF)
