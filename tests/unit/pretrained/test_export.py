"""Tests the export of drafters for other engines: the content of each layout, drafters that it cannot express, and
loading the export."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import mmdec
from mmdec.cli import app
from mmdec.errors import InputError
from mmdec.pretrained.drafters import read_network, save_network
from mmdec.pretrained.export import export_drafter
from tests.support.draft_networks import draft_network
from tests.support.tiny_text import language_model, prompts

MODEL: Any = language_model(num_hidden_layers=6)
MAPPED = {"draft_vocab_size": 40}
PARALLEL = {"mask_token": 3, "num_hidden_layers": 3, "own_embedding": True}
BLOCK = {"block_size": 4, "mask_token": 3, "num_hidden_layers": 2}
HEAD = {"head_rank": 6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # system, options, layouts that can say them
    "plain": ("eagle3", {}, ("speculators", "flat")),
    "part": ("eagle3", {**MAPPED, "norm_before_residual": True, "positions": "temporal"}, ("speculators", "flat")),
    "3.1": ("eagle3", {**MAPPED, "fc_norm": True, "norm_output": True}, ("speculators", "flat")),
    "before": (
        "eagle3",
        {"norm_before_fc": True, "attention_bias": True, "output_bias": True},
        ("speculators", "flat"),
    ),
    "layers": ("eagle3", {"layers": (1, 3), "features": 2, "rope_scaling": LLAMA3}, ("speculators", "flat")),
    "first": ("eagle3", {"layers": (0, 2, 4)}, ("speculators",)),
    "axes": (
        "eagle3",
        {"positions": "axes", "mrope_section": (2, 1, 1), "mrope_interleaved": True, "pictures": "dropped"},
        ("speculators", "flat"),
    ),
    "qwen3": ("eagle3", {"qk_norm": True}, ("speculators",)),
    "parallel": ("eagle3", {**MAPPED, **PARALLEL}, ("speculators", "flat")),
    "dflash": ("dflash", BLOCK, ("speculators", "flat")),
    "dflash-last": ("dflash", {**BLOCK, "layers": (0, -1), "rope_scaling": LLAMA3}, ("flat",)),
    "dflash-part": ("dflash", {**BLOCK, **MAPPED, "own_head": True, "from_anchor": True}, ("speculators",)),
    "dspark": ("dflash", {**BLOCK, **HEAD, "head": "gated", "from_anchor": True, "confidence": True}, ("speculators",)),
    "dspark-part": ("dflash", {**BLOCK, **HEAD, **MAPPED, "own_head": True, "head": "rnn"}, ("speculators",)),
    "confidence": ("dflash", {**BLOCK, "confidence": True, "confidence_reads_token": False}, ("speculators",)),
    "dflash2": (
        "dflash",
        {**BLOCK, **HEAD, "head": "dflash2", "head_candidates": 4, "convolution_group": 8},
        ("flat",),
    ),
    "domino": (
        "dflash",
        {**BLOCK, **HEAD, "head": "domino", "head_state": 10, "plain_prefix": 1, "from_anchor": True},
        ("flat",),
    ),
}
WAYS = [(name, to) for name, (_, _, layouts) in NETWORKS.items() for to in layouts]
NO_WAYS = [
    (name, to) for name, to in ((n, t) for n in NETWORKS for t in ("speculators", "flat")) if (name, to) not in WAYS
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "llama"
    MODEL.save_pretrained(folder)
    return folder


def network(name: str, target: Path | str = "") -> Any:
    """Return a network of the table with random weights and tables."""
    system, options, _ = NETWORKS[name]
    made: Any = draft_network(system, MODEL, target=str(target), **options)
    for weight in made.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 0.8, 0.3)
    if made.config.has_draft_vocabulary:
        ids = torch.arange(40) + torch.arange(40).div(2, rounding_mode="floor")
        made.d2t.copy_(ids - torch.arange(40))
        made.t2d.copy_(torch.zeros(61, dtype=torch.bool).index_fill(0, ids, True))
    return made


@pytest.mark.parametrize(("name", "to"), WAYS)
def test_export_and_import_is_the_identity(tmp_path: Path, target: Path, name: str, to: Any) -> None:
    made = network(name, target)
    save_network(made, tmp_path / "own")
    back = read_network(export_drafter(tmp_path / "own", tmp_path / "out", to))
    written = {
        "draft_vocab_size": made.draft_vocabulary.size,
        **({"target_hidden_size": 32} if made.system == "eagle3" else {}),
    }
    assert asdict(back.config.for_depth(6)) == {**asdict(made.config), **written}
    assert back.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in back.state_dict().items())


@pytest.mark.parametrize(("name", "to"), NO_WAYS)
def test_networks_a_layout_cannot_express_are_refused(tmp_path: Path, target: Path, name: str, to: Any) -> None:
    save_network(network(name, target), tmp_path / "own")
    with pytest.raises(InputError, match="has no place for"):
        export_drafter(tmp_path / "own", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_the_targets_is_shared(tmp_path: Path, target: Path) -> None:
    """Some folders of DFlash hold a copy of the target's LM head."""
    made = draft_network("dflash", MODEL, target=str(target), own_head=True, **BLOCK)
    made.get_parameter("lm_head.weight").data.copy_(MODEL.get_output_embeddings().weight)
    save_network(made, tmp_path / "own")
    drafter: Any = mmdec.load_drafter(export_drafter(tmp_path / "own", tmp_path / "out", "speculators"), MODEL)
    assert not drafter.network.config.own_head
    assert not hasattr(drafter.network, "lm_head")


