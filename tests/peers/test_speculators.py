"""Compares mmdec's EAGLE-3 and P-EAGLE with speculators', step by step, on folders that speculators' classes saved.

`make peers` runs this in a separate environment, because speculators needs other versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators", reason="speculators is not installed here: `make peers`")
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from mmdec.pretrained.drafters import convert, read_network
from tests.peers.speculators_networks import DRAFTED, LAYER, LLAMA3, SIZE, STEPS, TOKENS, our_logits, peers_logits

CASES: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "plain": (LlamaConfig, {}, {}),
    "whole-vocabulary": (LlamaConfig, {}, {"draft_vocab_size": TOKENS}),
    "residual": (LlamaConfig, {}, {"norm_before_residual": True}),
    "fc-norm": (LlamaConfig, {}, {"fc_norm": True, "norm_output": True}),
    "norm-before-fc": (LlamaConfig, {}, {"norm_before_fc": True, "norm_before_residual": True}),
    "norm-output": (LlamaConfig, {}, {"norm_output": True}),
    "qwen3": (Qwen3Config, {}, {"norm_before_residual": True}),
    "layers": (LlamaConfig, {"num_hidden_layers": 3}, {"norm_output": True}),
    "qwen3-layers": (Qwen3Config, {"num_hidden_layers": 2, "attention_bias": True}, {"fc_norm": True}),
    "two-features": (LlamaConfig, {}, {"eagle_aux_hidden_state_layer_ids": [2, 5]}),
    "bias": (LlamaConfig, {"attention_bias": True}, {}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": LLAMA3}, {}),
}


def saved(folder: Path, parallel: bool, case: str) -> tuple[Any, Path]:
    """Return a network of the peer with random weights, and the folder that it wrote."""
    kind, layer, options = CASES[case]
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    more = {"mask_token_id": 5} if parallel else {}
    config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=kind(**{**LAYER, "num_hidden_layers": 1, **layer}),
        speculators_config=SpeculatorsConfig(
            algorithm="peagle" if parallel else "eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **{"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [2, 4, 6], **options, **more},
    )
    torch.manual_seed(0)
    network = (PEagleDraftModel if parallel else Eagle3DraftModel)(config).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, 0.3)
    if config.draft_vocab_size < TOKENS:
        ids = torch.randperm(TOKENS)[: config.draft_vocab_size].sort().values
        known = torch.zeros(TOKENS, dtype=torch.bool)
        known[ids] = True
        network.load_vocab_mappings(known, ids - torch.arange(len(ids)))
    network.save_pretrained(folder)
    return network, folder


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parallel", [False, True], ids=["eagle3", "peagle"])
def test_folders_of_the_peer_give_its_logits(tmp_path: Path, parallel: bool, case: str) -> None:
    peer, folder = saved(tmp_path / "peer", parallel, case)
    network = read_network(folder)
    assert network.system == "eagle3"
    assert (network.config.mask_token is not None) == parallel
    count = len(peer.config.eagle_aux_hidden_state_layer_ids)
    assert network.config.layers == tuple(part - 1 for part in peer.config.eagle_aux_hidden_state_layer_ids)
    tokens, drafted = torch.randint(TOKENS, (9,)), torch.randint(TOKENS, (STEPS,)).tolist()
    features = torch.randn(9, count * SIZE)
    expected = peers_logits(peer, tokens, features, drafted, parallel)
    for ours in (network, read_network(convert(folder, tmp_path / "converted"))):
        result = our_logits(ours, tokens, features, drafted)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        drawn = expected.argmax(-1)
        token_ids = drawn if peer.d2t is None else drawn + peer.d2t[drawn]
        assert torch.equal(ours.draft_vocabulary.token_ids(result.argmax(-1)), token_ids)


@torch.no_grad()
@pytest.mark.parametrize("case", ["plain", "norm-output", "qwen3", "layers"])
def test_the_peers_forward_equals_our_steps(tmp_path: Path, case: str) -> None:
    """Its training pass feeds true tokens: our steps with these tokens give the logits that its head computed."""
    peer, folder = saved(tmp_path / "peer", False, case)
    network = read_network(folder)
    length, seen = 8, list[Tensor]()
    tokens, features = torch.randint(TOKENS, (length,)), torch.randn(length, 3 * SIZE)
    hook = peer.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    peer(features[None], tokens[None], torch.zeros(1, length, dtype=torch.long), ttt_steps=3)
    hook.remove()
    root = 4  # the row of the first step; later steps read the tokens after it, in the same column
    result = our_logits(network, tokens[: root + 1], features[: root + 1], [*tokens[root + 1 :].tolist(), 0])
    for step in range(3):
        torch.testing.assert_close(result[step], seen[step][root], rtol=1e-5, atol=1e-5)
