"""Tests DFlash and exported drafters with speculators' classes: they load mmdec's folders and give the same logits.

`make peers` runs this, as test_speculators.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("speculators", reason="speculators is not installed here: `make peers`")
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from mmdec.drafters.dflash.network import DFlash, DFlashConfig
from mmdec.drafters.eagle.eagle3 import Eagle3, Eagle3Config
from mmdec.pretrained.drafters import convert, read_network, save_network
from mmdec.pretrained.export import export_drafter
from tests.peers.speculators_networks import DRAFTED, LAYER, LLAMA3, SIZE, TOKENS, our_logits, peers_logits

DEPTH, BLOCK = 8, 5
SHAPE: dict[str, Any] = {
    **{name: LAYER[name] for name in LAYER if name != "attn_implementation"},
    "rope_theta": 50000.0,
    "base": "abc",
}
MAPPED = {"draft_vocab_size": DRAFTED}
EXPORTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "part": {**MAPPED, "norm_before_residual": True},
    "3.1": {**MAPPED, "fc_norm": True, "norm_output": True},
    "before": {"norm_before_fc": True},
    "qwen3": {**MAPPED, "qk_norm": True, "attention_bias": True, "output_bias": True},
    "layers": {"num_hidden_layers": 3, "layers": (0, 3), "features": 2, "rope_scaling": LLAMA3},
    "parallel": {**MAPPED, "mask_token": 5, "num_hidden_layers": 2, "own_embedding": True},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-layer": {"num_hidden_layers": 1, "layers": (4,)},
    "part": {**MAPPED, "own_head": True},
    "anchor": {**MAPPED, "own_head": True, "from_anchor": True, "rope_scaling": LLAMA3},
    "bias": {"attention_bias": True},
}
DSPARK: dict[str, dict[str, Any]] = {  # settings of the peer's configuration
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_head_type": "rnn"},
    "rnn-mask": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "vanilla-mask": {"sample_from_anchor": False, "enable_confidence_head": False},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**LAYER, "num_hidden_layers": DEPTH, "initializer_range": 0.4}))
    model.save_pretrained(tmp_path_factory.mktemp("target"))
    return Path(model.config.name_or_path or tmp_path_factory.getbasetemp() / "target0")


def filled(network: Any) -> Any:
    """With random weights, and a part of the vocabulary that is not its beginning."""
    torch.manual_seed(0)
    for weight in network.parameters():
        nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, 0.3)
    if network.config.has_draft_vocabulary:
        ids = torch.randperm(TOKENS)[:DRAFTED].sort().values
        network.d2t.copy_(ids - torch.arange(DRAFTED))
        network.t2d.copy_(torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, ids, True))
    return network.eval()


def loaded(folder: Path, classes: dict[str, tuple[Any, Any]]) -> Any:
    """Return the folder in the peer's own classes; every tensor of the folder must have a place there, and none be
    missing."""
    settings = json.loads((folder / "config.json").read_text())
    assert "model_type" not in settings
    config_class, network_class = classes[settings["speculators_model_type"]]
    config = config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    network = network_class(config).eval()
    state = load_file(folder / "model.safetensors")
    if "t2d" in state:
        network.load_vocab_mappings(state["t2d"], state["d2t"])
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected
    targets = {"embed_tokens.weight", "lm_head.weight"}  # the peer takes them from its verifier
    assert {name for name in missing if not name.startswith("verifier_")} <= targets
    return network


CLASSES: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


@torch.no_grad()
@pytest.mark.parametrize("name", EXPORTS)
def test_the_peers_classes_give_our_logits_of_an_exported_eagle3(tmp_path: Path, target: Path, name: str) -> None:
    network = filled(Eagle3(Eagle3Config(**{**SHAPE, **EXPORTS[name], "target": str(target)}).for_depth(DEPTH)))
    save_network(network, tmp_path / "own")
    folder = export_drafter(tmp_path / "own", tmp_path / "out", "speculators")
    peer = loaded(folder, CLASSES)
    parallel = network.config.mask_token is not None
    if not parallel:  # the target's embedding, which the peer takes from its verifier
        peer.embed_tokens.weight.copy_(torch.randn(TOKENS, SIZE))
        network.embed_tokens = peer.embed_tokens
    tokens, drafted = torch.randint(TOKENS, (9,)), torch.randint(TOKENS, (4,)).tolist()
    features = torch.randn(9, len(network.config.layers) * SIZE)
    expected = our_logits(network, tokens, features, drafted)
    torch.testing.assert_close(peers_logits(peer, tokens, features, drafted, parallel), expected, rtol=1e-5, atol=1e-5)
    drawn = expected.argmax(-1)
    token_ids = drawn if peer.d2t is None else drawn + peer.d2t[drawn]
    assert torch.equal(network.draft_vocabulary.token_ids(drawn), token_ids)
    # what the peer saves again is what we read
    peer.save_pretrained(tmp_path / "again")
    again: Any = read_network(tmp_path / "again")
    assert again.config.layers == network.config.layers
    torch.testing.assert_close(our_logits(again, tokens, features, drafted), expected, rtol=1e-5, atol=1e-5)


def our_block(network: Any, embedding: Any, root: int, features: Tensor, head: Any) -> Tensor:
    """Return (b, D): the logits of all of a block's states, behind columns with features (T, k * H)."""
    return network.logits(our_states(network, embedding, root, features), head)


