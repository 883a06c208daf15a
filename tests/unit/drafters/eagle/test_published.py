"""Tests published draft networks: their real tensor names, small sizes, and outputs against a simple reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from typer.testing import CliRunner

import mmdec
from mmdec.cli.convert import app
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.errors import InputError
from mmdec.pretrained.drafters import convert, read_network
from tests.support.tiny_text import language_model, prompts
from tests.support.tiny_vlm import Picture, batch_of, vision_model

HEADS, KV, DIM, SIZE, INNER, TOKENS = 4, 2, 8, 32, 40, 64
BASE: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "hidden_size": SIZE,
    "vocab_size": TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
LLAVA = {**BASE, "model_type": "llava", "mm_vision_tower": "openai/clip-vit-large-patch14-336"}
QWEN = {
    **BASE,
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 32},
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}


def layer(bias: bool = False, norm: bool = False) -> dict[str, Tensor]:
    """Return an EAGLE-1/2 checkpoint; with bias and norm MSD's for Qwen2-VL."""
    torch.manual_seed(0)
    shapes = {
        "embed_tokens.weight": (TOKENS, SIZE),
        "fc.weight": (SIZE, 2 * SIZE),
        "fc.bias": (SIZE,),
        "layers.0.self_attn.q_proj.weight": (HEADS * DIM, SIZE),
        "layers.0.self_attn.k_proj.weight": (KV * DIM, SIZE),
        "layers.0.self_attn.v_proj.weight": (KV * DIM, SIZE),
        "layers.0.self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": (INNER, SIZE),
        "layers.0.mlp.up_proj.weight": (INNER, SIZE),
        "layers.0.mlp.down_proj.weight": (SIZE, INNER),
        "layers.0.post_attention_layernorm.weight": (SIZE,),
    }
    if bias:
        shapes |= {f"layers.0.self_attn.{n}_proj.bias": (r * DIM,) for n, r in (("q", HEADS), ("k", KV), ("v", KV))}
    if norm:
        shapes["layers.0.input_layernorm.weight"] = (SIZE,)
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def vispec(bias: bool = False, queries: int = 2) -> dict[str, Tensor]:
    shapes = {
        "imadpt.q": (queries, HEADS, DIM),
        "imadpt.k_proj.weight": (SIZE, SIZE),
        "imadpt.v_proj.weight": (SIZE, SIZE),
        "imadpt.o_proj.weight": (SIZE, SIZE),
        "img_fc.weight": (SIZE, 2 * SIZE),
        "img_fc.bias": (SIZE,),
    }
    if bias:
        shapes |= {"imadpt.k_proj.bias": (SIZE,), "imadpt.v_proj.bias": (SIZE,)}
    return layer(bias) | {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def published(folder: Path, state: dict[str, Tensor], config: dict[str, Any], pickled: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


def naive_layer(state: dict[str, Tensor], x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return Llama's decoder layer on x (n, H), causal, with or without its first norm, as the checkpoint has it."""

    def norm(name: str, x: Tensor) -> Tensor:
        weight = state.get(f"layers.0.{name}.weight")
        return x if weight is None else x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def project(name: str, x: Tensor) -> Tensor:
        bias = state.get(f"layers.0.self_attn.{name}_proj.bias", torch.zeros(()))
        return (x @ state[f"layers.0.self_attn.{name}_proj.weight"].T + bias).unflatten(-1, (-1, DIM))

    def rotate(x: Tensor) -> Tensor:
        angles = positions[:, None].float() / theta ** (torch.arange(0, DIM, 2) / DIM)
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    normed = norm("input_layernorm", x)
    q, k, v = rotate(project("q", normed)), rotate(project("k", normed)), project("v", normed)
    out = []
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head // 2].T / math.sqrt(DIM)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out.append(scores.softmax(-1) @ v[:, head // 2])
    x = x + torch.cat(out, -1) @ state["layers.0.self_attn.o_proj.weight"].T
    y = norm("post_attention_layernorm", x)
    gate, up = (y @ state[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (silu(gate) * up) @ state["layers.0.mlp.down_proj.weight"].T


def fc(state: dict[str, Tensor], embeds: Tensor, features: Tensor) -> Tensor:
    return torch.cat([embeds, features], -1) @ state["fc.weight"].T + state["fc.bias"]


def row(length: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    visual = torch.zeros(length, dtype=torch.bool)
    visual[3:9] = True
    return torch.randn(length, SIZE, generator=drawn), torch.randn(length, SIZE, generator=drawn), visual


def hidden(network: DraftNetwork, embeds: Tensor, features: Tensor, visual: Tensor) -> Tensor:
    """Ours, of a whole row."""
    prompt = network.prompt(embeds, features, visual)
    return network(prompt.states[None], prompt.positions[None])[0][0]


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_a_converted_eagle_equals_a_naive_reading(tmp_path: Path, pickled: bool, bias: bool) -> None:
    state = layer(bias)
    config = {**BASE, "model_type": "llama", "rope_theta": 500000.0}
    network = read_network(convert(published(tmp_path / "in", state, config, pickled), tmp_path / "out"))
    assert network.system == "eagle"
    assert "embed_tokens.weight" not in network.state_dict()
    embeds, features, visual = row()
    expected = naive_layer(state, fc(state, embeds[1:], features[:-1]), torch.arange(13), 500000.0)
    torch.testing.assert_close(hidden(network, embeds, features, visual), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounds", [0, 4])
@pytest.mark.parametrize("qwen", [False, True])
def test_a_converted_msd_gives_the_published_logits(tmp_path: Path, qwen: bool, rounds: int) -> None:
    """Follow its code, with two images: embeddings and mask are moved by one, fc runs everywhere, then visual columns
    are overwritten. LLaVA's form has no first norm and no biases of attention; Qwen2-VL's has both, and one number for
    all three axes of a position. The last columns come as later rounds bring them, each over the cache."""
    state, config = layer(qwen, qwen), QWEN if qwen else LLAVA
    network = read_network(convert(published(tmp_path / "in", state, config), tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["visual_token"] == "next"
    assert (network.config.input_norm, network.config.attention_bias) == (qwen, qwen)
    embeds, features, visual = row(20)
    visual[12:14] = True
    moved, mask = embeds[1:], visual[1:]
    states = fc(state, moved, features[:-1])
    states[mask] = moved[mask]
    expected = naive_layer(state, states, torch.arange(19), 1e6 if qwen else 1e4)
    end = 20 - rounds  # of the prompt
    prompt = network.prompt(embeds[:end], features[:end], visual[:end])
    parts, past = [network(prompt.states[None], prompt.positions[None])], None
    for column in range(end - 1, 19):
        pairs = [pair for _, pair in parts]
        past = torch.cat([keys for keys, _ in pairs], 2), torch.cat([values for _, values in pairs], 2)
        fresh = network.fuse(embeds[None, column + 1 : column + 2], features[None, column : column + 1])
        parts.append(network(fresh, torch.tensor([[column]]), past))
    result = torch.cat([out for out, _ in parts], 1)[0]
    head = state["embed_tokens.weight"].T
    torch.testing.assert_close(result @ head, expected @ head, rtol=0, atol=1e-4)


@pytest.mark.parametrize("qwen", [False, True])
def test_a_converted_vispec_equals_a_naive_reading(tmp_path: Path, qwen: bool) -> None:
    state, config = vispec(qwen, 3), {**BASE, "model_type": "llava_next", "vision_config": {}}
    network = read_network(convert(published(tmp_path / "in", state, config), tmp_path / "out"))
    assert network.system == "vispec"
    embeds, features, visual = row()
    image = embeds[3:9]
    keys, values = (
        (image @ state[f"imadpt.{n}_proj.weight"].T + state.get(f"imadpt.{n}_proj.bias", torch.zeros(()))) for n in "kv"
    )
    heads = []
    for head in range(HEADS):
        part = slice(head * DIM, (head + 1) * DIM)
        scores = state["imadpt.q"][:, head] @ keys[:, part].T / math.sqrt(DIM)
        heads.append(scores.softmax(-1) @ values[:, part])
    out = torch.cat(heads, -1) @ state["imadpt.o_proj.weight"].T  # (3, H)

    def text(t: int, latest: Tensor) -> Tensor:
        mixed = torch.cat([features[t], latest]) @ state["img_fc.weight"].T + state["img_fc.bias"]
        return fc(state, embeds[t + 1], mixed)

    states = [text(t, torch.zeros(SIZE)) for t in (0, 1)] + [out[0], out[1]] + [text(t, out[2]) for t in range(8, 13)]
    places = torch.tensor([0, 1, 6, 7, *range(8, 13)])
    expected = naive_layer(state, torch.stack(states), places, 1e4)
    prompt = network.prompt(embeds, features, visual)
    assert prompt.positions.tolist() == places.tolist()
    torch.testing.assert_close(hidden(network, embeds, features, visual), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prompt.condition, out[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("state", "config"), [(layer(), LLAVA), (vispec(), LLAVA), (layer(True, True), QWEN)])
def test_a_published_drafter_leaves_the_text_as_it_is(tmp_path: Path, state: Any, config: Any) -> None:
    model = vision_model("llava")
    source = published(tmp_path / "in", state, config)
    drafter = mmdec.load_drafter(source, model)  # as it is
    assert drafter.name == mmdec.load_drafter(convert(source, tmp_path / "out"), model).name
    inputs = batch_of("llava", [[[5, 6], Picture.random(1), [7, 8]]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    out = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(6, 3), **options)
    assert torch.equal(out.sequences, model.generate(**inputs, **options))


def test_a_smaller_published_vocabulary_needs_an_option(tmp_path: Path) -> None:
    """MSD's LLaVA has 32000 tokens, llava-hf's 64 more: an error that names both, and an option."""
    state, model = layer(), vision_model("llava")
    state["embed_tokens.weight"] = state["embed_tokens.weight"][:60]
    source = published(tmp_path / "in", state, LLAVA)
    with pytest.raises(InputError, match=r"must have 60 tokens .* but has 64.*--vocab-size 64"):
        mmdec.load_drafter(convert(source, tmp_path / "out"), model)
    mmdec.load_drafter(convert(source, tmp_path / "longer", vocab_size=64), model)
    with pytest.raises(InputError, match="`vocab_size` must be a whole number"):
        convert(source, tmp_path / "none", vocab_size=0)


def test_a_converted_file_holds_the_networks_own_weights_in_their_precision(tmp_path: Path) -> None:
    state = {name: value.half() for name, value in layer().items()}
    state |= {"lm_head.weight": torch.zeros(TOKENS, SIZE), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    out = convert(published(tmp_path / "in", state, LLAVA), tmp_path / "out", system="eagle")
    assert json.loads((out / "config.json").read_text())["system"] == "eagle"
    weights = sum(v.numel() * 2 for k, v in layer().items() if k != "embed_tokens.weight")
    assert abs((out / "model.safetensors").stat().st_size - weights) < 4096


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"midlayer.extra.weight": torch.zeros(1)}, {}, "first layer that reads"),
        ({"d2t": torch.zeros(3, dtype=torch.long)}, {}, "holds 'd2t'"),
        ({"fc.weight": torch.zeros(SIZE, 3 * SIZE)}, {}, "EAGLE-3"),
        ({"fc_gate.weight": torch.zeros(SIZE, 2 * SIZE)}, {}, "FLASH"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(1)}, {}, "one layer"),
        ({"layers.0.mlp.gate_proj.weight": None}, {}, "must hold 'layers.0.mlp.gate_proj.weight'"),
        ({"layers.0.mlp.up_proj.weight": None}, {}, "must hold all weights"),
        ({"extra.weight": torch.zeros(1)}, {}, "extra.weight"),
        ({"fc.bias": torch.full((SIZE,), math.nan)}, {}, "finite"),
        ({}, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotations"),
        ({}, {"num_attention_heads": 5}, "heads"),
        ({}, {"num_attention_heads": None}, "heads"),
        ({"embed_tokens.weight": None}, {"vocab_size": None}, "vocab_size"),
    ],
)
def test_unconvertible_folders_are_refused(
    tmp_path: Path, change: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    state = {name: value for name, value in (layer() | change).items() if value is not None}
    source = published(tmp_path / "in", state, {**LLAVA, **settings})
    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/mmdec-was-here"),))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        convert(tmp_path, tmp_path / "out")
    source = published(tmp_path / "in", layer(), LLAVA)
    for content in (b"", b"text", (source / "pytorch_model.bin").read_bytes()[:2000]):
        (source / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match="`source` must hold named tensors"):
            convert(source, tmp_path / "out")
    for bad in ({"fc.weight": Evil()}, [1, 2], {"fc.weight": 3}):
        torch.save(bad, source / "pytorch_model.bin")
        with pytest.raises(InputError, match="`source` must hold named tensors"):
            convert(source, tmp_path / "out")
    assert not Path("/tmp/mmdec-was-here").exists()
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="`source` must hold its weights"):
        convert(source, tmp_path / "out")
    (source / "pytorch_model.bin").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="lies outside"):
        convert(source, tmp_path / "out")
    with pytest.raises(InputError, match="`directory` must be new or empty"):
        convert(source, source)
    with pytest.raises(InputError, match="`system` must be"):
        convert(source, tmp_path / "out", system="medusa")  # type: ignore[arg-type] # what a caller may do


def test_the_command_converts_a_folder(tmp_path: Path) -> None:
    source = published(tmp_path / "in", vispec(), LLAVA)
    result = CliRunner().invoke(app, ["drafter", str(source), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert read_network(tmp_path / "out").system == "vispec"
    wrong = CliRunner().invoke(app, ["drafter", str(source), str(tmp_path / "other"), "--system", "eagle"])
    assert isinstance(wrong.exception, InputError)


EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": SIZE,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": TOKENS,
    "draft_vocab_size": 40,
}
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}
INTERLEAVED = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
IDS = torch.arange(40) + torch.arange(40) // 2


def eagle3(prefix: str = "midlayer.", features: int = 3, mask: bool = False) -> dict[str, Tensor]:
    """Return an EAGLE-3 checkpoint as SafeAILab, SpecForge, AngelSlim and NVIDIA publish it."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (SIZE, features * SIZE),
        "norm.weight": (SIZE,),
        "lm_head.weight": (40, SIZE),
        **{
            f"{prefix}{name}.weight": (SIZE,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, 2 * SIZE),
        f"{prefix}self_attn.k_proj.weight": (KV * DIM, 2 * SIZE),
        f"{prefix}self_attn.v_proj.weight": (KV * DIM, 2 * SIZE),
        f"{prefix}self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.up_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.down_proj.weight": (SIZE, INNER),
    }
    if mask:
        shapes["mask_hidden"] = (1, 1, features * SIZE)
    state = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    known = torch.zeros(TOKENS, dtype=torch.bool)
    known[IDS] = True
    return state | {"d2t": IDS - torch.arange(40), "t2d": known}


def test_every_flat_eagle3_format_gives_one_network(tmp_path: Path) -> None:
    """SafeAILab's pickle, SpecForge's safetensors, NeMo's prefix, speculators' names, with tables of either kind."""
    state, table = eagle3(), torch.randn(TOKENS, SIZE)
    ids = {**state, "d2t": IDS}  # the tokens themselves, where others have offsets
    single = {name: value for name, value in state.items() if name != "d2t"}
    forms: dict[str, tuple[dict[str, Tensor], bool]] = {
        "pickle": (state, True),
        "safetensors": (state, False),
        "prefix": ({f"model.{name}": value for name, value in state.items()}, False),
        "layers": (eagle3("layers.0."), False),
        "ids": (ids, True),
        "t2d": (single, True),
        "verifier": ({**state, "verifier_norm.weight": torch.ones(SIZE), "rotary_emb.inv_freq": torch.ones(4)}, False),
    }
    expected = None
    for name, (given, pickled) in forms.items():
        network = read_network(published(tmp_path / name, given, EAGLE3, pickled))
        assert network.config.layers == ()
        assert network.draft_vocabulary.token_ids(torch.arange(40)).tolist() == IDS.tolist()
        expected = expected or network.state_dict()
        torch.testing.assert_close(network.state_dict(), expected, rtol=0, atol=0)
    embedded = read_network(published(tmp_path / "embed", {**state, "embed_tokens.weight": table}, EAGLE3))
    assert torch.equal(embedded.get_parameter("embed_tokens.weight"), table)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"layers": (), "rope_theta": 1e4, "positions": "temporal", "norm_before_residual": False}),
        ({"rope_theta": 5e5, "head_dim": DIM}, {"rope_theta": 5e5, "head_dim": DIM}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, {"layers": (1, 23, 44)}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}}, {"layers": (23, 29, 35)}),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, {"layers": (1, 17, 32)}),
        ({"rope_scaling": MROPE}, {"positions": "axes", "mrope_section": (2, 1, 1), "mrope_interleaved": False}),
        ({"rope_scaling": INTERLEAVED}, {"positions": "axes", "mrope_interleaved": True}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_type": "linear"}},
        ),
        ({"norm_before_residual": True, "norm_output": True}, {"norm_before_residual": True, "norm_output": True}),
    ],
)
def test_eagle3_options_are_read_from_the_config(
    tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    config = read_network(published(tmp_path / "in", eagle3(), {**EAGLE3, **settings})).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_flat_peagle_folders_need_a_mask_token(tmp_path: Path) -> None:
    config = {**EAGLE3, "architectures": ["PEagleDraftModel"], "mask_token_id": 9}
    network = read_network(published(tmp_path / "in", eagle3(mask=True), config))
    assert getattr(network.config, "mask_token", None) == 9
    with pytest.raises(InputError, match="mask_token_id"):
        read_network(published(tmp_path / "without", eagle3(mask=True), EAGLE3))


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"midlayer.self_attn.extra.weight": torch.ones(2)}, {}, "holds 'layers.0.self_attn.extra.weight'"),
        ({"hidden.bias": torch.ones(2)}, {}, "holds 'hidden.bias'"),
        ({"norm.weight": None}, {}, "lacks 'norm.weight'"),
        ({"lm_head.weight": None}, {}, "lm_head.weight"),
        ({"d2t": None, "t2d": None}, {}, "must hold 'd2t'"),
        ({"d2t": torch.zeros(40, dtype=torch.long)}, {}, "those of 't2d'"),
        ({"d2t": torch.full((40,), 60), "t2d": None}, {}, "different tokens below 64"),
        ({}, {"target_hidden_size": 20}, "target_hidden_size"),
        ({}, {"target_hidden_size": 16}, "own_embedding"),
        ({}, {"norm_before_fc": True}, "'input_norm.weight'"),
        ({"fc_norm.0.weight": torch.ones(SIZE)}, {"fc_norm": False}, "fc_norm"),
        ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({}, {"hidden_act": "gelu"}, "hidden_act"),
        ({}, {"model_type": "mistral"}, "model_type"),
        ({}, {"layer_types": ["sliding_attention"]}, "layer_types"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "at least 1"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 5]}, "one a feature"),
        ({}, {"num_attention_heads": 5}, "heads"),
    ],
)
def test_unsupported_eagle3_folders_are_refused(
    tmp_path: Path, change: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    state = {name: value for name, value in (eagle3() | change).items() if value is not None}
    with pytest.raises(InputError, match=message):
        read_network(published(tmp_path / "in", state, {**EAGLE3, **settings}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculators_model_type": "mtp"}, "MTP"),
        ({"speculators_model_type": "owl"}, "'owl'"),
    ],
)
def test_unsupported_drafters_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    state = {"fc.weight": torch.zeros(SIZE, 3 * SIZE), "hidden_norm.weight": torch.ones(SIZE)}
    source = published(tmp_path / "in", state, {"num_attention_heads": 4, **settings})
    for load in (lambda: mmdec.load_drafter(source, language_model()), lambda: convert(source, tmp_path / "out")):
        with pytest.raises(InputError, match=message):
            load()


def test_published_folders_draft_as_they_are(tmp_path: Path) -> None:
    """EAGLE-1/2, EAGLE-3 and P-EAGLE: by folder, and the text stays the model's."""
    model: Any = language_model(num_hidden_layers=5, vocab_size=TOKENS)
    inputs = prompts(2)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    folders = [
        published(tmp_path / "eagle", layer(), {**BASE, "model_type": "llama"}),
        published(tmp_path / "eagle3", eagle3(), EAGLE3),
        published(tmp_path / "peagle", eagle3(mask=True), {**EAGLE3, "mask_token_id": 9}, pickled=False),
    ]
    for folder in folders:
        result = mmdec.generate(model, inputs, folder, num_speculative_tokens=6, max_new_tokens=12, do_sample=False)
        assert torch.equal(result.sequences, expected), folder
    drafter: Any = mmdec.load_drafter(folders[1], model)
    assert drafter.needs.layers == (1, 1, 1)  # boundaries 2, 5 // 2 and 5 - 3


def test_an_embedding_that_is_the_targets_is_shared(tmp_path: Path) -> None:
    model: Any = language_model(num_hidden_layers=5, vocab_size=TOKENS)
    table = model.get_input_embeddings().weight.detach()
    for name, given, own in (("same", table, False), ("other", table + 1, True)):
        folder = published(tmp_path / name, {**eagle3(), "embed_tokens.weight": given}, EAGLE3)
        drafter: Any = mmdec.load_drafter(folder, model)
        assert drafter.network.config.own_embedding is own
        assert torch.equal(drafter.embedding.weight, given)
