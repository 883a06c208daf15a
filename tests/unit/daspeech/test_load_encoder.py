"""Tests loading a Whisper's encoder alone: it gives the model's states; other or damaged models are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmdec.daspeech.checkpoint import load_encoder
from mmdec.errors import InputError
from tests.support.tiny_whisper import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "whisper"
    build(80, 1, 2, 0, max_source_positions=100, init_std=0.2).half().save_pretrained(folder)
    return folder


def test_the_folder_s_encoder_is_read_in_float32_and_frozen(folder: Path) -> None:
    encoder = load_encoder(folder)
    stock = build(80, 1, 2, 0, max_source_positions=100, init_std=0.2).half().float().eval().model.encoder
    features = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(encoder(features)[0], stock(features).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not encoder.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "`model` must be a Whisper, but .* is 'llama'"),
        ({"encoder_layers": None}, "`model` must name its sizes, but .* lacks 'encoder_layers'"),
        ({"encoder_layers": 2}, "`model` must hold all weights"),
        ({"encoder_layers": 10**9}, "`model` must have weights for all of its layers"),
        ({"encoder_ffn_dim": 16}, "`model` must hold weights of its config's shapes"),
    ],
)
def test_other_and_damaged_models_are_refused(folder: Path, tmp_path: Path, change: dict, message: str) -> None:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
    fields = {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=message):
        load_encoder(tmp_path)
