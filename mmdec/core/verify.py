"""Compares a draft tree with the target: accepts a path, chooses the next token, ends rows.

`canvas.py` does the same for the canvases of masked diffusion models.

rule       at a node                                                               the output
greedy     take the most probable token; descend where a child equals it           equals plain decoding's
sampled    draw a token as plain decoding would; descend where a child equals it   equals plain sampling's
residual   children in turn, each with probability min(1, p/q); then p <- (p-q)+   has the target's distribution
traversal  leaves in turn, each jointly with its path; then p and q of its parent  has the target's distribution
typical    the best child with p > min(eps, delta exp(-H(p))) (Medusa, 2.3.1)      LOSSY: another distribution
relaxed    residual with min(1, p/q) + b, or by groups; or a child among k draws   LOSSY: another distribution

p is the target's distribution after all logits processors, q the distribution that the child was sampled from, H the
entropy. Processors are called only at the nodes that a rule visits; traversal calls copies of them ahead of the text.
A chain is a tree of width one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

import torch
from torch import Tensor

from mmdec.checks.arguments import check_instance, check_whole, format_value
from mmdec.core.sampling import (
    Choice,
    DraftWarp,
    Processor,
    Rng,
    Sequences,
    copy_processors,
    keyed_generator,
    keyed_rng,
    most_probable,
    most_probable_each,
)
from mmdec.core.token_groups import TokenGroups
from mmdec.core.tree import int_list, int_rows
from mmdec.errors import InputError
from mmdec.types import Draft, Plan, Scores, Verdict

BuiltInRuleName = Literal["greedy", "sampled", "residual", "traversal", "typical"]
RuleName = BuiltInRuleName | str  # or a name given to `register_rule`
MAX_DRAWS = 64  # maximum of a `Relaxation`'s `draws`, each of which covers the whole vocabulary


@dataclass(frozen=True)
class RowTree:
    """The draft tree of one batch row, as lists, with the target's logits after each node."""

    row: int  # index of the row in the batch
    tokens: list[int]
    children: list[list[int]]
    logits: Tensor  # (N, V), the target's raw logits after each node
    probs: Tensor | None  # (N, V), the distributions that children were drawn from, or None if nothing was drawn
    likeliest: Callable[[], list[int]]  # each node's most probable next token; needs `Sequences.only_suppresses`

    def draft_distribution(self, node: int) -> Tensor | None:
        """Return the distribution (V,) float64 that the children of a node were sampled from.

        Zeros if the node has no children; None if the draft was not sampled.
        """
        if self.probs is None:
            return None
        return _normalise(self.probs[node].double())

    def child(self, node: int, token: int) -> int:
        """Return the index of the child of `node` that holds `token`, -1 if none does."""
        return next((child for child in self.children[node] if self.tokens[child] == token), -1)


# (token chosen after a node, index of the child that holds this token or -1)
TokenAndChild = tuple[int, int]


class Rule(Protocol):
    """Decides which drafted tokens are accepted."""

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        """Return the plan for the drafter.

        A rule that needs sampled drafts adds `Plan.warp` and a random generator; others change nothing.

        Args:
            sequences: The texts of the batch. The warp reads them when it is called.
        """
        ...

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        """Walk down one row's tree and append the new tokens to `sequences`.

        Returns:
            The accepted nodes below the root, and whether the row ended.
        """
        ...


MakeRule = TypeVar("MakeRule", bound=Callable[..., Rule])


@dataclass(frozen=True)
class RuleEntry:
    """How to make the rule of a name for one call, and in which calls it may be used."""

    make: Callable[..., Rule]  # called with the call's `SamplingState` if `draws_drafts`, else with its `Choice`
    lossless: bool  # False: the output has another distribution than the target's
    samples: bool | None = None  # True: only when sampling; False: only in greedy decoding; None: in both
    draws_drafts: bool = False  # whether drafters draw their tokens, which needs sampling
    reads_ahead: bool = False  # whether it calls copies of logits processors after tokens that are not yet accepted


