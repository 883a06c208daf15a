"""Tests DFlash's sequential heads: how DSpark, DFlash 2 and Domino are read from published folders, what they draw
from, and when their chains end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mmdec
from mmdec.core.tree import int_rows
from mmdec.errors import InputError
from mmdec.pretrained.drafters import convert, read_network
from mmdec.types import Plan
from tests.support.draft_networks import (
    FORMS_OF,
    PROMPTS,
    NaiveBlock,
    paths,
    scatter_vocabulary,
    start_drafter,
    tree_growing,
)
from tests.support.draft_warps import warp_at
from tests.support.tiny_text import VOCABULARY, language_model, prompts

MODEL: Any = language_model(num_hidden_layers=5)
FORMS = FORMS_OF["dflash"]
HEADS = ("vanilla", "confident", "rnn", "rnn-anchor", "dflash2", "domino")
PUBLISHED: dict[str, Any] = {  # settings that all folders of these tests have
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
OWN: dict[str, Any] = {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [1, 2, 4]}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],
    "aux_hidden_state_layer_ids": [2, 3, 5],
    "block_size": 4,
    "mask_token_id": 3,
    "sample_from_anchor": True,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "transformer_layer_config": PUBLISHED,
}
NEMO: dict[str, Any] = {
    **PUBLISHED,
    **OWN,
    "architectures": ["Qwen3DSparkModel"],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "markov_rank": 6,
    "markov_head_type": "rnn",
}
DFLASH2: dict[str, Any] = {
    **PUBLISHED,
    "architectures": ["Qwen3DFlash2DraftModel"],
    "dflash_config": {**OWN, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
}
DOMINO: dict[str, Any] = {
    **PUBLISHED,
    "architectures": ["Qwen3DFlashDraftModel"],
    "block_size": 4,
    "dflash_config": {
        **OWN,
        "projector_type": "domino",
        "emb_dim": 6,
        "gru_hidden_dim": 10,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> config.json, fields of our configuration
    "speculators": (SPECULATORS, {"head": "vanilla", "confidence": True, "from_anchor": True, "layers": (1, 2, 4)}),
    "speculators-gated": (
        {**SPECULATORS, "markov_head_type": "gated", "sample_from_anchor": False},
        {"head": "gated", "from_anchor": False, "confidence_reads_token": True},
    ),
    "speculators-no-markov": (
        {**SPECULATORS, "markov_rank": 0, "confidence_head_with_markov": False},
        {"head": "none", "confidence": True, "from_anchor": True},
    ),
    "speculators-no-confidence": ({**SPECULATORS, "enable_confidence_head": False}, {"confidence": False}),
    "nemo": (NEMO, {"head": "rnn", "from_anchor": True, "confidence_reads_token": False, "layers": (1, 2, -1)}),
    "dflash2": (DFLASH2, {"head": "dflash2", "head_candidates": 4, "convolution_group": 8, "from_anchor": False}),
    "domino": (DOMINO, {"head": "domino", "head_state": 10, "plain_prefix": 1, "from_anchor": True}),
    "domino-not-shifted": (
        {**DOMINO, "dflash_config": {**DOMINO["dflash_config"], "shift_label": False}},
        {"head": "domino", "from_anchor": False},
    ),
}


def tensors(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return a published folder's tensors with random values; their names and shapes are those of the publishers."""
    torch.manual_seed(0)
    size, inner, vocabulary = 32, 48, VOCABULARY
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 3 * size), "hidden_norm.weight": (size,)}
    shapes["norm.weight"] = (size,)
    for index in range(2):
        layer = f"layers.{index}"
        attention = {"q_proj": (32, size), "k_proj": (16, size), "v_proj": (16, size), "o_proj": (size, 32)}
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (size, inner)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
        if "DFlash2" in settings["architectures"][0]:
            for name in ("attention_conv", "mlp_conv"):
                shapes |= {
                    f"{layer}.{name}.base_kernel": (2, 2, size),
                    f"{layer}.{name}.kernel_projection.weight": (16, size),
                }
    if "DFlash2" in settings["architectures"][0]:
        shapes |= {f"candidate_selector.{name}_codebook": (vocabulary, 6) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (6, size)
    if settings.get("dflash_config", {}).get("projector_type") == "domino":
        shapes |= {"prefix_gru.weight_ih_l0": (30, size), "prefix_gru.weight_hh_l0": (30, 10)}
        shapes |= {"embed_proj.0.weight": (6, size + 10), "embed_proj.2.weight": (vocabulary, 6)}
    if settings.get("markov_rank"):
        shapes |= {"markov_head.markov_w1.weight": (vocabulary, 6), "markov_head.markov_w2.weight": (vocabulary, 6)}
        name, rows, columns = {
            "vanilla": ("", 0, 0),
            "gated": ("gate_proj", 6, size + 6),
            "rnn": ("joint_proj", 18, size + 12),
        }[settings["markov_head_type"]]
        shapes |= {f"markov_head.{name}.weight": (rows, columns), f"markov_head.{name}.bias": (rows,)} if name else {}
    if settings.get("enable_confidence_head"):
        width = size + 6 * settings["confidence_head_with_markov"]
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if "markov_rank" in settings:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (vocabulary, size))
    return {name: torch.randn(shape) * 0.3 + (0.8 if len(shape) == 1 else 0) for name, shape in shapes.items()}


