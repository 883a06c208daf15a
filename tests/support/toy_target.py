"""For tests of decoding: a target whose logits are in a table, drafters that follow a function, and plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from mmdec.core.budget import DraftBudget, FixedBudget, RoundCosts
from mmdec.core.loop import decode
from mmdec.core.sampling import Criterion, Processor, Sequences, Stop
from mmdec.core.tree import trees_from_lists
from mmdec.core.verify import MatchRule, RowTree, Rule
from mmdec.types import Context, Draft, Drafter, Needs, Plan, PrefillOutput, Round, Scores, Target, Verdict

ROWS = 1009  # rows of the table; a prime number, for the hash
Tree = tuple[list[int], list[int]]  # tokens of nodes 1, 2, ..., and their parents


@dataclass
class Session:
    """The state of a run."""

    rows: list[list[int]]  # each row's tokens in the cache, without padding
    draft: Draft | None = None  # the last draft that was scored


class Toy:
    """A target that looks logits up by a hash of the whole prefix, so that they depend on every token before."""

    name = "toy"
    hidden_size = 1
    device = torch.device("cpu")

    def __init__(self, vocab: int, seed: int = 0, scale: float = 2.0, ties: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = scale * torch.randn(ROWS, vocab, generator=generator)
        self.vocab_size, self.table = vocab, table.round() if ties else table

    @staticmethod
    def _hash(prefix: Sequence[int], start: int = 7) -> int:
        for token in prefix:
            start = (31 * start + token + 1) % ROWS
        return start

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """Return the logits (V,) of the token after a prefix."""
        return self.table[self._hash(prefix)]

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[Session]:
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        session = Session([row[keep].tolist() for row, keep in zip(ids, mask, strict=True)])
        logits = torch.stack([self.logits(row) for row in session.rows])[:, None]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        context = Context(ids, mask, positions[None], mask.sum(1))
        draft = Draft(ids[:, -1:], torch.full_like(ids[:, -1:], -1), torch.ones(len(ids), dtype=torch.long))
        return PrefillOutput(session, context, draft, Scores(logits))

    def score(self, session: Session, draft: Draft) -> Scores:
        assert len(draft.tokens) == len(session.rows)
        logits = torch.full((*draft.tokens.shape, self.vocab_size), torch.nan)  # so that the use of padding shows
        for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
            hashes: list[int] = []
            for node in range(int(draft.size[row])):
                above = hashes[parents[node]] if node else self._hash(session.rows[row])
                hashes.append(self._hash([tokens[node]], above))
            logits[row, : len(hashes)] = self.table[hashes]
        session.draft = draft
        return Scores(logits)

    def commit(self, session: Session, verdict: Verdict) -> None:
        if session.draft is None:  # the prompt's round
            assert (verdict.path == 0).all()
            return
        for row, nodes in enumerate(verdict.path.tolist()):
            path = [node for node in nodes if node >= 0]
            parents = session.draft.parents[row].tolist()
            assert path[0] == 0
            assert [parents[node] for node in path[1:]] == path[:-1]
            tokens = session.draft.tokens[row, path].tolist()
            session.rows[row] += tokens
            if not verdict.done[row]:
                assert verdict.tokens[row, : verdict.lengths[row]].tolist() == [*tokens[1:], int(verdict.next[row])]

    def select(self, session: Session, live: Tensor) -> None:
        session.rows = [session.rows[row] for row in live.tolist()]
        session.draft = None


@dataclass
class Memory:
    rows: list[list[int]]  # each row's text, with the root of the next draft
    random: Random
    calls: int = 0


class Scripted:
    """Drafts the tree that a function of (text, plan, random) returns for each row. It asserts that its rows' texts are
    complete."""

    name = "scripted"
    needs = Needs()

    def __init__(self, tree: Callable[[list[int], Plan, Random], Tree], seed: int = 0) -> None:
        self.tree, self.seed = tree, seed

    def check(self, target: Target) -> None:
        pass

    def start(self, context: Context) -> Memory:
        rows = [row[keep].tolist() for row, keep in zip(context.tokens, context.mask, strict=True)]
        return Memory(rows, Random(self.seed))

    def propose(self, state: Memory, roots: Tensor, plan: Plan) -> Draft:
        assert [row[-1] for row in state.rows] == roots.tolist()
        return trees_from_lists(roots, [self.tree(row, plan, state.random) for row in state.rows])

    def update(self, state: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, tokens in enumerate(verdict.tokens.tolist()):
            state.rows[row] += tokens[: int(verdict.lengths[row])]

    def select(self, state: Memory, live: Tensor) -> None:
        state.rows = [state.rows[row] for row in live.tolist()]


def target_drafts(target: Toy) -> Callable[[list[int], Plan, Random], Tree]:
    """Make a function that drafts the target's greedy continuation as a chain."""

    def tree(row: list[int], plan: Plan, random: Random) -> Tree:
        tokens: list[int] = []
        for _ in range(min(plan.nodes, plan.depth)):
            tokens.append(int(target.logits([*row, *tokens]).argmax()))
        return tokens, list(range(len(tokens)))

    return tree


