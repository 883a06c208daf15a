"""Medusa heads: sizes, the block's layer against transformers' own, its cache, files."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, WhisperConfig, WhisperForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer
from typer.testing import CliRunner

import mmdec
from mmdec.cli import app
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree_shape import MAX_RANKS, default_probabilities
from mmdec.drafters.medusa.checkpoint import convert_medusa, load_heads, save_heads
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.drafters.medusa.network import MedusaConfig, MedusaHeads
from mmdec.errors import InputError
from mmdec.types import Context, Draft, EncoderContext, Plan, Prior, Scores, Verdict
from tests.support.tiny_whisper import VOCABULARY, medusa_heads, whisper

BLOCK = MedusaConfig(32, VOCABULARY, "block", 3, 2, 48)
LINEAR = MedusaConfig(32, VOCABULARY, "linear", 3)
heads = partial(medusa_heads, std=0.3)


def test_sizes_equal_the_published_heads() -> None:
    with torch.device("meta"):
        made = MedusaHeads(MedusaConfig(1280, 51865, "block", 10, 20, 5120))
    assert sum(weight.numel() for weight in made.heads[0].parameters()) == 1_639_680
    assert made.block is not None
    assert sum(weight.numel() for weight in made.block.parameters()) == 26_236_160


def test_new_heads_predict_what_the_model_predicts() -> None:
    hidden = torch.randn(2, 5, 32)
    torch.testing.assert_close(MedusaHeads(LINEAR)(hidden), hidden[:, :, None].expand(-1, -1, 3, -1))


def test_the_block_layer_equals_whispers() -> None:
    config = WhisperConfig(d_model=32, decoder_attention_heads=2, decoder_ffn_dim=48)
    config._attn_implementation = "eager"
    layer = WhisperDecoderLayer(config, 0).eval()
    made = heads(BLOCK)
    assert made.block is not None
    layer.load_state_dict(made.block.state_dict())
    hidden, states = torch.randn(2, 6, 32), torch.randn(2, 9, 32)
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    expected = layer(hidden, mask, states, **{CACHE_ARGUMENT: cache})
    torch.testing.assert_close(made(hidden, states), made.apply_heads(expected, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "ranks", "least"), [(7, None, 8), (2, [[0.5, 0.2, 0.1]] * 3, 3)])
def test_more_ranks_than_the_model_has_tokens_are_refused(tokens: int, ranks: Any, least: int) -> None:
    made = heads(MedusaConfig(32, tokens, heads=3))
    with pytest.raises(InputError, match=f"of at least {least} tokens, .* but are for {tokens}"):
        MedusaDrafter(made, nn.Linear(32, tokens, bias=False), ranks)


def test_the_drafter_reads_what_training_reads() -> None:
    """Over rounds with paths of any length, rows that leave and rounds without a draft: the heads' best tokens are
    those of one pass over each row's whole text."""
    generator = torch.Generator().manual_seed(1)
    for config in (LINEAR, BLOCK):
        made = heads(config)
        output = nn.Linear(32, VOCABULARY, bias=False)
        drafter = MedusaDrafter(made, output)
        batch, prompt = 3, 4
        states = torch.randn(batch, 7, 32, generator=generator)
        mask = torch.arange(prompt) >= torch.tensor([0, 2, 1])[:, None]
        first = torch.randn(batch, prompt, 32, generator=generator)
        texts = [row[row_mask] for row, row_mask in zip(first, mask, strict=True)]
        tokens = torch.zeros(batch, prompt, dtype=torch.long)
        encoder = EncoderContext(states) if config is BLOCK else None
        with torch.no_grad():
            state = drafter.start(
                Context(
                    tokens,
                    mask,
                    tokens[None],
                    mask.sum(1),
                    {-1: first},
                    encoder=encoder,
                )
            )
            zeros = torch.zeros(batch, 1, dtype=torch.long)
            logits = torch.zeros(batch, 1, VOCABULARY)
            verdict = Verdict(zeros, zeros[:, 0], zeros[:, 0].bool(), zeros, zeros[:, 0] + 1)
            drafter.update(
                state, Draft(zeros, zeros - 1, zeros[:, 0] + 1), Scores(logits, {-1: first[:, -1:]}), verdict
            )
            live = [0, 1, 2]
            for step in range(5):
                if step != 2:
                    draft = drafter.propose(state, torch.zeros(len(live), dtype=torch.long), Plan(3, 3))
                    for place, row in enumerate(live):
                        hidden = made(texts[row][None], states[row : row + 1])[0, -1]
                        assert draft.tokens[place, 1:].tolist() == output(hidden).argmax(-1).tolist()
                size = 5
                features = torch.randn(len(live), size, 32, generator=generator)
                paths = [[0, 2, 3][: 1 + (row + step) % 3] for row in live]
                longest = max(map(len, paths))
                path = torch.tensor([nodes + [-1] * (longest - len(nodes)) for nodes in paths])
                none = torch.zeros(len(live), dtype=torch.long)
                drafter.update(
                    state,
                    Draft(none[:, None].expand(-1, size), none[:, None].expand(-1, size), none + size),
                    Scores(torch.zeros(len(live), size, VOCABULARY), {-1: features}),
                    Verdict(path, none, none.bool(), none[:, None], none + 1),
                )
                for place, row in enumerate(live):
                    texts[row] = torch.cat([texts[row], features[place, paths[place]]])
                if step == 3:
                    drafter.select(state, torch.tensor([2, 0]))
                    live = [2, 0]


