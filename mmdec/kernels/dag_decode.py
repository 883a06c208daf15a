"""Decodes a lattice of emissions and links to one path: greedy, lookahead, Viterbi and Joint-Viterbi.

A path A starts on vertex 0, jumps forward, and ends on the graph's last vertex; each vertex on it emits one token. With
s_j = max_y log P(y | v_j), the strategies are (DA-Transformer, section 3.3; Viterbi decoding, Shao et al. 2022):

greedy         from v_i jump to argmax_j log E_ij
lookahead      from v_i jump to argmax_j log E_ij + weight * s_j
viterbi        argmax over lengths t of max_A log P(A | X) / t^penalty
joint-viterbi  argmax over lengths t of max_{A, Y} log P(A, Y | X) / t^penalty

The length t counts all vertices of the path, and log P(A, Y | X) includes the emissions of all these vertices. Training
puts <s> on the first vertex and </s> on the last, so these tokens are fixed, with s_j = log P(bos | v_0) and
log P(eos | v_last). Scores are negative, so a larger penalty favours longer paths; 0 gives the most probable path.

Each call synchronises with the device twice, never in a loop.
"""

from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from mmdec.errors import InputError
from mmdec.kernels.dag import NEG_INF, check_lengths, check_links, forward_links, mask_impossible_

LatticeStrategy = Literal["greedy", "lookahead", "viterbi", "joint-viterbi"]


@dataclass(frozen=True)
class LatticePath:
    """One path for each sample. K is the number of vertices on the longest path of the batch."""

    tokens: Tensor  # (B, K) int64, token ids; -1 beyond the path
    vertices: Tensor  # (B, K) int64, increasing, -1 beyond the path
    lengths: Tensor  # (B,) int64, number of vertices on the path after collapsing, at least 1
    scores: Tensor  # (B,) log P(A, Y | X) before collapsing, for every strategy
    # (B,) the text's score in a beam search, which sums over all of its paths; None: no beam search
    beams: Tensor | None = None

    def select(self, rows: Tensor) -> "LatticePath":
        """Return the paths with these row numbers (N,), in that order."""
        beams = None if self.beams is None else self.beams[rows]
        return LatticePath(self.tokens[rows], self.vertices[rows], self.lengths[rows], self.scores[rows], beams)


@final
@dataclass(frozen=True)
class PathOptions:
    """Options of the path search: weights, maximum length and end tokens."""

    lookahead_weight: float = 1.0  # factor on the log-probability of the next vertex's best token in "lookahead"
    # in the Viterbi strategies, the score is divided by the path's number of vertices to this power
    length_penalty: float = 1.0
    # maximum number of vertices of a path in the Viterbi strategies; time and memory grow with it
    max_length: int | None = None
    # Keep one vertex of each run of equal tokens: the earliest, or the last one if the run ends the path. The first and
    # the last vertex always stay. This is the paper's rule; it also deletes real repetitions.
    collapse: bool = False
    # tokens of the first and the last vertex; None: their most probable token; a graph of one vertex emits bos
    bos: int | None = 0
    eos: int | None = 2


def decode_lattice(
    emissions: Tensor,
    links: Tensor,
    graph_lengths: Tensor,
    strategy: LatticeStrategy = "lookahead",
    **options: Any,
) -> LatticePath:
    """Decode each graph to one path.

    Padding is never read.

    Args:
        emissions: (B, L, V) log-probabilities.
        links: (B, L, L) log-probabilities.
        graph_lengths: (B,), numbers of vertices.
        strategy: "greedy", "lookahead", "viterbi" or "joint-viterbi"; the module's docstring has their formulas.
        options: Fields of `PathOptions`.

    Returns:
        A `LatticePath`. If a path reaches a vertex without a possible jump, it continues at the last vertex, with a
        score of -inf.
    """
    settings = PathOptions(**options)
    size = _check_arguments(emissions, links, strategy, settings)
    ends = check_lengths("graph_lengths", graph_lengths, emissions.size(0), size, emissions.device) - 1
    emissions = emissions.detach().to(torch.promote_types(emissions.dtype, torch.float32))
    links = links.detach().to(emissions.dtype)
    best, choices = _best_tokens(emissions, ends, settings.bos, settings.eos)
    if strategy in ("greedy", "lookahead"):
        weight = settings.lookahead_weight if strategy == "lookahead" else 0.0
        vertices, lengths = _walk(links, best, ends, weight)
    else:
        gains = best if strategy == "joint-viterbi" else torch.zeros_like(best)
        possible = forward_links(links, ends + 1)
        vertices, lengths = _viterbi(
            possible, gains, ends, settings.length_penalty, min(size, settings.max_length or size)
        )
    inside = torch.arange(vertices.size(1), device=vertices.device) < lengths[:, None]  # shape (B, K)
    scores = _scores(links, best, vertices, inside)
    tokens = choices.gather(1, vertices)
    if settings.collapse:
        tokens, vertices, lengths, inside = _collapse(tokens, vertices, lengths, inside)
    return LatticePath(tokens.masked_fill(~inside, -1), vertices.masked_fill(~inside, -1), lengths, scores)


