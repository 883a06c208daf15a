"""Tiny draft networks, and references that recompute from scratch what a drafter must propose."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import MatchRule
from mmdec.drafters.dflash.network import DFlash
from mmdec.drafters.flash.drafter import FlashDrafter
from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.heads.network import Heads
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.kv_cache import DraftState
from mmdec.drafters.networks.training.teacher import TargetFeatures
from mmdec.drafters.networks.training.unroll import unroll_inputs, unroll_steps
from mmdec.drafters.registry import network_class
from mmdec.drafters.wrapper import ForwardingDrafter
from mmdec.targets.text import TextTarget
from mmdec.types import Context, Draft, Plan, Round, Scores, Verdict
from tests.support.naive_dflash import naive_block, naive_head
from tests.support.naive_heads import naive_heads
from tests.support.toy_target import padded

Path = tuple[int, ...]
BLOCK: dict[str, Any] = {"block_size": 5, "mask_token": 3, "num_hidden_layers": 2}
FORMS_OF: dict[str, dict[str, dict[str, Any]]] = {  # system -> name -> settings of its network
    "eagle3": {
        "plain": {},
        "part": {"draft_vocab_size": 40, "norm_output": True, "fc_norm": True},
        "layers": {"num_hidden_layers": 3, "norm_before_residual": True, "qk_norm": True},
        "parallel": {"mask_token": 3, "num_hidden_layers": 2},
        "parallel-part": {"mask_token": 3, "draft_vocab_size": 40, "norm_before_fc": True},
        "two": {"layers": (3, 0), "features": 2, "own_embedding": True},
    },
    "dflash": {
        "plain": BLOCK,
        "one-layer": {**BLOCK, "num_hidden_layers": 1, "block_size": 2},
        "part": {**BLOCK, "draft_vocab_size": 40, "own_head": True, "own_embedding": True},
        "anchor": {**BLOCK, "from_anchor": True, "layers": (3, -1, 0)},
        "bias": {**BLOCK, "attention_bias": True, "num_hidden_layers": 3},
        "vanilla": {**BLOCK, "head": "vanilla", "head_rank": 6, "from_anchor": True},
        "confident": {
            **BLOCK,
            "head": "gated",
            "head_rank": 6,
            "confidence": True,
            "draft_vocab_size": 40,
            "own_head": True,
        },
        "rnn": {**BLOCK, "head": "rnn", "head_rank": 6, "confidence": True, "confidence_reads_token": False},
        "rnn-anchor": {**BLOCK, "head": "rnn", "head_rank": 6, "from_anchor": True, "confidence": True},
        "dflash2": {**BLOCK, "head": "dflash2", "head_rank": 6, "head_candidates": 4, "convolution_group": 8},
        "domino": {**BLOCK, "head": "domino", "head_rank": 6, "head_state": 10, "plain_prefix": 1, "from_anchor": True},
    },
    "heads": {
        "plain": {"blocks": 2},  # Hydra
        "medusa": {"kind": "medusa", "heads": 3, "lm_heads": "each"},
        "amphista": {"kind": "medusa", "attention": True, "prefix_layer": True, "heads": 4},
        "hydra++": {"prefix_layer": True, "blocks": 2, "lm_heads": "each", "lm_head_bias": True},
        "cerberus": {"previous_head": True, "heads": 3},
        "redrafter": {"kind": "recurrent", "lm_heads": "one", "blocks": 2},
        "redrafter-narrow": {"kind": "recurrent", "inner_size": 32, "prefix_layer": True},
        "redrafter-sum": {"kind": "recurrent", "inner_size": 32, "summed": True},
        "mlp": {"kind": "mlp", "inner_size": 24, "lm_heads": "each", "heads": 3},
        "mlp-tied": {"kind": "mlp", "tied": True, "scale_input": True, "lm_heads": "one", "heads": 4},
    },
}


def draft_network(system: str, model: Any, seed: int = 0, **changes: Any) -> DraftNetwork:
    """Build a draft network with random weights for a model, in the model's precision."""
    kind = network_class(system)
    torch.manual_seed(seed)
    network = kind(kind.config_class.like(model.config.get_text_config(decoder=True), **changes))
    for weight in network.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.3)  # large enough to keep scores apart
    return network.to(model.device, model.dtype).eval()


