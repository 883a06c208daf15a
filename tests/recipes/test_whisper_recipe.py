"""Tests the small Whisper's recipe on a tiny corpus: a resumed run gives the same weights, and its export loads."""

import json
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from mmdec.audio import save_audio
from mmdec.hub.medusa import load_heads
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.whisper.export import export
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.types import InputError
from tests.support import small_recipes
from tests.support.small_recipes import MARKS, check_same_weights, checkpoint

TEXTS = ["Where is the station?", "The station is near.", "Two teas, please.", "It's five o'clock."]
SHAPE = {"width": 16, "attention_heads": 2, "encoder_layers": 1, "encoder_ffn": 16, "decoder_layers": 2}
pytestmark = MARKS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("english")
    for split in ("train", "train_everyday", "dev"):
        folder = root / split / "0001" / "1"
        lines = []
        for index, text in enumerate(TEXTS):
            tone = 0.3 * torch.sin(torch.arange(16000) * 2 * torch.pi * (200 + 100 * index) / 16000)
            save_audio(folder / f"0001-1-{index:04d}.flac", tone)
            lines.append(f"0001-1-{index:04d} {text}")
        (folder / "0001-1.trans.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def fit(corpus: Path, out: Path, *more: str) -> None:
    """Two steps an epoch."""
    model = {"shape": json.dumps({**SHAPE, "decoder_ffn": 16}), "warmup": 1, "guided": "[[1, 0]]"}
    data = {
        "corpus": corpus,
        "tokenizer": out.parent / "tokenizer",
        "pieces": 300,
        "batch_seconds": 12,
        "dev_windows": 2,
        "steps_per_epoch": 2,
    }
    options = ("devices=1", "strategy=auto", "check_val_every_n_epoch=2")
    small_recipes.fit("whisper/phrasebook", out, model, data, *(f"--trainer.{option}" for option in options), *more)


def test_the_recipe_resumes_to_the_same_weights_and_exports(corpus: Path, tmp_path: Path):
    last = checkpoint(tmp_path / "whole", 3)
    fit(corpus, tmp_path / "whole")
    fit(corpus, tmp_path / "parts", f"--ckpt_path={checkpoint(tmp_path / 'whole', 1)}")
    check_same_weights(last, checkpoint(tmp_path / "parts", 3))

    out = export([last], tmp_path / "tokenizer", tmp_path / "model", [(1, 0)])
    model = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    processor = WhisperProcessor.from_pretrained(out)
    assert (model.generation_config.alignment_heads, model.config.d_model) == ([[1, 0]], 16)
    half = read_checkpoint(last)["state_dict"]["model.model.decoder.layers.1.fc1.weight"].half()
    assert torch.equal(model.model.decoder.layers[1].fc1.weight, half.float())  # type: ignore[union-attr]
    features = processor(torch.zeros(16000).numpy(), sampling_rate=16000, return_tensors="pt").input_features
    tokens = model.generate(features, language="en", task="transcribe", max_new_tokens=4)
    assert tokens.shape[0] == 1
    drafter = load_heads(out / "medusa", model)
    assert drafter.name.startswith("medusa-linear-8-")  # then a digest of the weights
    assert processor.tokenizer.normalize("Colour, it's fine.") == "colour it is fine"
    assert all((path.stat().st_mode & 0o777) == 0o644 for path in out.rglob("*") if path.is_file())
    assert json.loads((out / "provenance.json").read_text(encoding="utf-8"))["training"]["step"] == 4


def test_guided_heads_must_be_there():
    with pytest.raises(InputError, match="`guided` must name"):
        WhisperModule(["a"], Shape(decoder_layers=4))


def test_a_fresh_encoder_looks_nearby():
    units = ["<|endoftext|>", "<|startoftranscript|>", "a"]
    model = WhisperModule(units, Shape(decoder_layers=1, encoder_layers=2, dropout=0.0), guided=()).model
    encoder = model.model.encoder
    places = encoder.embed_positions.weight[None]
    for depth, turns in ((0, [-4, -2, 0, 2, 4]), (1, [-8, -4, 0, 4, 8])):
        layer = encoder.layers[depth]
        normed = layer.self_attn_layer_norm(places)  # type: ignore[union-attr, operator]
        queries = layer.self_attn.q_proj(normed).unflatten(-1, (5, -1))[0, 700]  # type: ignore[union-attr, operator]
        keys = layer.self_attn.k_proj(normed).unflatten(-1, (5, -1))[0]  # type: ignore[union-attr, operator]
        seen = torch.einsum("hd,shd->hs", queries, keys).argmax(-1) - 700
        assert seen.tolist() == turns


def test_windows_of_any_length_are_encoded_as_the_model_does():
    units = ["<|endoftext|>", "<|startoftranscript|>", "a"]
    module = WhisperModule(units, Shape(decoder_layers=1, source_positions=50), guided=()).eval()
    features = torch.randn(2, 80, 100)
    whole = module.model.model.encoder(features).last_hidden_state
    assert torch.allclose(module.encode(features), whole, atol=1e-6)
    assert module.encode(features[..., :60]).shape == (2, 30, 160)
