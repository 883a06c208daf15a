"""A rule in 30 lines: a drafted token counts as right where it is one of the model's k best. See docs/add_a_rule.md."""

from __future__ import annotations

from dataclasses import dataclass

from mmdec.core.sampling import Sequences
from mmdec.core.verify import RowTree
from mmdec.types import Plan


@dataclass(frozen=True)
class AmongBest:
    """LOSSY for k above 1: the text is no longer the model's own. k = 1 is greedy decoding."""

    k: int = 2

    def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
        """The drafter need not draw its tokens."""
        return plan

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        """Down the row's tree. Gives the accepted nodes, and whether the row has ended."""
        path: list[int] = []
        node = 0
        while True:
            scores = sequences.processed_logits(tree.row, tree.logits[node])[0]  # (V,) after all processors
            best = scores.topk(self.k).indices.tolist()
            children = [child for child in tree.children[node] if tree.tokens[child] in best]
            token = tree.tokens[children[0]] if children else best[0]
            if sequences.append(tree.row, token):
                return path, True
            if not children:
                return path, False
            node = children[0]
            path.append(node)