RULES: dict[str, RuleEntry] = {}


def register_rule(
    name: str, *, lossless: bool, samples: bool | None = None, draws_drafts: bool = False, reads_ahead: bool = False
) -> Callable[[MakeRule], MakeRule]:
    """Register the decorated class or function under a name that `generate`, `stream` and the other calls accept.

    It is called once for each call: with a `SamplingState` if it `draws_drafts`, else with a function that chooses a
    token as plain decoding would (`mmdec.core.sampling.Choice`). A second rule of the same name replaces the first.

    Args:
        name: The value of `rule`; not that of a built-in rule.
        lossless: Whether the output has the target's own distribution.
        samples: True: the rule is for sampling; False: for greedy decoding. Default None: for both.
        draws_drafts: Whether drafters draw their tokens; True needs `samples=True`.
        reads_ahead: Whether it calls copies of logits processors after tokens that are not yet accepted.

    Raises:
        InputError: If the name is that of a built-in rule, or drafts are drawn without sampling.
    """
    if name == "relaxed" or (name in RULES and name in get_args(BuiltInRuleName)):
        raise InputError(f"`name` must not be that of a built-in rule, but is {name!r}. Choose another one.")
    if draws_drafts and not samples:
        raise InputError(f"`samples` must be True for a rule that draws drafts, but is {samples}. Set it to True.")

    def register(make: MakeRule) -> MakeRule:
        RULES[name] = RuleEntry(make, lossless, samples, draws_drafts, reads_ahead)
        return make

    return register


def verify(draft: Draft, scores: Scores, rule: Rule, sequences: Sequences) -> Verdict:
    """Accept drafted tokens by the target's logits, and append the tokens of this round to `sequences`.

    The same draft, scores, rule and sequences give the same verdict.

    Args:
        draft: B trees of N nodes.
        scores: The target's logits after each node.
        rule: The acceptance rule.
        sequences: The texts of the batch; its `live` rows are those of the draft.
    """
    tokens, parents, sizes = int_rows(draft.tokens), int_rows(draft.parents), int_list(draft.size)
    # the most probable token of every node, computed at once and only when a rule first asks for it
    likeliest = cache(lambda: most_probable_each(sequences.suppress(scores.logits)))
    paths: list[list[int]] = []
    ended: list[bool] = []
    emitted: list[list[int]] = []
    for index, row in enumerate(sequences.live):
        before = len(sequences.tokens[row])
        children: list[list[int]] = [[] for _ in range(sizes[index])]
        for node in range(1, sizes[index]):
            if not draft.soft_nodes[index][node]:
                children[parents[index][node]].append(node)
        probs = None if draft.probs is None else draft.probs[index]
        tree = RowTree(
            row, tokens[index], children, scores.logits[index], probs, lambda index=index: likeliest()[index]
        )
        path, done = rule.walk(tree, sequences)
        paths.append([0, *path])
        ended.append(done)
        emitted.append(sequences.tokens[row][before:])
    return _verdict(paths, ended, emitted, draft.tokens.device)


def _verdict(paths: list[list[int]], ended: list[bool], emitted: list[list[int]], device: torch.device) -> Verdict:
    path, text = max(map(len, paths)), max(map(len, emitted))
    numbers = [
        [*nodes, *[-1] * (path - len(nodes)), *tokens, *[-1] * (text - len(tokens)), tokens[-1], len(tokens), done]
        for nodes, tokens, done in zip(paths, emitted, ended, strict=True)
    ]
    # all numbers are copied to the device in one tensor, because each copy takes time
    table = torch.tensor(numbers, dtype=torch.long, device=device)
    return Verdict(
        path=table[:, :path],
        next=table[:, -3],
        done=table[:, -1].bool(),
        tokens=table[:, path : path + text],
        lengths=table[:, -2],
    )


