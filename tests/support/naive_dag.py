"""The DAG's mathematics, readable and slow: one sample at a time, no padding, no batching, gradients by autograd.

match (M, L) and links (L, L) are cropped to the sample. Two independent roads lead to the same numbers: the recursion,
written with dictionaries of reachable vertices, and the list of all paths.
"""

from itertools import combinations

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")


def naive_marginal(match: Tensor, links: Tensor) -> Tensor:
    """Log P(Y | X) by the forward recursion over the vertices that can be reached."""
    reached = {0: match[0, 0]} if match[0, 0] > IMPOSSIBLE else {}
    for t in range(1, match.size(0)):
        arrived = {}
        for j in range(match.size(1)):
            before = [reached[i] + links[i, j] for i in reached if i < j and links[i, j] > IMPOSSIBLE]
            if before and match[t, j] > IMPOSSIBLE:
                arrived[j] = match[t, j] + torch.stack(before).logsumexp(0)
        reached = arrived
    return reached.get(match.size(1) - 1, match.new_tensor(IMPOSSIBLE))


def all_paths(tokens: int, vertices: int) -> list[tuple[int, ...]]:
    """Every path that emits `tokens` tokens: the first on vertex 0, the last on the last vertex, forwards only."""
    if tokens == 1:
        return [(0,)] if vertices == 1 else []
    return [(0, *inner, vertices - 1) for inner in combinations(range(1, vertices - 1), tokens - 2) if vertices > 1]


def path_score(path: tuple[int, ...], match: Tensor, links: Tensor) -> Tensor:
    """Log P(Y, path | X): every emission, the first and the last too, and every jump."""
    score = match[0, 0]
    for t in range(1, len(path)):
        score = score + links[path[t - 1], path[t]] + match[t, path[t]]
    return score


def enumerated_paths(match: Tensor, links: Tensor) -> list[tuple[tuple[int, ...], float]]:
    """Every path with its score, those of score -inf left out."""
    scored = [(path, path_score(path, match, links).item()) for path in all_paths(*match.shape)]
    return [(path, score) for path, score in scored if score > IMPOSSIBLE]