def test_expected_acceptance_is_a_distribution() -> None:
    for row in default_probabilities(10):
        assert len(row) == MAX_RANKS
        assert 0 < sum(row) < 1
        assert row == sorted(row, reverse=True)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MedusaConfig(32, 9, "tree"), "kind"),  # type: ignore[arg-type]
        (lambda: MedusaConfig(32, 9, heads=0), "heads"),
        (lambda: MedusaConfig(32, 9, "block", 3, 5, 48), "attention_heads"),
        (lambda: MedusaHeads(BLOCK)(torch.zeros(1, 1, 32)), "states"),
        (lambda: MedusaDrafter(MedusaHeads(LINEAR), nn.Linear(32, 9)), "output"),
        (lambda: MedusaDrafter(MedusaHeads(LINEAR), nn.Linear(32, VOCABULARY), [[0.5]]), "ranks"),
    ],
)
def test_bad_arguments_are_named(make: Any, match: str) -> None:
    with pytest.raises(InputError, match=f"`{match}`"):
        make()


def test_heads_on_disk_draft_only_for_their_model(tmp_path: Path) -> None:
    model = whisper()
    made = heads(BLOCK)
    save_heads(tmp_path / "heads", made, ranks=[[0.7, 0.1]] * 3)
    drafter = load_heads(tmp_path / "heads", model)
    assert drafter.needs.prior == Prior(((0.7, 0.1),) * 3)
    for name, value in made.state_dict().items():
        assert torch.equal(value, drafter.heads.state_dict()[name])
    with pytest.raises(InputError, match="mels"):
        load_heads(tmp_path / "heads", whisper(128))
    with pytest.raises(InputError, match="channels"):
        load_heads(tmp_path / "heads", whisper(d_model=48))
    for other in (WhisperForCausalLM(copy.deepcopy(model.config)), model.model):  # no encoder; no output layer
        with pytest.raises(InputError, match="`model` must be a loaded encoder-decoder"):
            load_heads(tmp_path / "heads", other)
    with pytest.raises(InputError, match="directory"):
        save_heads(tmp_path / "heads", made)
    with pytest.raises(InputError, match=r"heads\.safetensors"):
        load_heads(tmp_path, model)


