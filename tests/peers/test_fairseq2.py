"""Compares fairseq2's s2t_conformer with mmdec's encoder. `make fairseq2` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq2")
from fairseq2.models.s2t_conformer import S2TConformerConfig, S2TConformerFactory  # type: ignore[import-not-found]
from fairseq2.nn import BatchLayout  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

from mmdec.daspeech.fairseq2 import convert_fairseq2, export
from mmdec.nn.conformer import EncoderConfig, SpeechEncoder, encoder_config

SIZES = {"num_encoder_layers": 3, "num_encoder_attn_heads": 4, "depthwise_conv_kernel_size": 31, "ffn_inner_dim": 128}
FRAMES = (53, 38, 211)


def theirs() -> torch.nn.ModuleDict:
    """Return fairseq2's encoder, with its own wide subsampler; every tensor drawn anew."""
    factory = S2TConformerFactory(S2TConformerConfig(model_dim=64, use_relative_pos=True, **SIZES))
    parts = {"encoder_frontend": factory.create_encoder_frontend(), "encoder": factory.create_conformer_encoder()}
    model = torch.nn.ModuleDict(parts).eval()
    draw = torch.Generator().manual_seed(1)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=draw)
            value.copy_(0.5 + noise.abs() if "running_var" in name else noise * max(value[0].numel(), 10) ** -0.5)
    return model


@torch.no_grad()
def encoded(model: torch.nn.ModuleDict, features: torch.Tensor) -> torch.Tensor:
    """Return fairseq2's states (S, D) of features (N, 80)."""
    seqs, _ = model["encoder_frontend"](features[None], BatchLayout.of(features[None]))
    return model["encoder"](seqs, BatchLayout.of(seqs))[0]


@torch.no_grad()
def check_equal(model: torch.nn.ModuleDict, ours: SpeechEncoder) -> None:
    """Check that states are the same to 1e-5, alone in fairseq2 and in one padded batch here."""
    draw = torch.Generator().manual_seed(2)
    features = [torch.randn(frames, 80, generator=draw) for frames in FRAMES]
    batch = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
    states, lengths, _ = ours.eval()(batch, torch.tensor(FRAMES))
    for row, recording in enumerate(features):
        expected = encoded(model, recording)
        assert len(expected) == int(lengths[row])
        torch.testing.assert_close(states[row, : len(expected)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_fairseq2_weights_give_our_outputs(tmp_path: Path, suffix: str) -> None:
    model, path = theirs(), tmp_path / f"checkpoint.{suffix}"
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    torch.save({"model": state}, path) if suffix == "pt" else save_file(state, path)
    result = load_file(convert_fairseq2(path, tmp_path / "encoder.safetensors"))
    own = {name.removeprefix("encoder."): value for name, value in result.items()}
    ours = SpeechEncoder(encoder_config(own))
    ours.load_state_dict(own)
    check_equal(model, ours)


def test_our_weights_give_fairseq2_outputs(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes: Any = {"channels": 1024, "d_model": 64, "ffn": 128, "heads": 4, "layers": 3, "kernel": 31}
    ours = SpeechEncoder(EncoderConfig(**sizes))
    save_file({f"encoder.{name}": value for name, value in ours.state_dict().items()}, tmp_path / "network.safetensors")
    model = theirs()
    model.load_state_dict(load_file(export(tmp_path / "network.safetensors", tmp_path / "theirs.safetensors")))
    check_equal(model, ours)