def published(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_folders_are_read_as_they_are(tmp_path: Path, layout: str) -> None:
    """By their content: every tensor has its place, and the text drafted with them is the model's own."""
    settings, fields = LAYOUTS[layout]
    state = tensors(settings)
    folder, inputs = published(tmp_path / "in", state, settings), prompts(2)
    network = read_network(folder)
    assert {name: getattr(network.config, name) for name in fields} == fields
    own = network.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], value) for name, value in state.items())
    assert read_network(convert(folder, tmp_path / "own")).config == network.config
    expected = MODEL.generate(**inputs, max_new_tokens=12, do_sample=False)
    for nodes in (3, (9, 3)):
        result = mmdec.generate(MODEL, inputs, folder, num_speculative_tokens=nodes, max_new_tokens=12, do_sample=False)
        assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize(
    ("layout", "name", "shape", "expected"),
    [
        ("speculators", "markov_head.markov_w1.weight", (VOCABULARY, 5), (VOCABULARY, 6)),
        ("speculators", "markov_head.markov_w2.weight", (VOCABULARY - 1, 6), (VOCABULARY, 6)),
        ("speculators", "confidence_head.proj.weight", (1, 32), (1, 38)),
        ("nemo", "markov_head.joint_proj.weight", (18, 43), (18, 44)),
        ("dflash2", "candidate_selector.successor_codebook", (VOCABULARY, 7), (VOCABULARY, 6)),
        ("dflash2", "layers.1.mlp_conv.base_kernel", (2, 3, 32), (2, 2, 32)),
        ("dflash2", "layers.0.attention_conv.kernel_projection.weight", (8, 32), (16, 32)),
        ("domino", "prefix_gru.weight_ih_l0", (27, 32), (30, 32)),
        ("domino", "embed_proj.0.weight", (6, 32), (6, 42)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both(
    tmp_path: Path, layout: str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    settings, _ = LAYOUTS[layout]
    folder = published(tmp_path / "in", {**tensors(settings), name: torch.ones(shape)}, settings)
    with pytest.raises(InputError) as caught:
        read_network(folder)
    assert f"'{name}'" in str(caught.value)
    assert f"is {shape} and not {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "settings", "absent", "match"),
    [
        ("speculators", {}, "markov_head.markov_w2.weight", "lacks 'markov_head.markov_w2.weight'"),
        ("speculators", {}, "confidence_head.proj.bias", "lacks 'confidence_head.proj.bias'"),
        (
            "speculators",
            {"markov_rank": 0, "confidence_head_with_markov": False},
            "",
            "holds 'markov_head.markov_w1.weight'",
        ),
        ("speculators", {"markov_head_type": "lstm"}, "", "`head` must be none, vanilla"),
        ("speculators", {"markov_rank": -1}, "", "`head_rank` must be an integer from 1"),
        ("speculators", {"markov_rank": "6"}, "", "`head_rank` must be an integer from 1"),
        ("dflash2", {}, "candidate_selector.successor_codebook", "lacks 'candidate_selector.successor_codebook'"),
        ("dflash2", {"conv_kernel_size": 3}, "", "have `conv_kernel_size` 2"),
        ("dflash2", {"conv_group_size": 7}, "", "`convolution_group` must divide the 32 channels"),
        ("dflash2", {"selector_top_k": 0}, "", "`head_candidates` must be an integer from 1"),
        ("domino", {}, "embed_proj.2.weight", "lacks 'embed_proj.2.weight'"),
        ("domino", {"pure_draft_prefix_len": 5}, "", "`plain_prefix` must be from 0 to 4"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    tmp_path: Path, layout: str, settings: dict[str, Any], absent: str, match: str
) -> None:
    described = dict(LAYOUTS[layout][0])
    state = {name: value for name, value in tensors(described).items() if name != absent}
    if "dflash_config" in described:
        described["dflash_config"] = {**described["dflash_config"], **settings}
    else:
        described |= settings
    with pytest.raises(InputError, match=match):
        read_network(published(tmp_path / "in", state, described))


@torch.no_grad()
@pytest.mark.parametrize("form", HEADS)
def test_children_are_drawn_from_the_heads_distribution_of_their_path(form: str) -> None:
    """Residual sampling accepts by p / q: q of each node is the naive head's distribution after the node's path."""
    model: Any = language_model(num_hidden_layers=5).double()
    drafter = scatter_vocabulary(tree_growing("dflash", model, **FORMS[form]))
    state = start_drafter(model, drafter, [PROMPTS[0]], [7])
    draft = drafter.propose(state, torch.tensor([7]), Plan(9, 3, warp_at(1.0), torch.Generator().manual_seed(0)))
    assert draft.probs is not None
    states = model(torch.tensor([[*PROMPTS[0], 7]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[n if n < 0 else n + 1][0, :-1] for n in drafter.needs.layers], -1)
    block = NaiveBlock(drafter, features, 7)
    path_of = {0: ()} | dict(enumerate(paths(draft, 0), 1))
    inner = {int(parent) for parent in draft.parents[0, 1 : int(draft.size[0])]}
    assert len(inner) > 1
    for node in inner:
        expected = block.score(path_of[node]).exp()
        torch.testing.assert_close(draft.probs[0, node].double(), expected, rtol=1e-5, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("form", HEADS)
def test_a_head_changes_the_draft(form: str) -> None:
    """Else a head that corrects nothing would pass every test of exactness."""
    drafts = []
    for factor in (0.0, 30.0):
        drafter = tree_growing("dflash", MODEL, **FORMS[form])
        for name, weight in drafter.network.named_parameters():
            if name.startswith(("markov_head.markov_w2", "candidate_selector.successor", "embed_proj.2")):
                weight.mul_(factor)
        state = start_drafter(MODEL, drafter, PROMPTS[:1], [7])
        drafts.append(int_rows(drafter.propose(state, torch.tensor([7]), Plan(4, 4)).tokens))
    assert drafts[0] != drafts[1]


@torch.no_grad()
def test_the_confidence_head_ends_chains() -> None:
    """In place of the likeliest token's probability: a bias alone decides how long a chain gets."""
    lengths = []
    for form in ("rnn-anchor", "confident"):
        for bias in (-9.0, 1.0, 9.0):
            drafter = tree_growing("dflash", MODEL, **FORMS[form])
            drafter.network.confidence_head.proj.weight.data.zero_()
            drafter.network.confidence_head.proj.bias.data.fill_(bias)
            state = start_drafter(MODEL, drafter, PROMPTS[:2], [7, 9])
            draft = drafter.propose(state, torch.tensor([7, 9]), Plan(9, 9, threshold=0.5))
            lengths.append(draft.tokens.shape[1] - 1)
    assert lengths == [1, 3, 5, 1, 3, 4]  # sigmoid(1) is 0.73: the third token's product is below 0.5


@torch.no_grad()
def test_a_confidence_head_without_a_markov_head_ends_chains(tmp_path: Path) -> None:
    settings, _ = LAYOUTS["speculators-no-markov"]
    state = tensors(settings)
    for bias, length in ((-9.0, 1), (1.0, 3), (9.0, 4)):
        state |= {"confidence_head.proj.weight": torch.zeros(1, 32), "confidence_head.proj.bias": torch.tensor([bias])}
        drafter = mmdec.load_drafter(published(tmp_path / str(bias), state, settings), MODEL)
        begun = start_drafter(MODEL, drafter, PROMPTS[:1], [7])  # type: ignore[arg-type]
        draft = drafter.propose(begun, torch.tensor([7]), Plan(9, 9, threshold=0.5))
        assert draft.tokens.shape[1] - 1 == length
