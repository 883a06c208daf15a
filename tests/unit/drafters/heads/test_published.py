"""Tests published heads: the layouts of Medusa, Hydra, Hydra++, ReDrafter and MLPSpeculator, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmdec
from mmdec.drafters.heads.checkpoint import UNREAD
from mmdec.drafters.heads.network import HeadsConfig
from mmdec.errors import InputError
from mmdec.pretrained.drafters import convert, read_network, save_network
from mmdec.pretrained.export import export_drafter
from tests.support.draft_networks import FORMS_OF, draft_network
from tests.support.naive_heads import naive_heads
from tests.support.tiny_text import VOCABULARY, language_model, prompts

SIZE, HEADS = 32, 3
MODEL: Any = language_model(num_hidden_layers=2)
Shapes = dict[str, tuple[int, ...]]


def medusa(blocks: int = 1, prefix: str = "") -> Shapes:
    shapes: Shapes = {}
    for head in range(HEADS):
        for block in range(blocks):
            name = f"{prefix}{head}.{block}.linear."
            shapes |= {name + "weight": (SIZE, SIZE), name + "bias": (SIZE,)}
        shapes[f"{prefix}{head}.{blocks}.weight"] = (VOCABULARY, SIZE)
    return shapes


def hydra(blocks: int = 2, dropout: bool = False) -> Shapes:
    shapes: Shapes = {"input_embed_fn.weight": (VOCABULARY, SIZE)}
    for head in range(HEADS):
        for block in range(blocks):
            inputs, name = (SIZE, block) if block else ((2 + head) * SIZE, 0)
            name = f"hydra_mlp.{head}.{2 * name + 1 if dropout else name}."
            for part in ("linear",) if block else ("linear", "res_connection"):
                shapes |= {f"{name}{part}.weight": (SIZE, inputs), f"{name}{part}.bias": (SIZE,)}
        output = f"hydra_lm_head.{head}.{'1.' if dropout else ''}"
        shapes |= {output + "weight": (VOCABULARY, SIZE), output + "bias": (VOCABULARY,)}
    return shapes


def hydra_plus() -> Shapes:
    prefix = "prefix_embeding_layer."
    shapes: Shapes = {prefix + "embed_tokens.weight": (VOCABULARY, SIZE), prefix + "norm.weight": (SIZE,)}
    layer = prefix + "layers.0."
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (SIZE, SIZE) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (48, SIZE) for name in ("gate", "up")}
    shapes |= {f"{layer}{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
    return {**shapes, f"{layer}mlp.down_proj.weight": (SIZE, 48), **hydra(dropout=True)}


def redrafter(inner: int = 2 * SIZE, summed: bool = False) -> Shapes:
    shapes: Shapes = {"emb_norm.weight": (SIZE,), "lm_head.1.weight": (VOCABULARY, inner)}
    shapes |= {"lm_head.0.linear.weight": (inner, inner), "lm_head.0.linear.bias": (inner,)}
    if not summed:
        shapes |= {"rnn_u.weight": (SIZE, SIZE), "rnn_u.bias": (SIZE,), "rnn_w.weight": (SIZE, SIZE)}
    narrow: Shapes = {"input_proj.weight": (inner, 2 * SIZE), "input_proj.bias": (inner,)}
    return shapes if inner == 2 * SIZE else {**shapes, **narrow}


def mlp(inner: int = 24, count: int = HEADS) -> Shapes:
    shapes: Shapes = {}
    for head in range(count):
        shapes |= {f"speculator.{name}.{head}.weight": (VOCABULARY, inner) for name in ("emb", "head")}
        shapes |= {f"speculator.proj.{head}.weight": (inner, inner if head else SIZE)}
        shapes |= {f"speculator.ln.{head}.{name}": (inner,) for name in ("weight", "bias")}
    return shapes


MEDUSA: dict[str, Any] = {"medusa_num_heads": HEADS, "base_model_name_or_path": "someone/llama"}
HYDRA: dict[str, Any] = {"hydra_num_heads": HEADS, "grounded_heads": True, "base_model_name_or_path": "someone/llama"}
PLUS: dict[str, Any] = {**HYDRA, "hydra_head_arch": "prefix-mlp", "num_attention_heads": 4}
REDRAFTER: dict[str, Any] = {"model_type": "recurrent_drafting_drafter", "hidden_size": SIZE}
MLP: dict[str, Any] = {"model_type": "mlp_speculator", "n_predict": HEADS, "emb_dim": SIZE}
LAYOUTS: dict[str, tuple[Shapes, dict[str, Any], dict[str, Any]]] = {  # tensors, config.json, fields that are read
    "medusa": (medusa(), MEDUSA, {"kind": "medusa", "heads": 3, "blocks": 1, "target": "someone/llama"}),
    "medusa-deep": (medusa(2, "medusa_head."), {}, {"kind": "medusa", "blocks": 2, "lm_heads": "each"}),
    "hydra": (hydra(), HYDRA, {"kind": "hydra", "heads": 3, "blocks": 2, "target": "someone/llama"}),
    "hydra++": (hydra_plus(), PLUS, {"prefix_layer": True, "blocks": 2, "num_attention_heads": 4, "head_dim": 8}),
    "redrafter": (redrafter(), REDRAFTER, {"kind": "recurrent", "output_size": 64, "summed": False}),
    "redrafter-narrow": (redrafter(40), {}, {"kind": "recurrent", "output_size": 40}),
    "redrafter-sum": (redrafter(40, True), REDRAFTER, {"kind": "recurrent", "summed": True}),
    "mlp": (mlp(), MLP, {"kind": "mlp", "heads": 3, "lm_heads": "each", "tied": False}),
    "mlp-scaled": (mlp(SIZE), {**MLP, "scale_input": True}, {"scale_input": True, "output_size": SIZE}),
}


def tensors(shapes: Shapes) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.3 + (0.8 if len(shape) == 1 else 0) for name, shape in shapes.items()}


def published(folder: Path, state: dict[str, Tensor], config: dict[str, Any], pickle: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(state, folder / pickle)
    else:
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_read_and_drafts(name: str, tmp_path: Path) -> None:
    """Converted or not, from safetensors or a pickle; the text stays the model's own."""
    shapes, config, fields = LAYOUTS[name]
    state = tensors(shapes)
    pickle = next((f"{kind}_lm_head.pt" for kind in ("medusa", "hydra") if name.startswith(kind)), "")
    folder = published(tmp_path / "in", state, config, pickle)
    network = read_network(folder)
    read: Any = network.config
    assert {field: getattr(read, field) for field in fields} == fields
    again = read_network(convert(folder, tmp_path / "own"))
    assert again.config == read
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in network.state_dict().items())
    drafter: Any = mmdec.load_drafter(folder, MODEL)
    expected = MODEL.generate(**prompts(2), max_new_tokens=16, do_sample=False)
    made = mmdec.generate(MODEL, prompts(2), drafter, num_speculative_tokens=(7, 3), max_new_tokens=16, do_sample=False)
    assert torch.equal(made.sequences, expected)
    assert drafter.name.startswith("heads-")
    assert max(max(round_.drafted) for round_ in made.rounds) > 0