def our_states(network: Any, embedding: Any, root: int, features: Tensor) -> Tensor:
    """Return (b, H): all of a block's states before the final norm."""
    columns, size = features.shape[0], network.config.block_size
    states = network.fuse(features[:, :0], features)[None]
    tokens = torch.tensor([[root, *[network.config.mask_token] * (size - 1)]])
    block = network.embed_block(tokens, embedding)
    before, positions = torch.arange(columns)[None], columns + torch.arange(size)[None]
    mask = torch.zeros(1, 1, size, columns + size)
    for index in range(network.depth):
        past = network.context(states, before, index)
        queries, *own = network.layer(index).project(block, positions)
        keys, values = (torch.cat(pair, 2) for pair in zip(past, own, strict=True))
        block = network.layer(index).attend(block, queries, keys, values, mask)
    return block[0]


def peers_block(peer: Any, root: int, features: Tensor) -> Tensor:
    """Return the same by the peer's layers, as its forward pass runs them for one anchor."""
    columns, size = features.shape[0], peer.block_size
    context = peer.hidden_norm(peer.fc(features[None]))
    states = peer.embed_tokens(torch.tensor([[root, *[peer.mask_token_id] * (size - 1)]]))
    positions = torch.arange(columns + size)[None]
    rotations = peer.rotary_emb(states, positions)
    for layer in peer.layers:
        states = layer(
            hidden_states=states,
            target_hidden=context,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotations,
        )
    return peer.lm_head(peer.norm(states))[0]


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_the_peers_classes_give_our_logits_of_an_exported_dflash(tmp_path: Path, target: Path, name: str) -> None:
    options = {"block_size": BLOCK, "mask_token": 5, "num_hidden_layers": 2, **BLOCKS[name], "target": str(target)}
    network = filled(DFlash(DFlashConfig(**{**SHAPE, **options}).for_depth(DEPTH)))
    save_network(network, tmp_path / "own")
    peer = loaded(export_drafter(tmp_path / "own", tmp_path / "out", "speculators"), CLASSES)
    model = LlamaForCausalLM.from_pretrained(target)
    peer.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    if not network.config.own_head:
        peer.lm_head.weight.copy_(model.get_output_embeddings().weight)
    features = torch.randn(7, len(network.config.layers) * SIZE)
    expected = our_block(network, model.get_input_embeddings(), 9, features, model.get_output_embeddings())
    torch.testing.assert_close(peers_block(peer, 9, features), expected, rtol=1e-5, atol=1e-5)
    assert peer.config.sample_from_anchor == network.config.from_anchor
    peer.save_pretrained(tmp_path / "again")
    again: Any = read_network(tmp_path / "again")
    assert (again.config.layers, again.config.drafts) == (network.config.layers, network.config.drafts)
    embedding = again.embed_tokens if again.config.own_embedding else model.get_input_embeddings()
    result = our_block(again, embedding, 9, features, model.get_output_embeddings())
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("layers", [1, 3])
def test_dflash_folders_of_the_peer_give_its_forward_passes_logits(tmp_path: Path, layers: int, mapped: bool) -> None:
    """Its training pass with one anchor: the block's logits, hooked at its LM head."""
    drafted = DRAFTED if mapped else TOKENS
    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**{**LAYER, "num_hidden_layers": layers}),
        draft_vocab_size=drafted,
        block_size=BLOCK,
        mask_token_id=5,
        aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    peer = DFlashDraftModel(config).eval()
    for weight in peer.parameters():
        nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, 0.3)
    if mapped:
        ids = torch.randperm(TOKENS)[:DRAFTED].sort().values
        known = torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, ids, True)
        peer.load_vocab_mappings(known, ids - torch.arange(DRAFTED))
    peer.save_pretrained(tmp_path / "peer")
    network: Any = read_network(tmp_path / "peer")
    assert network.config.layers == (1, 3, 5)
    length, anchor, seen = 14, 7, list[Tensor]()
    tokens, features = torch.randint(TOKENS, (length,)), torch.randn(length, 3 * SIZE)
    hook = peer.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    peer(
        features[None],
        tokens[None],
        torch.zeros(1, length).index_fill(1, torch.tensor([anchor]), 1.0),
        torch.randn(1, length, SIZE),
        torch.zeros(1, length, dtype=torch.long),
        loss_config=resolve_loss_config("kl_div", "eager"),
        max_anchors=1,
    )
    hook.remove()
    result = our_block(network, peer.embed_tokens, int(tokens[anchor]), features[:anchor], peer.lm_head)
    torch.testing.assert_close(result, seen[0], rtol=1e-5, atol=1e-5)
    drawn = result.argmax(-1)
    assert torch.equal(
        network.draft_vocabulary.token_ids(drawn), drawn if peer.d2t is None else drawn + peer.d2t[drawn]
    )