@pytest.mark.parametrize(("given", "drafted"), [(None, 3), (2, 2)])
def test_a_block_is_drafted_whole_unless_asked_otherwise(
    given: int | None, drafted: int, tmp_path: Path, target: Path
) -> None:
    save_network(network("dflash", target), tmp_path / "own")
    folder = export_drafter(tmp_path / "own", tmp_path / "out", "speculators", num_speculative_tokens=given)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafted
    assert f'"num_speculative_tokens": {drafted}' in (folder / "README.md").read_text()
    with pytest.raises(InputError, match="`num_speculative_tokens` must be at most 3, what a block drafts"):
        export_drafter(tmp_path / "own", tmp_path / "more", "speculators", num_speculative_tokens=4)
    with pytest.raises(InputError, match="`num_speculative_tokens` must be left out for the flat layout"):
        export_drafter(tmp_path / "own", tmp_path / "flat", "flat", num_speculative_tokens=2)


def test_fields_that_engines_default_differently_are_written(tmp_path: Path, target: Path) -> None:
    save_network(network("part", target), tmp_path / "own")
    folder = export_drafter(tmp_path / "own", tmp_path / "out", "speculators", num_speculative_tokens=5)
    config = json.loads((folder / "config.json").read_text())
    assert "model_type" not in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert config["norm_before_residual"] is True
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 40
    inner = config["transformer_layer_config"]
    assert (inner["vocab_size"], inner["rope_theta"], inner["max_position_embeddings"]) == (61, 10000.0, 256)
    assert inner["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    proposal = config["speculators_config"]
    assert proposal["proposal_methods"][0]["speculative_tokens"] == 5
    assert proposal["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)}
    flat = export_drafter(tmp_path / "own", tmp_path / "flat", "flat")
    config = json.loads((flat / "config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in config  # the default layers: every reader agrees without ids
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]
    assert config["model_type"] == "llama"
    assert load_file(flat / "model.safetensors")["midlayer.hidden_norm.weight"].shape == (32,)


@pytest.mark.parametrize("name", ["plain", "parallel", "dflash"])
def test_an_exported_folder_drafts_here(tmp_path: Path, target: Path, name: str) -> None:
    save_network(network(name, target), tmp_path / "own")
    inputs = prompts(2)
    expected = MODEL.generate(**inputs, max_new_tokens=10, do_sample=False)
    for to in ("speculators", "flat"):
        folder = export_drafter(tmp_path / "own", tmp_path / to, to)  # type: ignore[arg-type]
        result = mmdec.generate(MODEL, inputs, folder, num_speculative_tokens=3, max_new_tokens=10, do_sample=False)
        assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("system", ["eagle", "msd", "specvlm", "vispec", "flash"])
def test_systems_without_an_engine_are_refused(tmp_path: Path, system: str) -> None:
    save_network(draft_network(system, MODEL), tmp_path / "own")
    with pytest.raises(InputError, match=f"holds {system}, which no engine reads"):
        export_drafter(tmp_path / "own", tmp_path / "out", "speculators")


def test_missing_and_wrong_folders_are_refused(tmp_path: Path, target: Path) -> None:
    save_network(network("plain"), tmp_path / "own")
    language_model(vocab_size=70, num_hidden_layers=6).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="`model` must be given"):
        export_drafter(tmp_path / "own", tmp_path / "out", "flat")
    with pytest.raises(InputError, match="must have 61 tokens"):
        export_drafter(tmp_path / "own", tmp_path / "out", "flat", model=tmp_path / "other")
    with pytest.raises(InputError, match="`to` must be one of"):
        export_drafter(tmp_path / "own", tmp_path / "out", "gguf")  # type: ignore[arg-type]
    save_network(draft_network("eagle3", MODEL, pictures="projected"), tmp_path / "projected")
    with pytest.raises(InputError, match="projected embeddings"):
        export_drafter(tmp_path / "projected", tmp_path / "out", "speculators", model=target)


def test_the_command_exports_a_drafter(tmp_path: Path, target: Path) -> None:
    save_network(network("plain"), tmp_path / "own")
    paths = [str(tmp_path / "own"), str(tmp_path / "out")]
    call = ["export", "drafter", *paths, "--to", "flat", "--model", str(target), "--json"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"output": str(tmp_path / "out")}