def test_tensors_keep_their_places(tmp_path: Path) -> None:
    """A head of the second level, by hand from the published tensors."""
    state = tensors(hydra(blocks=1))
    network: Any = read_network(published(tmp_path / "in", state, HYDRA))
    hidden, words = torch.randn(SIZE), [5, 9]
    inputs = torch.cat([hidden, *(MODEL.get_input_embeddings().weight[word] for word in words)])
    block = "hydra_mlp.1.0."
    inner = torch.nn.functional.silu(state[block + "linear.weight"] @ inputs + state[block + "linear.bias"])
    plain = state[block + "res_connection.weight"] @ inputs + state[block + "res_connection.bias"]
    expected = state["hydra_lm_head.1.weight"] @ (plain + inner) + state["hydra_lm_head.1.bias"]
    own = dict(network.state_dict())
    embedding = MODEL.get_input_embeddings().weight
    torch.testing.assert_close(naive_heads(own, network.config, hidden, words, embedding, embedding), expected)
    state = tensors(medusa())
    network = read_network(published(tmp_path / "medusa", state, MEDUSA))
    moved = hidden + torch.nn.functional.silu(state["1.0.linear.weight"] @ hidden + state["1.0.linear.bias"])
    drafted = naive_heads(dict(network.state_dict()), network.config, hidden, words, embedding, embedding)
    torch.testing.assert_close(drafted, state["1.1.weight"] @ moved)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    MODEL.config.save_pretrained(folder)
    return folder


EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {  # the published layout, and options of the network
    "medusa": ("medusa", {"kind": "medusa", "lm_heads": "each"}),
    "hydra": ("hydra", {"blocks": 2, "lm_heads": "each", "lm_head_bias": True}),
    "hydra++": ("hydra++", {"blocks": 2, "lm_heads": "each", "lm_head_bias": True, "prefix_layer": True}),
    "redrafter": ("redrafter", {"kind": "recurrent", "lm_heads": "one"}),
    "redrafter-narrow": ("redrafter-narrow", {"kind": "recurrent", "lm_heads": "one", "inner_size": 40}),
    "redrafter-sum": ("redrafter-sum", {"kind": "recurrent", "lm_heads": "one", "inner_size": 40, "summed": True}),
    "mlp": ("mlp", {"kind": "mlp", "lm_heads": "each", "inner_size": 24}),
    "mlp-tied": ("", {"kind": "mlp", "lm_heads": "one", "tied": True, "scale_input": True}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_export_and_import_is_the_identity(name: str, tmp_path: Path, target: Path) -> None:
    """The exported tensors are the published ones, by name and shape, and give the same network."""
    layout, options = EXPORTED[name]
    network: Any = draft_network("heads", MODEL, **{"heads": HEADS, **options})
    save_network(network, tmp_path / "own")
    out = export_drafter(tmp_path / "own", tmp_path / "out", "flat", model=target)
    state = load_file(out / "model.safetensors")
    if layout:
        assert state.keys() == LAYOUTS[layout][0].keys() - UNREAD
    again: Any = read_network(out)
    assert again.max_depth == network.max_depth
    assert again.config.target == str(target)
    layer = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    for field in ("kind", "blocks", "lm_heads", "tied", "summed", *(layer if network.config.prefix_layer else ())):
        assert getattr(again.config, field) == getattr(network.config, field), field
    hidden, tokens = torch.randn(1, 1, SIZE), torch.tensor([[5]])
    embed = MODEL.get_input_embeddings()
    both = [module.heads.step(module.heads.begin(hidden), tokens, 0, embed) for module in (network, again)]
    assert torch.equal(*both)
    for key, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_hydra_gets_a_bias_that_its_code_would_draw(tmp_path: Path, target: Path) -> None:
    save_network(draft_network("heads", MODEL, heads=HEADS, lm_heads="each"), tmp_path / "own")
    state = load_file(export_drafter(tmp_path / "own", tmp_path / "out", "flat", model=target) / "model.safetensors")
    assert all(not state[f"hydra_lm_head.{head}.bias"].any() for head in range(HEADS))


@pytest.mark.parametrize(
    ("options", "to", "match"),
    [
        ({"lm_heads": "each"}, "speculators", "`to` must be flat for heads"),
        ({}, "flat", "`lm_heads: target`. Train with `lm_heads: each`"),
        ({"lm_heads": "each", "previous_head": True}, "flat", "`previous_head`"),
        ({"lm_heads": "each", "kind": "medusa", "attention": True}, "flat", "Medusa can hold, but has `attention`"),
        ({"lm_heads": "each", "blocks": 3}, "flat", "Hydra can hold, but has blocks that differ"),
        ({"lm_heads": "each", "kind": "medusa", "blocks": 2}, "flat", "Medusa can hold, but has blocks that differ"),
        ({"lm_heads": "one", "kind": "recurrent", "lm_head_bias": True}, "flat", "`lm_head_bias`"),
        ({"lm_heads": "each", "kind": "mlp", "prefix_layer": True}, "flat", "`prefix_layer`"),
        ({"lm_heads": "each", "kind": "mlp", "tied": True}, "flat", "Train with `lm_heads: one`"),
    ],
)
def test_heads_that_a_layout_cannot_hold_are_refused(
    options: dict[str, Any], to: Any, match: str, tmp_path: Path, target: Path
) -> None:
    save_network(draft_network("heads", MODEL, **options), tmp_path / "own")
    with pytest.raises(InputError, match=match):
        export_drafter(tmp_path / "own", tmp_path / "out", to, model=target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS_OF["heads"])
def test_heads_of_every_kind_are_the_same_after_saving_and_loading(form: str, tmp_path: Path) -> None:
    network = draft_network("heads", MODEL, **FORMS_OF["heads"][form])
    again = read_network(save_network(network, tmp_path / "own"))
    assert again.config == network.config
    own, read = network.state_dict(), again.state_dict()
    assert own.keys() == read.keys()
    assert all(torch.equal(value, read[key]) for key, value in own.items())


@pytest.mark.parametrize(
    ("trained", "described", "match"),
    [
        ({}, {"attention": True}, r"lacks 'heads\.attention\..*"),
        ({"attention": True}, {"attention": False}, r"holds 'heads\.attention\..*"),
        ({"attention": True}, {"attention": "yes"}, "`attention` must be true or false"),
        ({"attention": True}, {"kind": "hydra"}, "`attention` must be false for the kind hydra"),
    ],
)
def test_attention_that_the_folder_does_not_hold_is_refused(
    trained: dict[str, Any], described: dict[str, Any], match: str, tmp_path: Path
) -> None:
    folder = save_network(draft_network("heads", MODEL, kind="medusa", **trained), tmp_path / "own")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **described}))
    with pytest.raises(InputError, match=match):
        read_network(folder)