@torch.no_grad()
@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("case", DSPARK)
def test_dspark_folders_of_the_peer_give_its_forward_passes_logits(
    tmp_path: Path, target: Path, case: str, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training pass with one anchor and true tokens above: the corrected logits and the confidence, also of the
    folder that we export again."""
    config = DSparkSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**{**LAYER, "num_hidden_layers": 2}),
        draft_vocab_size=DRAFTED if mapped else TOKENS,
        block_size=BLOCK,
        mask_token_id=5,
        aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
        **{"markov_rank": 6, **DSPARK[case]},
    )
    torch.manual_seed(0)
    peer = DSparkDraftModel(config).eval()
    for weight in peer.parameters():
        nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, 0.3)
    if mapped:
        ids = torch.randperm(TOKENS)[:DRAFTED].sort().values
        known = torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, ids, True)
        peer.load_vocab_mappings(known, ids - torch.arange(DRAFTED))
    peer.save_pretrained(tmp_path / "peer")
    length, anchor, seen = 14, 7, list[tuple[Tensor, Tensor | None]]()
    tokens, features = torch.randint(TOKENS, (length,)), torch.randn(length, 3 * SIZE)

    def record(logits: Tensor, targets: Tensor, confidence: Tensor | None, *rest: Any, **named: Any) -> Any:
        seen.append((logits[0], None if confidence is None else confidence[0]))
        return logits.sum(), {}

    monkeypatch.setattr(dspark_core, "compute_metrics", record)
    peer(
        features[None],
        tokens[None],
        torch.zeros(1, length).index_fill(1, torch.tensor([anchor]), 1.0),
        torch.randn(1, length, SIZE),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    expected, confidence = seen[0]
    folders = [tmp_path / "peer"]
    convert(tmp_path / "peer", tmp_path / "own")
    folders.append(export_drafter(tmp_path / "own", tmp_path / "out", "speculators"))
    loaded(folders[1], CLASSES)
    for folder in folders:
        network: Any = read_network(folder)
        first = BLOCK - network.config.drafts
        assert first == int(not config.sample_from_anchor)
        normed = network.apply_norm(our_states(network, peer.embed_tokens, int(tokens[anchor]), features[:anchor]))
        base, head = network.block_logits(normed, peer.lm_head), network.head
        state = None if head is None else head.begin(tokens[anchor], normed[0], peer.embed_tokens)
        for depth in range(network.config.drafts):
            slot = first + depth
            if head is not None and depth:
                state = head.step(state, tokens[anchor + depth], normed[slot - 1], peer.embed_tokens)
            logits = base[slot] if head is None else head.logits(base[slot], normed[slot], state, depth)
            torch.testing.assert_close(logits, expected[slot], rtol=1e-5, atol=1e-5)
            if confidence is not None:
                estimate = network.confidence_head(normed[slot], state)
                torch.testing.assert_close(estimate, confidence[slot], rtol=1e-5, atol=1e-5)
        assert network.config.confidence == (confidence is not None)
