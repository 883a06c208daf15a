"""Tests published DFlash networks: z-lab's layout, speculators' layout, and transformers' class and generation."""

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
from mmdec.types import Draft, Plan
from tests.support.tiny_text import VOCABULARY, language_model, prompts

SIZE, LAYERS = 32, 3
LINEAR = {"rope_type": "linear", "factor": 2.0}
MODEL: Any = language_model(num_hidden_layers=5)
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 4]},
    "hidden_size": SIZE,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "vocab_size": VOCABULARY,
}


def tensors(bias: bool = False) -> dict[str, Tensor]:
    """z-lab's, with random values."""
    torch.manual_seed(0)
    shapes = {"fc.weight": (SIZE, 3 * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for index in range(LAYERS):
        attention = {"q_proj": (32, SIZE), "k_proj": (16, SIZE), "v_proj": (16, SIZE), "o_proj": (SIZE, 32)}
        shapes |= {f"layers.{index}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"layers.{index}.self_attn.{name}.bias": shape[:1] for name, shape in attention.items() if bias}
        shapes |= {f"layers.{index}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"layers.{index}.mlp.{name}_proj.weight": (48, SIZE) for name in ("gate", "up")}
        shapes[f"layers.{index}.mlp.down_proj.weight"] = (SIZE, 48)
        for name in ("input", "post_attention"):
            shapes[f"layers.{index}.{name}_layernorm.weight"] = (SIZE,)
    return {name: torch.randn(shape) * 0.3 + (0.8 if len(shape) == 1 else 0) for name, shape in shapes.items()}


def published(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return folder


def test_every_config_layout_gives_one_network(tmp_path: Path) -> None:
    """`block_size` at the top or in `dflash_config`, tensors behind `model.`, mmdec's own folder."""
    state = tensors()
    own = {**ZLAB["dflash_config"], "block_size": 4}
    inner = {name: value for name, value in ZLAB.items() if name != "block_size"} | {"dflash_config": own}
    first = read_network(published(tmp_path / "top", state, ZLAB))
    folders = [
        published(tmp_path / "inner", state, inner),
        published(tmp_path / "behind", {f"model.{name}": value for name, value in state.items()}, ZLAB),
        convert(tmp_path / "top", tmp_path / "own"),
    ]
    for folder in folders:
        network = read_network(folder)
        assert network.config == first.config
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in state.items())
    config: Any = first.config
    assert config.layers == (1, 2, -1)  # the last layer's output has passed the final norm
    assert (config.block_size, config.mask_token, config.rope_theta) == (4, 3, 50000)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"dflash_config": {"mask_token_id": 3}}, {"layers": ()}),
        ({"num_target_layers": 9}, {"layers": (1, 2, 4)}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_scaling": LINEAR}, {"rope_scaling": LINEAR}),
        (
            {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 2, 5], "mask_token_id": 9},
            {"layers": (0, 1, 4), "from_anchor": False},
        ),
    ],
)
def test_options_are_read_from_the_config(tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    config = read_network(published(tmp_path / "in", tensors(), {**ZLAB, **settings})).config
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "name its `mask_token_id`"),
        ({"block_size": None}, "name its `block_size`"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]}}, "have an fc of 2 x 32"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 2, 3]}}, "`target_layer_ids`"),
        ({"speculators_model_type": "dflash"}, "`aux_hidden_state_layer_ids`"),
        ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [0, 2, 3]}, "at least 1"),
        ({"layer_types": ["sliding_attention"] * 3}, "full attention in all layers"),
        ({"num_attention_heads": 5}, "how many heads"),
        ({"vocab_size": None}, "how many tokens"),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 2, 4]}}, "must be a token below"),
    ],
)
def test_unsupported_folders_are_refused(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        read_network(published(tmp_path / "in", tensors(), {**ZLAB, **settings}))


@pytest.mark.parametrize("bias", [False, True])
def test_a_published_folder_drafts_as_it_is(tmp_path: Path, bias: bool) -> None:
    config = {**ZLAB, "attention_bias": bias}
    folder, inputs = published(tmp_path / "in", tensors(bias), config), prompts(3)
    expected = MODEL.generate(**inputs, max_new_tokens=12, do_sample=False)
    for nodes in (3, (9, 3)):
        result = mmdec.generate(MODEL, inputs, folder, num_speculative_tokens=nodes, max_new_tokens=12, do_sample=False)
        assert torch.equal(result.sequences, expected)
    with pytest.raises(InputError, match="`system` does not apply to a DFlash checkpoint"):
        convert(folder, tmp_path / "out", system="eagle")


@torch.no_grad()
def test_transformers_own_class_drafts_the_same_tokens_and_text(tmp_path: Path) -> None:
    """Its assistant, saved by itself, with full attention: its drafts are ours, and both texts are the model's."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    config = MuseGlimmerAssistantConfig(
        hidden_size=SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        head_dim=8,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=[0, 1, 3],
        layer_types=["full_attention"] * 2,
    )
    torch.manual_seed(0)
    assistant = MuseGlimmerAssistantModel(config).eval()
    for weight in assistant.parameters():
        torch.nn.init.normal_(weight, 0.8 if weight.dim() == 1 else 0.0, 0.3)
    assistant.save_pretrained(tmp_path / "assistant")
    drafter: Any = mmdec.load_drafter(tmp_path / "assistant", MODEL)
    drafts: list[tuple[int, list[int]]] = []  # root, tokens
    propose = drafter.propose

    def record_draft(state: Any, roots: Tensor, plan: Plan) -> Draft:
        draft = propose(state, roots, plan)
        drafts.append((int(roots), int_rows(draft.tokens)[0][1:]))
        return draft

    drafter.propose = record_draft
    prompt = {name: value[:1] for name, value in prompts(1).items()}
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = MODEL.generate(**prompt, **options)
    assert torch.equal(mmdec.generate(MODEL, prompt, drafter, num_speculative_tokens=3, **options).sequences, expected)
    seen: list[list[int]] = []
    candidates = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *rest: Any, **named: Any) -> Any:
        out = candidates(self, input_ids, *rest, **named)
        if out[0].shape[1] > input_ids.shape[1]:
            seen.append(out[0][0, input_ids.shape[1] - 1 :].tolist())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
        theirs = MODEL.generate(**prompt, assistant_model=assistant, speculation_type="dflash", **options)
    assert torch.equal(theirs, expected)
    assert len(seen) >= len(drafts) > 5
    for (root, tokens), other in zip(drafts, seen, strict=False):
        assert [root, *tokens] == other[: 1 + len(tokens)]  # ours end where the text must end


def test_sliding_windows_raise_an_input_error(tmp_path: Path) -> None:
    config = {
        "model_type": "muse_glimmer_assistant",
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": [0, 1, 3],
    }
    state = tensors()
    state["encoder.fc.weight"], state["encoder.output_norm_enc.weight"] = (
        state.pop("fc.weight"),
        state.pop("hidden_norm.weight"),
    )
    with pytest.raises(InputError, match="full attention in all layers"):
        read_network(published(tmp_path / "in", state, {**ZLAB, **config}))