@register_rule("sampled", lossless=True, samples=True)
@register_rule("greedy", lossless=True, samples=False)
@dataclass(frozen=True)
class MatchRule:
    """The rules "greedy" and "sampled": choose a token as plain decoding would, and descend to the child that holds it.

    The output is exactly that of plain decoding, not only its distribution. For drafts that were not sampled it accepts
    as many tokens as rejection sampling does.
    """

    choice: Choice = most_probable

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return plan

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        # without processors that read the text, the most probable tokens of all nodes are found at once
        best = tree.likeliest() if self.choice is most_probable and sequences.only_suppresses(tree.row) else None
        path: list[int] = []
        node = 0
        while True:
            if best is None:
                token = self.choice(sequences.processed_logits(tree.row, tree.logits[node]), sequences, tree.row)
            else:
                token = best[node]
            if sequences.append(tree.row, token):
                return path, True
            node = tree.child(node, token)
            if node < 0:
                return path, False
            path.append(node)


@dataclass
class SamplingState:
    """The randomness of one `generate` call: the seed for accepting tokens, and the drafter's own random generator."""

    seed: int
    # how the drafter's distributions follow from its logits; this does not change the distribution of the output
    warp: DraftWarp = field(default_factory=DraftWarp)
    generator: torch.Generator | None = None

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        """Return the plan with the warp of the batch's texts, and with the drafter's random generator."""
        if self.generator is None:
            self.generator = keyed_generator(sequences.prompt.device, self.seed, "draft")
        return replace(plan, warp=partial(self.warp, sequences), generator=self.generator)


def _descend(tree: RowTree, sequences: Sequences, step: Callable[[int], TokenAndChild]) -> tuple[list[int], bool]:
    """Descend the tree and append a token at each node, until the row ends or no child holds the chosen token.

    Args:
        step: Node -> (token chosen after the node, child to go to or -1).

    Returns:
        The accepted nodes below the root, and whether the row ended.
    """
    path: list[int] = []
    node = 0
    while True:
        token, node = step(node)
        if sequences.append(tree.row, token):
            return path, True
        if node < 0:
            return path, False
        path.append(node)


def residual(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, float]:
    """Return what is left of the target's distribution after a drafted token, or group of tokens, was rejected.

    Args:
        p: (V,) float64, the target's distribution, or a share of it; over groups, if a group was rejected.
        q: As `p`, the distribution that the token was drawn from, or None if it was not drawn.
        token: The rejected token or group; read only if `q` is None, when `p` loses just this entry.

    Returns:
        max(0, p - q), divided by its sum, and the sum. If p equals q up to rounding, the sum is 0 and p is returned.
    """
    left = _without(p, token) if q is None else (p - q).clamp(min=0.0)
    mass = left.sum()
    return (left / mass, float(mass)) if float(mass) > 0.0 else (p, 0.0)


def sibling_distribution(q: Tensor | None, token: int) -> Tensor | None:
    """Return the distribution that the next sibling of `token` was drawn from, given that of `token`.

    Siblings are drawn without replacement.
    """
    return None if q is None else _normalise(_without(q, token))


def _without(p: Tensor, token: int) -> Tensor:
    left = p.clone()
    left[token] = 0.0
    return left


def _normalise(q: Tensor) -> Tensor:
    """Normalise to a sum of 1. Rows of zeros stay zero."""
    return q / q.sum().clamp(min=1e-300)