def _best_tokens(emissions: Tensor, ends: Tensor, bos: int | None, eos: int | None) -> tuple[Tensor, Tensor]:
    """Return each vertex's best token and its log-probability s_j, both (B, L).

    Args:
        emissions: (B, L, V).
        ends: (B,) index of the last vertex.
        bos, eos: Fixed tokens of the first and the last vertex; None: not fixed.
    """
    best, choices = emissions.max(2)
    row = torch.arange(len(ends), device=ends.device)
    if eos is not None:
        best[row, ends], choices[row, ends] = emissions[row, ends, eos], eos
    if bos is not None:
        best[:, 0], choices[:, 0] = emissions[:, 0, bos], bos
    padding = torch.arange(best.size(1), device=ends.device) > ends[:, None]
    return best.masked_fill(padding, 0.0), choices


def _walk(links: Tensor, best: Tensor, ends: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Follow the best jump from each vertex, from the first vertex to the last.

    The best jump of all vertices is computed at once. Then the known path doubles in each step: from its first 2^k
    vertices, and the table of all jumps over 2^k vertices. So L vertices take log2(L) gathers, without synchronising
    with the device.

    Args:
        links: (B, L, L).
        best: (B, L), log-probability of each vertex's best token.
        ends: (B,) index of the last vertex.
        weight: Factor on `best`.

    Returns:
        Vertices (B, K) and lengths (B,).
    """
    favourite = links.clone() if weight == 0.0 else links + weight * best[:, None, :]  # shape (B, L, L)
    top, jump = mask_impossible_(favourite, ends + 1).max(2)
    # vertices without a possible jump go to the last vertex, so that every path ends there
    jump = torch.where(top == NEG_INF, ends[:, None], jump)  # shape (B, L)
    vertices = torch.zeros_like(jump[:, :1])
    while vertices.size(1) < links.size(1):
        vertices = torch.cat([vertices, jump.gather(1, vertices)], 1)
        jump = jump.gather(1, jump)
    lengths = (vertices < ends[:, None]).sum(1) + 1
    return vertices[:, : int(lengths.max())], lengths


def _viterbi(links: Tensor, gains: Tensor, ends: Tensor, penalty: float, longest: int) -> tuple[Tensor, Tensor]:
    """Find the path with the highest score / length ** penalty.

    It finds the best path of each length, then the best length. Only the scores (longest, B, L) are stored; the
    predecessors of the vertices on the path are computed again when it is traced back.

    Args:
        links: (B, L, L).
        gains: (B, L), score for visiting each vertex.
        ends: (B,) index of the last vertex.
        longest: Maximum number of vertices on a path.

    Returns:
        Vertices (B, K) and lengths (B,).
    """
    batch, size = gains.shape
    row = torch.arange(batch, device=links.device)
    sources = links.transpose(1, 2).contiguous()  # (B, L, L), [j, i]
    table = links.new_full((longest, batch, size), NEG_INF)
    table[0, :, 0] = gains[:, 0]
    for t in range(1, longest):
        # each jump leads to a later vertex, so t jumps end on vertex t or later
        scores = sources[:, t:, t - 1 :] + table[t - 1, :, None, t - 1 :]
        table[t, :, t:] = scores.amax(2) + gains[:, t:]
    finals = table[:, row, ends].t()  # shape (B, longest)
    count = torch.arange(1, longest + 1, device=links.device)
    top, chosen = (finals / count.to(finals.dtype) ** penalty).max(1)
    stranded = top == NEG_INF  # no path reaches the last vertex: jump to it from the first vertex
    lengths = torch.where(stranded, (ends + 1).clamp(max=2), chosen + 1)

    width = int(lengths.max())
    vertices = ends[:, None].expand(batch, width).clone()
    vertex = ends
    for t in range(width - 1, 0, -1):
        before = (table[t - 1] + sources[row, vertex]).argmax(1)
        vertex = torch.where(lengths > t, before, vertex)
        vertices[:, t - 1] = vertex
    return torch.where(stranded[:, None] & (vertices < ends[:, None]), 0, vertices), lengths


def _scores(links: Tensor, best: Tensor, vertices: Tensor, inside: Tensor) -> Tensor:
    """Return log P(A, Y | X) (B,): the sum of the log-probabilities of the path's emissions and jumps.

    Args:
        best: (B, L), log-probability of the token that each vertex emits.
        vertices: (B, K).
        inside: (B, K) bool, False beyond the path.
    """
    emitted = best.gather(1, vertices).masked_fill(~inside, 0.0).sum(1)
    row = torch.arange(len(links), device=links.device)[:, None]
    jumps = links[row, vertices[:, :-1], vertices[:, 1:]].masked_fill(~inside[:, 1:], 0.0).sum(1)
    return emitted + jumps


def _collapse(
    tokens: Tensor, vertices: Tensor, lengths: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep one vertex of each run of equal tokens, and move the kept vertices to the left; K does not change.

    Args:
        tokens, vertices: (B, K).
        lengths: (B,).
        inside: (B, K) bool, False beyond the path.

    Returns:
        These four tensors for the new paths.
    """
    last = (lengths - 1)[:, None]  # shape (B, 1)
    keep = inside.clone()
    keep[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
    # of the run that ends the path, the last vertex is kept instead, because a path must end on the graph's last vertex
    differs = inside & (tokens != tokens.gather(1, last))
    later = differs.flip(1).cumsum(1).flip(1)  # number of tokens from here on that differ from the last one
    keep &= later > 0
    keep.scatter_(1, last, True)
    keep[:, 0] = True
    width = tokens.size(1)
    columns = torch.where(keep, keep.cumsum(1) - 1, width)  # tokens that are not kept go to an extra column, `width`
    spare = tokens.new_zeros(len(tokens), width + 1)
    lengths = keep.sum(1)
    inside = torch.arange(width, device=tokens.device) < lengths[:, None]
    return (
        spare.scatter(1, columns, tokens)[:, :width],
        spare.scatter(1, columns, vertices)[:, :width],
        lengths,
        inside,
    )


def _check_arguments(emissions: Tensor, links: Tensor, strategy: str, settings: PathOptions) -> int:
    """Check all arguments except the lengths.

    Args:
        settings: The options.

    Returns:
        L, the number of vertices.
    """
    if strategy not in get_args(LatticeStrategy):
        strategies = ", ".join(f'"{name}"' for name in get_args(LatticeStrategy))
        raise InputError(f'`strategy` must be one of {strategies}, but is {strategy!r}. The default is "lookahead".')
    if emissions.dim() != 3 or 0 in emissions.shape or not emissions.is_floating_point():
        raise InputError(
            f"`emissions` must be floating-point log-probabilities (B, L, V), but is {emissions.dtype} of shape "
            f"{tuple(emissions.shape)}. Give a single lattice a batch of one."
        )
    batch, size, vocabulary = emissions.shape
    check_links(links, batch, size)
    for name, value in (("lookahead_weight", settings.lookahead_weight), ("length_penalty", settings.length_penalty)):
        if not 0.0 <= value < float("inf"):
            raise InputError(f"`{name}` must be at least 0 and finite, but is {value}. The default is 1.0.")
    if settings.max_length is not None and settings.max_length < 2:
        raise InputError(
            f"`max_length` must be at least 2 vertices, but is {settings.max_length}. Leave it out for no limit."
        )
    for name, token in (("bos", settings.bos), ("eos", settings.eos)):
        if token is not None and not 0 <= token < vocabulary:
            raise InputError(
                f"`{name}` must be a token below {vocabulary}, but is {token}. Pass None if the vertex is free."
            )
    return size