def tree_growing(system: str, model: Any, seed: int = 0, width: int = 10, **changes: Any) -> Any:
    """Build a drafter with random weights: `NetworkDrafter`, or `FlashDrafter`."""
    network = draft_network(system, model, seed, **changes)
    kind: Any = FlashDrafter if isinstance(network, FlashNetwork) else NetworkDrafter
    return kind(network, model.get_input_embeddings(), model.get_output_embeddings(), width)


def scatter_vocabulary(drafter: Any) -> Any:
    """Let a drafter of a part of the vocabulary draft other tokens than the first."""
    if drafter.network.draft_vocabulary.offsets is not None:
        ids = torch.arange(40) + torch.arange(40).div(2, rounding_mode="floor")
        drafter.network.d2t.copy_(ids - torch.arange(40))
    return drafter


def overfitted(system: str, model: Any, text: Tensor, steps: int = 80) -> NetworkDrafter:
    """Train a drafter to predict one text (1, T), three tokens ahead."""
    kind = network_class(system)
    torch.manual_seed(0)
    network = kind(kind.config_class.like(model.config))
    drafter = NetworkDrafter(network, model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        features = model(text, output_hidden_states=True).hidden_states[-1][0]
        embeds = model.get_input_embeddings()(text)[0]
        expected = model.get_output_embeddings()(features).argmax(-1)[2:]
        context = TextTarget(model).prefill({"input_ids": text}, drafter.needs).context
    visual = torch.zeros(len(features), dtype=torch.bool)
    read = torch.cat([context.features[layer][0] for layer in drafter.needs.layers], -1)
    reading = TargetFeatures(2, [*text[0, 2:].tolist(), int(expected[-1])], embeds, read, visual)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for step, hidden in enumerate(unroll_steps(network, unroll_inputs(network, [reading]), 3)):
            loss = loss + nn.functional.cross_entropy(drafter.logits(hidden)[0], expected[step:])
            if system != "eagle3":  # its states need not resemble the target's
                loss = loss + nn.functional.smooth_l1_loss(hidden[0], features[2 + step :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def from_scratch(drafter: Any, context: Context, features: Tensor, text: list[int], path: Path) -> Tensor:
    """Compute the draft network's log-probabilities (V,) of the token after `text` and then `path`, without a cache.

    features: (T, H), the target's, of all tokens of `text` but the last.
    """
    network, embedding = drafter.network, drafter.embedding
    with torch.inference_mode():
        embeds = embedding(torch.tensor(text))
        visual = torch.zeros(len(text), dtype=torch.bool)
        if context.embeds is not None and context.media is not None:
            given = context.mask[0].nonzero()[:, 0]
            embeds[: len(given)], visual[: len(given)] = context.embeds[0, given], context.visual[0, given]
        prompt = network.prompt(embeds, torch.cat([features, features[-1:]]), visual)
        states, positions = prompt.states[None], prompt.positions
        if isinstance(network, FlashNetwork):
            return drafter.logits(_slot(network, embedding, states, positions, features[-1], path)).log_softmax(-1)
        if isinstance(network, Heads):
            hidden = network.norm(network(states, positions[None])[0]) if network.layers else states
            own, root = dict(network.state_dict()), [text[-1], *path]
            scores = naive_heads(own, network.config, hidden[0, -1], root, embedding.weight, drafter.output.weight)
            return scores.log_softmax(-1)
        mask = getattr(network.config, "mask_token", None)
        for index, token in enumerate(path):
            hidden, _ = network(states, positions[None])
            if mask is None:
                conditioned = network.condition_on(prompt.condition)
                drafted = conditioned.fuse_drafted(embedding(torch.tensor([[token]])), hidden[:, -1:])
            else:
                drafted = network.masked_input(embedding(torch.tensor(mask)))[None, None]
            states = torch.cat([states, drafted], 1)
            positions = torch.cat([positions, torch.tensor([len(text) - 1 + index])])
        hidden, _ = network(states, positions[None])
        return network.draft_vocabulary.target_logits(drafter.logits(hidden[0, -1])).log_softmax(-1)


class NaiveBlock:
    """DFlash's draft after a root, with or without a sequential head, by `naive_block` and `naive_head`.

    features: (T, k * H) of all tokens before the root.
    """

    def __init__(self, drafter: Any, features: Tensor, root: int) -> None:
        self.drafter, self.network, self.root = drafter, drafter.network, root
        config = self.network.config
        block = drafter.embedding(torch.tensor([root, *[config.mask_token] * (config.block_size - 1)]))
        self.options = {"heads": config.num_attention_heads, "dim": config.head_dim, "layers": config.num_hidden_layers}
        self.options |= {"eps": config.rms_norm_eps, "theta": config.rope_theta, "anchor": config.from_anchor}
        self.options |= {"candidates": config.head_candidates, "plain_prefix": config.plain_prefix}
        self.state = dict(self.network.state_dict())
        self.normed = naive_block(self.state, self.options, block, features)

    def logits(self, path: Path) -> tuple[Tensor, Tensor | None]:
        """Return the logits (D,) of the token after the path below the root, and the confidence in it."""
        config = self.network.config
        head = self.network.lm_head.weight if config.own_head else self.drafter.output.weight
        text = [self.root, *path]
        return naive_head(self.state, self.options, self.normed, text, self.drafter.embedding.weight, head)

    def score(self, path: Path) -> Tensor:
        """Return the log-probabilities (V,) of the token after the path below the root."""
        return self.network.draft_vocabulary.target_logits(self.logits(path)[0]).log_softmax(-1)

    def probability(self, path: Path) -> float:
        """Return the estimated probability that the likeliest token after the path is accepted."""
        logits, confidence = self.logits(path)
        return float(logits.softmax(-1).max() if confidence is None else confidence)


def dflash_scores(drafter: Any, features: Tensor, root: int) -> Tensor:
    """Compute the log-probabilities (K, V) of all K depths of the draft of a DFlash without a head."""
    block = NaiveBlock(drafter, features, root)
    return torch.stack([block.score((0,) * depth) for depth in range(drafter.network.config.drafts)])


def blocks_tree(score: Any, width: int, nodes: int, depth: int) -> set[Path]:
    """Return the paths of DFlash's or P-EAGLE's tree below the root, by brute force: the `nodes` likeliest of all
    paths of the `width` best tokens of each depth. score: as for `eagles_tree`; only the path's length matters."""
    if nodes <= depth:
        return eagles_tree(score, width, nodes, depth)
    result: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(0.0, ())]
    for place in range(depth):
        best = score((0,) * place).topk(min(width, nodes))
        pairs = list(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        level = [(value + v, (*path, t)) for value, path in level for v, t in pairs]
        level = sorted(level, key=lambda item: -item[0])[:nodes]
        result += level
    return {path for value, path in sorted(result, key=lambda item: -item[0])[:nodes] if value > -math.inf}


def _slot(
    network: FlashNetwork, embedding: Any, states: Tensor, positions: Tensor, feature: Tensor, path: Path
) -> Tensor:
    """Compute the state (H,) from which FLASH predicts the token after `path`.

    states: (1, M, H), the columns so far. The first `slots` tokens of a longer path become columns.
    """
    count = network.slots
    slots = network.slot_states(states[0, -1])
    after = torch.cat([positions, positions[-1] + torch.arange(1, count)])
    hidden, _ = network(torch.cat([states, slots[None, 1:]], 1), after[None])  # causal
    slots = network.finish(hidden[0, -count:], feature)
    embedded, refined = torch.zeros_like(feature), [slots[0]]
    for index, token in enumerate(path[:count]):
        embedded = embedded + embedding(torch.tensor(token))
        if index + 1 < count:
            refined.append(network.refine_slot(slots[index + 1], embedded, index + 1))
    if len(path) < count:
        return refined[len(path)]
    own = torch.stack(refined)
    more = network.fuse(embedding(torch.tensor(path[:count])), own)[None]
    positions = torch.cat([positions, positions[-1] + 1 + torch.arange(count)])
    return _slot(network, embedding, torch.cat([states, more], 1), positions, own[-1], path[count:])


def eagles_tree(score: Any, width: int, nodes: int, depth: int) -> set[Path]:
    """Return the paths of EAGLE-2's tree below the root, by brute force. score: path -> log-probabilities (V,) of the
    next token."""
    if nodes <= depth:
        path: Path = ()
        for _ in range(nodes):
            path = (*path, int(score(path).argmax()))
        return {path[: length + 1] for length in range(len(path))}
    width = min(width, nodes)
    result: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(depth):
        level = []
        for value, path in frontier:
            best = score(path).topk(min(width, len(score(path))))
            level += [(value + v, (*path, t)) for v, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        result += level
        frontier = sorted(level, key=lambda item: -item[0])[:width]
    return {path for _, path in sorted(result, key=lambda item: -item[0])[:nodes]}


def ended_chain(scores: list[Any], nodes: int, threshold: float, probabilities_of: list[Any] | None = None) -> int:
    """Count the nodes of a chain that ends at the first node whose probability, as the mean over rows, is below the
    threshold. scores: of each row, as `score` of `eagles_tree`. probabilities_of: of each row, path -> the estimated
    probability that the next token is accepted; None: the probability of the likeliest."""
    probabilities, paths = [1.0] * len(scores), [list[int]() for _ in scores]
    for length in range(nodes):
        if length and sum(probabilities) / len(scores) < threshold:
            return length
        for row, score in enumerate(scores):
            best = score(tuple(paths[row]))
            probabilities[row] *= (
                float(best.max().exp()) if probabilities_of is None else probabilities_of[row](tuple(paths[row]))
            )
            paths[row].append(int(best.argmax()))
    return nodes


def paths(draft: Draft, row: int) -> list[Path]:
    """Return the path of each node: its tokens from below the root. Asserts that the draft is a tree without twins."""
    size, parents, tokens = int(draft.size[row]), draft.parents[row].tolist(), draft.tokens[row].tolist()
    assert parents[0] == -1
    result: list[Path] = [()]
    for node in range(1, size):
        assert 0 <= parents[node] < node
        result.append((*result[parents[node]], tokens[node]))
    assert len(set(result)) == size
    return result[1:]


class Checked(ForwardingDrafter):
    """Runs a tree-growing drafter, and compares each of its drafts with one recomputed from scratch."""

    def __init__(self, drafter: Any, model: Any, images: dict[str, Any] | None = None) -> None:
        """images: further inputs of the model for a batch of one, such as pixels."""
        super().__init__(drafter)
        self.model = model
        self.images = images or {}
        self.compared = 0
        self.last: Any = None

    def start(self, context: Context) -> Any:
        rows = [row[keep].tolist() for row, keep in zip(context.tokens, context.mask, strict=True)]
        self.last = self.drafter.start(context)
        return [context, rows, self.last]

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        context, rows, inner = state
        draft = self.drafter.propose(inner, roots, plan)
        scores = [self._score(context, text) for text in rows]
        nodes, depth = plan.nodes, plan.depth
        if isinstance(self.drafter, FlashDrafter) and not self.drafter.tree:
            nodes = min(nodes, depth)
        elif isinstance(self.drafter, FlashDrafter) and nodes > depth:
            depth = min(depth, self.drafter.network.slots)
        elif (deepest := self.drafter.network.max_depth) is not None:
            depth = min(depth, deepest)
            nodes = min(nodes, depth) if plan.nodes <= plan.depth else nodes
        config = self.drafter.network.config
        if plan.threshold and 0 < nodes <= depth:
            probabilities = (
                [score.__self__.probability for score in scores] if getattr(config, "confidence", False) else None
            )
            nodes = ended_chain(scores, nodes, plan.threshold, probabilities)
        marginals = getattr(config, "mask_token", None) is not None and getattr(config, "head", "none") == "none"
        grown = blocks_tree if marginals else eagles_tree
        for index, text in enumerate(rows):
            assert text[-1] == int(roots[index])
            assert set(paths(draft, index)) == grown(scores[index], self.drafter.width, nodes, depth)
            self.compared += 1
        return draft

    def _score(self, context: Context, text: list[int]) -> Any:
        """Return a function: path -> log-probabilities (V,) of the token after this text and the path."""
        layers, known = self.needs.layers, dict[Path, Tensor]()
        states = self.model(torch.tensor([text]), **self.images, output_hidden_states=True).hidden_states
        features = torch.cat([states[n if n < 0 else n + 1][0, :-1] for n in layers], -1)
        if isinstance(self.drafter.network, DFlash):
            with torch.inference_mode():
                return NaiveBlock(self.drafter, features, text[-1]).score

        def score(path: Path) -> Tensor:
            if path not in known:
                known[path] = from_scratch(self.drafter, context, features, text, path)
            return known[path]

        return score

    def update(self, state: Any, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, tokens in enumerate(verdict.tokens.tolist()):
            state[1][row] += tokens[: int(verdict.lengths[row])]
        self.drafter.update(state[2], draft, scores, verdict)

    def select(self, state: Any, live: Tensor) -> None:
        state[1] = [state[1][row] for row in live.tolist()]
        self.drafter.select(state[2], live)


PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [11, 12, 13], [20], [30, 31, 30, 31, 30]]


def start_drafter(model: Any, drafter: NetworkDrafter, prompts: list[list[int]], roots: list[int]) -> DraftState:
    """Return a drafter's memory after the prompts' round. roots: the token that this round gave each row."""
    output = TextTarget(model).prefill(padded(prompts), drafter.needs)
    context, draft, scores = output.context, output.draft, output.scores
    state = drafter.start(context)
    given = torch.tensor(roots)
    zeros = torch.zeros_like(given)
    drafter.update(state, draft, scores, Verdict(zeros[:, None], given, zeros.bool(), given[:, None], zeros + 1))
    return state


class Watched:
    """Wraps a drafter and records its contexts' `carried` and its memories."""

    def __init__(self, drafter: NetworkDrafter) -> None:
        self.drafter, self.needs, self.name = drafter, drafter.needs, drafter.name
        self.check, self.propose, self.select = drafter.check, drafter.propose, drafter.select
        self.update: Any = drafter.update
        self.previous_state: list[Any] = []
        self.memories: list[DraftState] = []

    def start(self, context: Context) -> DraftState:
        self.previous_state.append(context.previous_state)
        self.memories.append(self.drafter.start(context))
        return self.memories[-1]


def rounds_of(model: Any, drafter: Any, budget: Any, prompts: list[list[int]], length: int = 14) -> list[Round]:
    inputs = padded(prompts)
    width = inputs["input_ids"].shape[1]
    text = Sequences(inputs["input_ids"], Stop(width + length, frozenset({45})))
    return list(decode(TextTarget(model), inputs, text, MatchRule(), drafter, budget))


def texts(rounds: list[Round], rows: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(rows)]
    for round_ in rounds:
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            result[row] += tokens
    return result