def rejected_drafts(target: Toy) -> Callable[[list[int], Plan, Random], Tree]:
    """Make a function that drafts a chain of the least probable tokens."""

    def tree(row: list[int], plan: Plan, random: Random) -> Tree:
        tokens: list[int] = []
        for _ in range(plan.depth):
            tokens.append(int(target.logits([*row, *tokens]).argmin()))
        return tokens, list(range(len(tokens)))

    return tree


def random_tree_drafts(target: Toy, favourite: Sequence[int] = ()) -> Callable[[list[int], Plan, Random], Tree]:
    """Make a function that drafts a random tree. Each node has a random parent, and a likely token, one of `favourite`
    or any. Siblings may be equal, and there may be more or fewer nodes than the plan has."""

    def tree(row: list[int], plan: Plan, random: Random) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        prefixes = [row]
        for _ in range(random.choice([0, 1, plan.nodes, plan.nodes, plan.nodes + 3])):
            parent = random.choice([len(tokens), random.randrange(len(tokens) + 1)])
            kind = random.random()
            if kind < 0.7:
                best = target.logits(prefixes[parent]).topk(min(2, target.vocab_size)).indices.tolist()
                token = best[0] if kind < 0.5 else best[-1]
            else:
                token = (
                    random.choice(list(favourite)) if favourite and kind < 0.85 else random.randrange(target.vocab_size)
                )
            tokens.append(token)
            parents.append(parent)
            prefixes.append([*prefixes[parent], token])
        return tokens, parents

    return tree


class AlwaysAccept(MatchRule):
    """A wrong rule that accepts every first child. Tests must detect it."""

    def walk(self, tree: RowTree, sequences: Sequences) -> tuple[list[int], bool]:
        path: list[int] = []
        node = 0
        while tree.children[node]:
            node = tree.children[node][0]
            path.append(node)
            if sequences.append(tree.row, tree.tokens[node]):
                return path[:-1], True
        token = self.choice(sequences.processed_logits(tree.row, tree.logits[node]), sequences, tree.row)
        return path, sequences.append(tree.row, token)


@dataclass
class RandomBudget:
    """A budget that gives another random plan each round, also empty ones."""

    random: Random
    most: int = 9
    seen: list[list[int]] = field(default_factory=list)  # accepted nodes of each round

    def plan(self, batch: int) -> Plan:
        nodes = self.random.randrange(self.most + 1)
        threshold = self.random.choice((0.0, 0.0, 0.1, 0.9))  # it matters for chains alone
        return Plan(nodes, self.random.randint(1, nodes) if nodes else 0, threshold=threshold)

    def observe(self, costs: RoundCosts) -> None:
        assert costs.batch == len(costs.draft_sizes) == len(costs.accepted)
        assert all(0 <= count < size for count, size in zip(costs.accepted, costs.draft_sizes, strict=True))
        self.seen.append(list(costs.accepted))


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return prompts of several lengths as `generate` takes them: ids and mask (B, P), padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def run(
    target: Toy,
    prompts: Sequence[Sequence[int]],
    stop: Stop,
    rule: Rule,
    drafter: Drafter | None = None,
    budget: DraftBudget | None = None,
    processors: Sequence[Processor] = (),
) -> tuple[Sequences, list[Round]]:
    """Decode with the core. Returns the final text, and the rounds."""
    inputs = padded(prompts)
    sequences = Sequences(inputs["input_ids"], stop, processors)
    rounds = list(decode(target, inputs, sequences, rule, drafter, budget or FixedBudget(4 if drafter else 0)))
    return sequences, rounds


def plain(
    target: Toy,
    ids: Tensor,
    padding: int,
    stop: Stop,
    choose: Callable[[Tensor, int], int],
    processors: Sequence[Processor] = (),
    criteria: Sequence[Criterion] = (),
) -> list[int]:
    """Decode one row without drafts. ids: (1, P) with `padding` columns on the left. choose: (scores (1, V), index of
    the new token) -> token. Returns the new tokens."""
    tokens: list[int] = []
    while True:
        scores = target.logits(ids[0, padding:].tolist())[None].clone()
        for processor in processors:
            scores = processor(ids, scores)
        tokens.append(choose(scores, len(tokens)))
        ids = torch.cat([ids, torch.tensor([tokens[-1:]])], 1)
        ended = [bool(criterion(ids, None)) for criterion in criteria]
        if tokens[-1] in stop.eos or ids.shape[1] >= stop.max_length or any(ended):
            return tokens
