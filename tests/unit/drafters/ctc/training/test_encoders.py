"""Tests loading encoders by name: a Whisper's or another of transformers, at any length; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

from mmdec.drafters.ctc.training.data import load_speech_encoder
from mmdec.errors import InputError
from tests.support.tiny_whisper import build

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SOUNDS = [torch.sin(torch.arange(8000) * 0.1), torch.sin(torch.arange(5000) * 0.3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    build(80, 1, 2, 0).save_pretrained(root / "whisper")
    torch.manual_seed(0)
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    Wav2Vec2Model(Wav2Vec2Config(**SMALL, conv_dim=[8] * 7, **positions)).save_pretrained(root / "wav2vec2")
    Wav2Vec2FeatureExtractor().save_pretrained(root / "wav2vec2")
    LlamaConfig().save_pretrained(root / "llama")
    return root


@pytest.mark.parametrize(("name", "width"), [("whisper", 32), ("wav2vec2", 16)])
def test_batched_states_equal_single_ones(models: Path, name: str, width: int) -> None:
    encoder = load_speech_encoder(str(models / name))
    assert encoder.width == width
    states, lengths = encoder.encode(SOUNDS, 0.2)
    assert states.shape == (2, int(lengths.max()), width)
    for row, sound in enumerate(SOUNDS):
        expected = (len(sound) / 16_000 + 0.2) * 50
        assert abs(int(lengths[row]) - expected) <= 1
        single, count = encoder.encode([sound], 0.2)
        assert count[0] == lengths[row]
        torch.testing.assert_close(single[0], states[row, : count[0]], rtol=1e-4, atol=1e-4)


def test_models_without_a_speech_encoder_are_refused(models: Path) -> None:
    with pytest.raises(InputError, match="`encoder` must be a Whisper or an encoder of speech"):
        load_speech_encoder(str(models / "llama"))