@register_rule("residual", lossless=True, samples=True, draws_drafts=True)
@dataclass(frozen=True)
class ResidualRule:
    """Rejection sampling without replacement.

    If the drafter returned no probabilities, q is one-hot: a child with token x is then accepted with probability p(x).

    Args:
        tolerance: Added to the probability to accept a child (`Relaxation.tolerance`). LOSSY above 0: the output's
            distribution differs.

    References:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; trees as in Sequoia, Chen
        et al., 2024.
    """

    sampling: SamplingState
    tolerance: float = 0.0
    make_rng: Callable[..., Rng] = keyed_rng

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return self.sampling.drafting_plan(plan, sequences)

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        return _descend(tree, sequences, partial(self._try_children, tree, sequences))

    def _try_children(self, tree: RowTree, sequences: Sequences, node: int) -> TokenAndChild:
        p = _distribution(sequences, tree.row, tree.logits[node])
        rng = self.make_rng(p.device, self.sampling.seed, "residual", tree.row, len(sequences.tokens[tree.row]))
        q, left = tree.draft_distribution(node), p  # left: of p, after the rejected children
        for child in tree.children[node]:
            token = tree.tokens[child]
            draft_probability = 1.0 if q is None else float(q[token])
            if draft_probability <= 0.0:  # skip a token that an earlier sibling holds, or that has probability 0
                continue
            # a processor has excluded a token of p = 0, and no tolerance may override it
            tolerance = self.tolerance if self.tolerance and float(p[token]) > 0.0 else 0.0
            if rng.happens(float(left[token]) / draft_probability + tolerance):
                return token, child
            left, _ = residual(left, q, token)
            q = sibling_distribution(q, token)
        return rng.draw(left), -1


@register_rule("traversal", lossless=True, samples=True, draws_drafts=True, reads_ahead=True)
@dataclass(frozen=True)
class TraversalRule:
    """Traversal verification: judges whole paths, from the leaves up.

    It accepts more tokens than `ResidualRule` if the draft was sampled, and as many if not. In a chain it is block
    verification (Sun et al., ICLR 2025). A node is accepted with the same probability whatever is drafted below it.

    References:
        Weng et al., "Traversal Verification for Speculative Tree Decoding", 2025, arXiv 2505.12398.
    """

    sampling: SamplingState
    make_rng: Callable[..., Rng] = keyed_rng

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return self.sampling.drafting_plan(plan, sequences)

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        row = tree.row
        rng = self.make_rng(tree.logits.device, self.sampling.seed, "traversal", row, len(sequences.tokens[row]))
        accepted = _Traversal(tree, sequences, rng).visit(0, 1.0, [], sequences.copied_processors(row))
        assert accepted is not None  # the root's weight stays 1
        path, p = accepted
        # the row's own processors see the accepted text only, and each position once
        for index, (node, child) in enumerate(pairwise(path), 1):
            sequences.processed_logits(row, tree.logits[node])
            if sequences.append(row, tree.tokens[child]):
                return path[1:index], True
        target_probabilities = _distribution(sequences, row, tree.logits[path[-1]])
        return path[1:], sequences.append(row, rng.draw(target_probabilities if p is None else p))


@dataclass(frozen=True)
class _Traversal:
    """One row's tree while it is judged."""

    tree: RowTree
    sequences: Sequences
    rng: Rng

    def visit(
        self, node: int, weight: float, drafted: list[int], processors: list[Processor]
    ) -> tuple[list[int], Tensor | None] | None:
        """Judge the paths through a node.

        Args:
            weight: The probability to accept the path that ends at the node.
            drafted: The tokens of that path.
            processors: Copies of the row's logits processors, which have seen the text before the node's next token.

        Returns:
            The accepted path from `node` down, and the distribution of the next token, None for the target's own. None
            if no path through the node is accepted.
        """
        tree, rest = self.tree, None
        if tree.children[node] and not (node and tree.tokens[node] in self.sequences.stop.eos):
            scores = self.sequences.logits_ahead(tree.row, drafted, tree.logits[node], processors)
            p, q = scores[0].double().softmax(-1), tree.draft_distribution(node)
            for child in tree.children[node]:
                token = tree.tokens[child]
                draft_probability = 1.0 if q is None else float(q[token])
                if draft_probability <= 0.0:  # skip a token that an earlier sibling holds, or that has probability 0
                    continue
                probability = min(1.0, weight * float(p[token]) / draft_probability)
                copies = processors if child == tree.children[node][-1] else copy_processors(processors)
                below = self.visit(child, probability, [*drafted, token], copies) if probability > 0.0 else None
                if below is not None:
                    return [node, *below[0]], below[1]
                left, mass = residual(weight * p, q, token)
                q = sibling_distribution(q, token)
                if mass > 0.0:
                    p = rest = left
                    weight = mass / (mass + (1.0 - weight))
                elif weight < 1.0:
                    return None
        return ([node], rest) if self.rng.happens(weight) else None


