"""What several tests share: a tiny model with random weights, and sounds that resemble speech."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the networks of the tests are too small for more

RATE = 16_000


def buzz(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """A voice-like buzz (T,) float32: harmonics of a gliding fundamental under syllables of 4 Hz."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * time + random.uniform(0, 6))) / rate
    voice = sum(np.sin(n * phase) / n for n in range(1, 20))
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time + random.uniform(0, 6))
    return (0.2 * syllables * voice + 0.001 * random.standard_normal(len(time))).astype(np.float32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with every part and random weights, a second's work to make."""
    from mmdec.hub import save_model
    from mmdec.nn.ar_decoder import ArConfig
    from mmdec.nn.conformer import EncoderConfig
    from mmdec.nn.dag_decoder import DagConfig
    from mmdec.nn.daspeech import DASpeech, DASpeechConfig
    from mmdec.nn.fastspeech2 import FastSpeech2Config
    from mmdec.nn.vocoder import Vocoder, VocoderConfig
    from mmdec.phonetics.decoder import WordDecoder

    torch.manual_seed(0)
    lexicon = {"hello": [("hh", "ax", "l", "ow")], "there": [("dh", "eh", "r")], "low": [("l", "ow")]}
    words = WordDecoder.build(lexicon, ["Hello there.", "Hello, low there?"])
    units = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *sorted({phone for v in lexicon.values() for p in v for phone in p}),
        "pau",
    ]
    config = DASpeechConfig(
        encoder=EncoderConfig(channels=32, d_model=32, ffn=32, heads=2, layers=1, kernel=7),
        dag=DagConfig(
            d_model=32,
            ffn=32,
            heads=2,
            layers=1,
            upsample=0.25,
            link_heads=2,
            link_dim=8,
            positions="sinusoidal",
            link_prior=True,
        ),
        ar=ArConfig(d_model=32, ffn=32, heads=2, layers=1),
        tts=FastSpeech2Config(
            d_model=32, encoder_layers=1, decoder_layers=1, heads=2, ffn=32, kernels=(3, 1), predictor=16, bins=16
        ),
        adaptor_ffn=32,
        ctc_layer=1,
    )
    model = DASpeech(config, len(units))
    with torch.no_grad():  # random weights that speak: no special unit wins, and durations are audible
        model.decoder.embed_tokens.weight[:4] = 0
        model.ar.embed_tokens.weight[:4] = 0
        model.tts.duration.out.weight *= 0.1
        model.tts.duration.out.bias.fill_(1.6)  # about four frames a unit
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return save_model(directory, model, Vocoder(VocoderConfig(channels=16, hidden=16, blocks=1)), units, words)
