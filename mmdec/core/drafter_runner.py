"""Protects decoding from a faulty drafter: after an error or an invalid draft, decoding continues without drafts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from mmdec.checks.caller import warn_user
from mmdec.core.timing import RoundTimer
from mmdec.core.tree import depths, int_list, int_rows, root_only
from mmdec.types import Context, Draft, Drafter, Plan, Scores, Verdict

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)


class DrafterRunner:
    """Calls the drafter in one `generate` call, and holds the drafter's state of this call.

    After the drafter's first error it warns once and drafts nothing more.

    Args:
        drafter: It is started here; None: there are no drafts.
        context: What the target computed for the prompt.
        vocab_size: The target's.
        timer: Gets the drafter's time.
    """

    def __init__(self, drafter: Drafter | None, context: Context, vocab_size: int, timer: RoundTimer) -> None:
        self._drafter, self._vocab_size, self._timer = drafter, vocab_size, timer
        self._nodes_take_positions, self._needs_chains = context.nodes_take_positions, context.needs_chains
        self._state: Any = None if drafter is None else self._try(drafter.start, context)

    def propose(self, roots: Tensor, plan: Plan, room: Sequence[int]) -> Draft:
        """Return the drafter's draft below each root, checked and cut to the allowed size.

        Args:
            roots: (B,), the pending tokens.
            plan: The maximum size.
            room: How many tokens this round may add to each row, the bonus token included.

        Returns:
            A draft within the plan, in each row at most room - 1 deep; only the roots if there is no valid draft.
        """
        if self._nodes_take_positions:
            plan = replace(plan, nodes=min(plan.nodes, min(room) - 1))
        depth = min(plan.depth, max(room) - 1)
        if self._needs_chains:
            plan = replace(plan, nodes=min(plan.nodes, plan.depth))
        if self._drafter is None or plan.nodes <= 0 or depth < 1:
            return root_only(roots)
        if depth < plan.depth:
            plan = replace(plan, depth=depth, nodes=min(plan.nodes, depth) if plan.is_chain else plan.nodes)
        return self._try(self._propose_checked, self._drafter, roots, plan, room) or root_only(roots)

    def update(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Tell the drafter what was accepted of a draft, also of one that it did not make."""
        if self._drafter is not None:
            self._try(self._drafter.update, self._state, draft, scores, verdict)

    def select(self, live: Tensor) -> None:
        """Keep only the drafter's state of the rows with the indices `live` (K,) int64, in that order."""
        if self._drafter is not None:
            self._try(self._drafter.select, self._state, live)

    def _try(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        assert self._drafter is not None
        try:
            with self._timer.stage("drafter"):
                return call(*args, **kwargs)
        except Exception as error:  # a drafter may be the caller's code: any error only ends the drafting
            name = self._drafter.name
            warn_user(
                f"drafter '{name}' failed, so the rest is decoded without drafts; the output is not affected "
                f"({type(error).__name__}: {error})",
                RuntimeWarning,
            )
            logger.debug("drafter '%s' failed", name, exc_info=error)  # where it failed, for its author
            self._drafter = self._state = None
            return None

    def _propose_checked(self, drafter: Drafter, roots: Tensor, plan: Plan, room: Sequence[int]) -> Draft:
        """Ask the drafter for a draft, and cut it to the allowed size.

        Raises:
            ValueError: For a draft that the target or the verifier cannot process.
        """
        draft = drafter.propose(self._state, roots.clone(), plan)
        batch, size = draft.tokens.shape
        if batch != len(roots) or draft.parents.shape != (batch, size) or draft.size.shape != (batch,):
            raise ValueError(f"a draft of {batch} x {size} nodes for {len(roots)} rows")
        if any(part.dtype != roots.dtype or part.device != roots.device for part in _indices(draft)):
            kinds = ", ".join(f"{part.dtype} on {part.device}" for part in _indices(draft))
            raise ValueError(f"tokens, parents and sizes as {kinds} instead of {roots.dtype} on {roots.device}")
        if not bool((draft.tokens[:, 0] == roots).all()):
            raise ValueError("a root that is not the pending token")
        nodes = zip(int_rows(draft.tokens), int_rows(draft.parents), int_list(draft.size), strict=True)
        for tokens, parents, count in nodes:
            # padding nodes need a valid parent, too, because the target computes positions and masks of all nodes
            if not 1 <= count <= size or parents[0] != -1 or not all(0 <= parents[i] < i for i in range(1, size)):
                raise ValueError("a tree whose nodes do not follow their parents")
            if not all(0 <= token < self._vocab_size for token in tokens):
                raise ValueError(f"a token outside the vocabulary of {self._vocab_size}")
        if draft.probs is not None:
            shape = (batch, size, self._vocab_size)
            if draft.probs.shape != shape or draft.probs.device != roots.device:
                raise ValueError(f"probabilities of shape {tuple(draft.probs.shape)} instead of {shape}")
            lowest, highest = draft.probs.aminmax()
            if not 0 <= float(lowest) <= float(highest) < math.inf:
                raise ValueError("probabilities that are negative or not finite")
        if draft.soft is not None:
            if draft.soft.shape[:2] != (batch, size) or draft.soft.device != roots.device:
                raise ValueError(f"soft nodes of shape {tuple(draft.soft.shape)} for {batch} x {size} nodes")
            if not bool(draft.soft.isfinite().all()) or bool(draft.soft[:, 0].any()):
                raise ValueError("soft nodes that are not finite, or a root that is one")
        return draft if size == 1 else _prune(draft, plan, room, self._needs_chains)


def _indices(draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    return draft.tokens, draft.parents, draft.size


def _prune(draft: Draft, plan: Plan, room: Sequence[int], chains: bool) -> Draft:
    """Drop the nodes that exceed the plan or a row's `room`, and renumber the remaining nodes without gaps.

    `plan.depth` limits tokens, not soft nodes.

    A draft has at most room - 1 levels, because the model may have no positions for deeper nodes. If the target needs
    `chains`, each tree becomes the chain that follows the first child of each node.
    """
    parents, sizes = int_rows(draft.parents), int_list(draft.size)
    is_soft = draft.soft_nodes
    nodes_of_rows: list[list[int]] = []
    for row, limit in enumerate(room):
        nodes, last = {0: None}, 0  # nodes that stay (a dict, because sets have no order), and the last of them
        for node, depth in enumerate(depths(parents[row][: sizes[row]])):
            above = parents[row][node] == last if chains else parents[row][node] in nodes
            fits = depth < limit and (depth <= plan.depth or is_soft[row][node])
            if node and fits and len(nodes) <= plan.nodes and above:
                nodes[node] = None
                last = node
        nodes_of_rows.append(list(nodes))
    size = max(map(len, nodes_of_rows))
    if size == draft.tokens.shape[1] and all(
        len(nodes) == count for nodes, count in zip(nodes_of_rows, sizes, strict=True)
    ):
        return draft
    indices = draft.tokens.new_tensor([nodes + [0] * (size - len(nodes)) for nodes in nodes_of_rows])
    new_parents: list[list[int]] = []
    for row, nodes in enumerate(nodes_of_rows):
        new = {node: index for index, node in enumerate(nodes)}
        new_parents.append([-1, *(new[parents[row][node]] for node in nodes[1:]), *[0] * (size - len(nodes))])
    probs, soft = (
        None if part is None else part.gather(1, indices[..., None].expand(-1, -1, part.shape[2]))
        for part in (draft.probs, draft.soft)
    )
    return Draft(
        draft.tokens.gather(1, indices),
        draft.parents.new_tensor(new_parents),
        draft.size.new_tensor([len(nodes) for nodes in nodes_of_rows]),
        probs,
        soft,
    )