@register_rule("typical", lossless=False)
@dataclass(frozen=True)
class TypicalRule:
    """Typical acceptance. LOSSY: the output's distribution differs.

    Accepts the most probable child if its probability exceeds min(epsilon, delta * exp(-entropy)). Else it takes the
    token that plain decoding would choose.

    References:
        Medusa, Cai et al., 2024, section 2.3.1.
    """

    choice: Choice = most_probable
    epsilon: float = 0.09
    delta: float = 0.3

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return plan

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        return _descend(tree, sequences, lambda node: self._step(tree, sequences, node))

    def _step(self, tree: RowTree, sequences: Sequences, node: int) -> TokenAndChild:
        scores = sequences.processed_logits(tree.row, tree.logits[node])
        p = scores[0].double().softmax(-1)
        entropy = float(cast(Any, torch.special).entr(p).sum())  # cast: `torch.special` is untyped
        threshold = min(self.epsilon, self.delta * math.exp(-entropy))
        child = max(tree.children[node], key=lambda child: float(p[tree.tokens[child]]), default=None)
        if child is not None and float(p[tree.tokens[child]]) > threshold:
            return tree.tokens[child], child
        token = self.choice(scores, sequences, tree.row)
        return token, tree.child(node, token)


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """What the rule "relaxed" accepts beyond the lossless ones. LOSSY: the output has another distribution.

    For tokens of speech, of which many stand for the same sound. Give it as the `rule` of a call. Exactly one of the
    arguments must be given.

    Args:
        tolerance: b from 0 to 1. A drafted token is accepted with probability min(1, p/q) + b, unless p = 0, and after
            a rejection the next one is drawn from the usual residual. Needs sampling; 0 is the rule "residual".
        draws: The target draws this many different tokens where it would draw one, and the draft is followed if one of
            them continues it; else the first one counts. In greedy decoding they are the most probable ones. 1 is the
            rule "sampled" or "greedy".
        groups: A drafted token is accepted with probability min(1, P(G)/Q(G)), where G is its group and P and Q are the
            probabilities of groups; if p = 0, another token of G is drawn by p. After a rejection a group is drawn from
            max(0, P - Q), and a token in it by p. The groups have the target's distribution, the tokens within one do
            not. Needs sampling; groups of single tokens are the rule "residual".

    Raises:
        InputError: If none or several are given, or a value is out of range.

    References:
        Tolerance: Lin et al., "Accelerating Autoregressive Speech Synthesis Inference With Speech Speculative
        Decoding", 2025, arXiv 2505.15380. Draws: after the tolerance of VADUSA, Li et al. 2024, arXiv 2410.21951.
        Groups: Yanuka et al., 2025, arXiv 2511.13732.
    """

    tolerance: float | None = None
    draws: int | None = None
    groups: TokenGroups | None = None

    def __post_init__(self) -> None:
        set_fields = [name for name, value in vars(self).items() if value is not None]
        if len(set_fields) != 1:
            raise InputError(
                "`Relaxation` must have one of `tolerance`, `draws` and `groups`, but has "
                f"{' and '.join(set_fields) or 'none'}. Give one."
            )
        if self.draws is not None:
            check_whole("draws", self.draws, 1, MAX_DRAWS, "1 is lossless.")
        elif self.groups is not None:
            check_instance("groups", self.groups, TokenGroups, "a mmdec.TokenGroups", "See `TokenGroups.from_labels`.")
        elif not isinstance(self.tolerance, (int, float)) or not 0.0 <= self.tolerance <= 1.0:
            raise InputError(f"`tolerance` must be from 0 to 1, but is {format_value(self.tolerance)}. 0 is lossless.")

    def to(self, device: torch.device) -> Relaxation:
        """Return the same relaxation with its groups on another device."""
        return self if self.groups is None else replace(self, groups=self.groups.to(device))

    @property
    def entry(self) -> RuleEntry:
        """How to make the rule that accepts this."""
        if self.draws is not None:
            return RuleEntry(partial(DrawsRule, self.draws), lossless=False)
        make: Callable[..., Rule]
        if self.groups is not None:
            make = partial(GroupRule, self.groups)
        else:
            make = partial(ResidualRule, tolerance=cast(float, self.tolerance))
        return RuleEntry(make, lossless=False, samples=True, draws_drafts=True)