def test_a_folder_without_the_field_has_no_attention(tmp_path: Path) -> None:
    network = draft_network("heads", MODEL, kind="medusa")
    folder = save_network(network, tmp_path / "own")
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["attention"]
    file.write_text(json.dumps(fields))
    assert read_network(folder).config == network.config


@pytest.mark.parametrize("copies", [1, 2, HEADS])
def test_tied_tensors_may_be_stored_once_or_for_each_level(copies: int, tmp_path: Path) -> None:
    state = tensors(mlp(SIZE, 1))
    state["speculator.proj.1.weight"] = torch.randn(SIZE, SIZE)
    for name, value in list(state.items()):
        kind, level = name.split(".")[1:3]
        if level == ("1" if kind == "proj" else "0"):
            state |= {name.replace(f".{level}.", f".{copy}."): value.clone() for copy in range(int(level), copies)}
    config = {**MLP, "tie_weights": True}
    network = read_network(published(tmp_path / "in", state, config))
    assert isinstance(network.config, HeadsConfig)
    assert (network.config.tied, network.config.lm_heads, network.config.heads) == (True, "one", HEADS)
    if copies == HEADS:
        state["speculator.emb.2.weight"] += 1
        with pytest.raises(InputError, match=r"hold one tensor for .*emb\.0\.weight' and .*emb\.2\.weight'"):
            read_network(published(tmp_path / "two", state, config))


@pytest.mark.parametrize(
    ("name", "changes", "settings", "match"),
    [
        ("medusa", {"1.1.weight": None}, {}, "hold '1.1.weight' of 61 x 32, but .* does not"),
        ("medusa", {"2.2.weight": (VOCABULARY, SIZE)}, {}, "holds '2.2.weight', 1 unknown in all"),
        ("hydra", {"hydra_mlp.1.0.linear.weight": (SIZE, 64)}, {}, r"'hydra_mlp.1.0.linear.weight' of 32 x 96, .* 64"),
        ("hydra", {"hydra_mlp.1.1.linear.bias": None}, {}, r"hold 'hydra_mlp.1.1.linear.bias' of 32, but .* does not"),
        ("hydra", {"hydra_mlp.0.0.gate": (3,)}, {}, "holds 'hydra_mlp.0.0.gate', 1 unknown in all"),
        ("hydra", {}, {"hydra_head_arch": "eagle-attn"}, "has 'eagle-attn' and 0"),
        ("hydra", {}, {"hidden_state_offset": 1}, "has 'mlp' and 1"),
        ("hydra++", {}, {"num_attention_heads": 5}, "how many heads"),
        ("redrafter", {"rnn_u.weight": (SIZE, 8)}, {}, "'rnn_u.weight' of 32 x 32, but .* holds one of 32 x 8"),
        ("redrafter", {"lm_head.1.weight": None}, {}, "hold 'lm_head.1.weight'"),
        ("redrafter-sum", {}, {"hidden_size": None}, "name its `hidden_size`"),
        ("mlp", {"speculator.ln.1.bias": (7,)}, {}, "'speculator.ln.1.bias' of 24, but .* holds one of 7"),
        ("mlp", {}, {"n_predict": None}, "name its `n_predict`"),
        ("mlp", {}, {"n_predict": 4}, "hold 'speculator.emb.3.weight' of 61 x 24, but .* does not"),
        ("mlp", {}, {"n_predict": 10**9}, "`heads` must be an integer from 1 to 64"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], settings: dict[str, Any], match: str, tmp_path: Path
) -> None:
    shapes, config, _ = LAYOUTS[name]
    merged = {key: shape for key, shape in {**shapes, **changes}.items() if shape is not None}
    folder = published(tmp_path / "in", tensors(merged), {**config, **settings})
    with pytest.raises(InputError, match=match):
        read_network(folder)


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "in", tensors(mlp()), MLP)
    with pytest.raises(InputError, match="be read without `vocab_size`"):
        convert(folder, tmp_path / "out", vocab_size=200)
    with pytest.raises(InputError, match=f"must have {VOCABULARY} tokens"):
        mmdec.load_drafter(folder, language_model(num_hidden_layers=2, vocab_size=70))
