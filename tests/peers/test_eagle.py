"""Compares mmdec's EAGLE and EAGLE-3 with the authors' networks and with the trees that their `topK_genrate` grows.

`make peers` clones github.com/SafeAILab/EAGLE at a fixed commit and runs this; EAGLE names the clone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmdec.core.tree import root_only
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.tree import Levels
from mmdec.pretrained.drafters import read_network
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.peers.speculators_networks import DRAFTED, LAYER, SIZE, TOKENS

CLONE = os.environ.get("EAGLE", "")
pytestmark = pytest.mark.skipif(
    not Path(CLONE, "eagle/model/cnets.py").is_file(),
    reason="needs a clone of github.com/SafeAILab/EAGLE: `make peers` makes one where it can be reached",
)

WIDTH, NODES, DEPTH, PROMPT, STEPS = 6, 25, 4, 9, 5
SETTINGS: dict[str, Any] = {  # of the authors' configuration
    **{name: LAYER[name] for name in LAYER if name not in ("attn_implementation", "head_dim")},
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "pad_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # module, changed settings, arguments of `Model`
    "eagle": ("cnets1", {}, {}),
    "eagle-without-bias": ("cnets1", {}, {"bias": False}),
    "eagle-qwen2": ("cnets1", {"qkv_bias": True}, {}),
    "eagle3": ("cnets", {"draft_vocab_size": DRAFTED}, {}),
    "eagle3-whole-vocabulary": ("cnets", {"draft_vocab_size": TOKENS}, {}),
    "eagle3-wide-target": ("cnets", {"draft_vocab_size": DRAFTED, "target_hidden_size": 2 * SIZE}, {}),
}


class Both:
    """The authors' network of a case with random weights, and mmdec's drafter, which reads their folder."""

    def __init__(self, case: str, folder: Path) -> None:
        module, changes, arguments = CASES[case]
        if CLONE not in sys.path:
            sys.path.insert(0, CLONE)
        settings = SETTINGS | changes
        torch.manual_seed(0)
        make = importlib.import_module(f"eagle.model.{module}").Model
        self.peer = make(
            SimpleNamespace(**settings), total_tokens=NODES + 1, depth=DEPTH - 1, top_k=WIDTH, **arguments
        ).eval()
        for weight in self.peer.parameters():
            # states of about 1: larger ones grow from step to step, and so does their rounding
            nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, weight.shape[-1] ** -0.5)
        self.eagle3 = module == "cnets"
        if self.eagle3 and settings["draft_vocab_size"] < TOKENS:
            ids = torch.randperm(TOKENS)[:DRAFTED].sort().values
            self.peer.d2t.copy_(ids - torch.arange(DRAFTED))
            self.peer.t2d[ids] = True
        elif self.eagle3:
            del self.peer.d2t, self.peer.t2d  # as the authors do for a whole vocabulary
        self.peer.init_tree()
        save_file(self.peer.state_dict(), folder / "model.safetensors")
        layers = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]} if self.eagle3 else {}
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **settings, **layers}))
        network = cast(DraftNetwork, read_network(folder))
        assert network.system == ("eagle3" if self.eagle3 else "eagle")
        self.output = nn.Linear(network.config.target_size, TOKENS, bias=False)
        nn.init.normal_(self.output.weight, std=0.2)
        self.ours = NetworkDrafter(network, self.peer.embed_tokens, self.output, WIDTH)
        self.channels = network.config.target_size

    def random_features(self, count: int) -> list[Tensor]:
        """Return the states (1, count, Ht) of each layer that the drafter reads."""
        return [torch.randn(1, count, self.channels) for _ in self.ours.needs.layers]

    def start(self, text: Tensor, features: list[Tensor]) -> Any:
        """Return the state of mmdec's drafter after a prompt and its first token, both in `text` (1, T)."""
        prompt, positions = text[:, :-1], torch.arange(text.shape[1] - 1)[None, None]
        by_layer = dict(zip(self.ours.needs.layers, features, strict=True))
        embeds = self.peer.embed_tokens(prompt)
        state = self.ours.start(Context(prompt, prompt >= 0, positions, torch.tensor([PROMPT]), by_layer, embeds))
        self.accept(state, root_only(prompt[:, -1]), [0], text[:, -1:], [part[:, -1:] for part in features])
        return state

    def accept(self, state: Any, draft: Draft, path: list[int], tokens: Tensor, features: list[Tensor]) -> None:
        """Accept nodes of a draft. tokens: (1, A), those of the nodes below the root, then the next one. features: each
        (1, N, Ht), of the draft's nodes."""
        by_layer = dict(zip(self.ours.needs.layers, features, strict=True))
        count = torch.tensor([len(path)])
        verdict = Verdict(torch.tensor([path]), tokens[:, -1], torch.tensor([False]), tokens, count)
        self.ours.update(state, draft, Scores(torch.empty(0), by_layer), verdict)

    def peers_logits(self, hidden: Tensor) -> Tensor:
        return self.peer.lm_head(self.peer.norm(hidden)) if self.eagle3 else self.output(hidden)

    def peers_tree(self, features: list[Tensor], text: Tensor) -> set[tuple[int, ...]]:
        """Return the paths of the tree that the authors draft after `text` (1, T), which ends with the root."""
        ids, _, visible, _ = self.peer.topK_genrate(torch.cat(features, -1), text, self.output, None)
        return {tuple(ids[0, row.nonzero()[1:, 0]].tolist()) for row in visible[0, 0, 1:]}


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens below the root on the path to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens[0, 1:].tolist(), draft.parents[0, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return found


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_states_and_logits_equal_the_authors(tmp_path: Path, case: str) -> None:
    both = Both(case, tmp_path)
    text, drafted = torch.randint(TOKENS, (1, PROMPT + 1)), torch.randint(TOKENS, (STEPS, 1, 1))
    features = both.random_features(PROMPT)
    expected, pairs = both.peer(torch.cat(features, -1), input_ids=text[:, 1:], use_cache=True)
    expected = expected[:, -1:]
    state = both.start(text, features)
    hidden = both.ours.process_pending(state).hidden_state(both.ours.network, state.cache, state.packed)
    levels = Levels(both.ours, state)
    for token in drafted:
        logits = both.peers_logits(expected)
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both.ours.logits(hidden), logits, rtol=1e-5, atol=1e-5)
        assert float(logits.std()) > 0.1
        expected, pairs = both.peer(expected, input_ids=token, past_key_values=pairs, use_cache=True)
        hidden = levels.expand(token, hidden, None)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", CASES)
def test_trees_equal_the_authors(tmp_path: Path, case: str, seed: int) -> None:
    """A tree after a prompt, and one after the pass that accepted a path of the first."""
    both = Both(case, tmp_path)
    torch.manual_seed(seed)
    text, features, plan = torch.randint(TOKENS, (1, PROMPT + 1)), both.random_features(PROMPT), Plan(NODES, DEPTH)
    state = both.start(text, features)
    draft = both.ours.propose(state, text[:, -1], plan)
    nodes = paths(draft)
    assert len(nodes) == NODES + 1
    assert set(nodes[1:]) == both.peers_tree(features, text)

    deepest = max(nodes, key=len)
    assert len(deepest) > 1
    accepted = [nodes.index(deepest[:depth]) for depth in range(len(deepest) + 1)]
    new, features = torch.tensor([[*deepest, 7]]), both.random_features(NODES + 1)
    both.accept(state, draft, accepted, new, features)
    draft = both.ours.propose(state, new[:, -1], plan)
    expected = both.peers_tree([part[:, accepted] for part in features], torch.cat([text, new], 1))
    assert set(paths(draft)[1:]) == expected