@dataclass(frozen=True)
class GroupRule:
    """Accepts a drafted token by the probabilities of its group (`Relaxation.groups`). LOSSY: another distribution."""

    groups: TokenGroups
    sampling: SamplingState
    make_rng: Callable[..., Rng] = keyed_rng

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return self.sampling.drafting_plan(plan, sequences)

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        return _descend(tree, sequences, partial(self._try_children, tree, sequences))

    def _try_children(self, tree: RowTree, sequences: Sequences, node: int) -> TokenAndChild:
        groups = self.groups
        p = _distribution(sequences, tree.row, tree.logits[node])
        rng = self.make_rng(p.device, self.sampling.seed, "residual", tree.row, len(sequences.tokens[tree.row]))
        q = tree.draft_distribution(node)
        left = groups.group_probs(p)  # of the target's group probabilities, after the rejected children
        for child in tree.children[node]:
            token = tree.tokens[child]
            if q is not None and float(q[token]) <= 0.0:  # an earlier sibling holds the token
                continue
            group = groups.draw(token, rng)
            drafted = groups.group_probs(_one_hot(p, token) if q is None else q)
            if rng.happens(float(left[group]) / float(drafted[group])):
                if float(p[token]) > 0.0:
                    return token, child
                # a processor excluded the token, so another one of the group is drawn
                token = rng.draw(groups.token_probs(_one_hot(p, group), p))
                return token, tree.child(node, token)
            left, _ = residual(left, drafted, group)
            q = sibling_distribution(q, token)
        return rng.draw(groups.token_probs(left, p)), -1


@dataclass(frozen=True)
class DrawsRule:
    """Descends where a child is among several of the target's draws (`Relaxation.draws`). LOSSY: another distribution.

    Args:
        draws: Number of different tokens that the target draws at a node.
        choice: Chooses a token as plain decoding would.
    """

    draws: int
    choice: Choice = most_probable

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        return plan

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        return _descend(tree, sequences, partial(self._step, tree, sequences))

    def _step(self, tree: RowTree, sequences: Sequences, node: int) -> TokenAndChild:
        scores = sequences.processed_logits(tree.row, tree.logits[node])
        first: int | None = None
        for _ in range(self.draws):
            token = self.choice(scores, sequences, tree.row)
            child = tree.child(node, token)
            if child >= 0:
                return token, child
            first = token if first is None else first
            # without replacement; seeded draws keep their noise, so that this is the Gumbel-top-k trick
            scores = scores.index_fill(-1, torch.tensor([token], device=scores.device), -torch.inf)
            if not tree.children[node] or not scores.isfinite().any():
                break
        assert first is not None
        return first, -1


def _distribution(sequences: Sequences, row: int, logits: Tensor) -> Tensor:
    """Compute the next token's distribution from its raw logits (V,), after the row's logits processors.

    Returns:
        (V,) float64.
    """
    return sequences.processed_logits(row, logits)[0].double().softmax(-1)


def _one_hot(p: Tensor, token: int) -> Tensor:
    chosen = torch.zeros_like(p)
    chosen[token] = 1.0
    return chosen