def published(place: Path, kind: str, shards: bool) -> dict[str, Tensor]:
    """Return a checkpoint as aiola lays them out, with a Whisper of one weight."""
    torch.manual_seed(0)
    own = heads(BLOCK)
    assert own.block is not None
    state = {"whisper_model.model.decoder.layers.0.fc1.weight": torch.randn(3, 3)}
    for index in range(4 if kind == "base_head" else 3):
        state[f"medusa_heads.{index}.0.linear.weight"] = torch.randn(32, 32)
        state[f"medusa_heads.{index}.0.linear.bias"] = torch.randn(32)
    layer = {name: torch.randn_like(value) for name, value in own.block.state_dict().items()}
    if kind == "base_head":
        state |= {f"whisper_layer.{name}": value for name, value in layer.items()}
    else:
        state |= {f"medusa_block.{name}": value for name, value in layer.items()}
    config = {
        "medusa_heads_type": kind,
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "whisper_model_name": "openai/whisper-large-v2",
        "d_model": 32,
        "vocab_size": VOCABULARY,
        "num_mel_bins": 80,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 48,
    }
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    if shards:
        names = sorted(state)
        files = {name: f"model-0000{1 + (at % 2)}-of-00002.safetensors" for at, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: state[name] for name in names if files[name] == file}, place / file)
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(state, place / "model.safetensors")
    return state


@pytest.mark.parametrize("kind", ["base_head", "medusa_block", "whisper_block"])
@pytest.mark.parametrize("shards", [False, True])
def test_published_heads_are_converted(tmp_path: Path, kind: str, shards: bool) -> None:
    state = published(tmp_path / "in", kind, shards)
    done = CliRunner().invoke(app, ["convert", "medusa", str(tmp_path / "in"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    drafter = load_heads(tmp_path / "out", whisper())
    skipped = int(kind == "base_head")  # the tuned model's own head is none of the drafter's
    assert drafter.heads.config.heads == 3
    assert drafter.heads.config.tuned_base == bool(skipped)
    assert drafter.heads.config.base == "openai/whisper-large-v2"
    for index, head in enumerate(drafter.heads.heads):
        assert torch.equal(head.linear.weight, state[f"medusa_heads.{index + skipped}.0.linear.weight"])
    if kind == "base_head":
        assert drafter.heads.block is None
        assert "tuned model" in (tmp_path / "out" / "README.md").read_text()
    else:
        assert drafter.heads.block is not None
        for name, value in drafter.heads.block.state_dict().items():
            assert torch.equal(value, state[f"medusa_block.{name}"])
    loaded: Any = mmdec.load_drafter(tmp_path / "in", whisper())  # as it is
    torch.testing.assert_close(loaded.heads.state_dict(), drafter.heads.state_dict(), rtol=0, atol=0)


def test_unconvertible_heads_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config"):
        convert_medusa(tmp_path, tmp_path / "out")
    published(tmp_path / "in", "medusa_block", True)
    (tmp_path / "in" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="shards"):
        convert_medusa(tmp_path / "in", tmp_path / "out")
    published(tmp_path / "other", "eagle", False)
    with pytest.raises(InputError, match="eagle"):
        convert_medusa(tmp_path / "other", tmp_path / "out")
    published(tmp_path / "short", "base_head", False)
    config = json.loads((tmp_path / "short" / "config.json").read_text()) | {"d_model": 48}
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="shapes"):
        convert_medusa(tmp_path / "short", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_says_where_the_heads_are(tmp_path: Path) -> None:
    """A run's heads do not lie in the model's folder, where "medusa" would find them."""
    made = heads(replace(LINEAR, base="openai/whisper-base"))
    for name, place, drafter in (("run", Path("runs/heads"), "runs/heads"), ("own", None, "medusa")):
        card = (save_heads(tmp_path / name, made, place=place) / "README.md").read_text(encoding="utf-8")
        assert f'model="openai/whisper-base", drafter="{drafter}")' in card
