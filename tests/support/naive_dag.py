"""The DAG's probabilities, computed in a simple and slow way: one sample at a time, no padding, gradients by autograd.

match (M, L) and links (L, L) are cropped to the sample. Two independent methods must agree: the forward recursion, with
dictionaries of reachable vertices, and the list of all paths.
"""

from itertools import combinations

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")
BOS, EOS = 0, 2


def naive_marginal(match: Tensor, links: Tensor) -> Tensor:
    """Compute log P(Y | X) by the forward recursion over reachable vertices."""
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
    """List every path that emits `tokens` tokens: the first at vertex 0, the last at the last vertex, forwards only."""
    if tokens == 1:
        return [(0,)] if vertices == 1 else []
    return [(0, *inner, vertices - 1) for inner in combinations(range(1, vertices - 1), tokens - 2) if vertices > 1]


def path_score(path: tuple[int, ...], match: Tensor, links: Tensor) -> Tensor:
    """Compute log P(Y, path | X): the sum of all emissions and all links on the path."""
    score = match[0, 0]
    for t in range(1, len(path)):
        score = score + links[path[t - 1], path[t]] + match[t, path[t]]
    return score


def enumerated_paths(match: Tensor, links: Tensor) -> list[tuple[tuple[int, ...], float]]:
    """List every path with its score, without those of score -inf."""
    scored = [(path, path_score(path, match, links).item()) for path in all_paths(*match.shape)]
    return [(path, score) for path, score in scored if score > IMPOSSIBLE]


def best_tokens(emissions: Tensor) -> tuple[list[int], list[float]]:
    """Return each vertex's token and its log-probability, one vertex at a time."""
    tokens = [int(row.argmax()) for row in emissions]
    tokens[-1] = EOS
    tokens[0] = BOS
    return tokens, [emissions[j, token].item() for j, token in enumerate(tokens)]


def greedy_path(links: Tensor, gains: list[float], weight: float) -> tuple[int, ...]:
    """Return the path that always takes the jump of the highest score: its own and `weight` times its vertex's gain."""
    size, path = len(links), [0]
    while path[-1] < size - 1:
        after = [(links[path[-1], j].item() + weight * gains[j], j) for j in range(path[-1] + 1, size)]
        top, vertex = max(after)
        path.append(vertex if top > IMPOSSIBLE else size - 1)
    return tuple(path)


def viterbi_path(links: Tensor, gains: list[float], penalty: float) -> tuple[int, ...]:
    """Return the path of the highest sum of links and gains, divided by the `penalty`-th power of its length."""
    jumps, last = links.tolist(), len(links) - 1
    paths, ended = {0: (gains[0], (0,))}, []  # end -> score and best path, of one length after another
    while paths:
        if last in paths:
            score, path = paths[last]
            ended.append((score / len(path) ** penalty, path))
        paths = {
            j: max((score + jumps[i][j] + gains[j], (*path, j)) for i, (score, path) in paths.items() if i < j)
            for j in range(min(paths) + 1, last + 1)
        }
    return max(ended)[1]


INF = torch.inf


def random_graph(
    batch: int, tokens: int, size: int, seed: int = 0, *, scale: float = 1.0, holes: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw match (B, M, L) and links (B, L, L), normalised, float64, and the lengths (B,) of texts and graphs. Sample 0
    has the greatest lengths. holes: share of scores that become -inf."""
    generator = torch.Generator().manual_seed(seed)
    match = (scale * torch.randn(batch, tokens, size, generator=generator, dtype=torch.float64)).log_softmax(1)
    links = scale * torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    forward = torch.ones(size, size, dtype=torch.bool).triu(1)
    links = links.masked_fill(~forward, -INF).log_softmax(2).masked_fill(~forward, -INF)
    match = match.masked_fill(torch.rand(match.shape, generator=generator) < holes, -INF)
    links = links.masked_fill(torch.rand(links.shape, generator=generator) < holes, -INF)
    target_lengths = torch.randint(1, tokens + 1, (batch,), generator=generator)
    graph_lengths = torch.randint(1, size + 1, (batch,), generator=generator)
    target_lengths[0], graph_lengths[0] = tokens, size
    return match, links, target_lengths, graph_lengths
