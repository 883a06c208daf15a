"""A tiny speech translator for tests: a DASpeech with all its parts and random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mmdec.daspeech.acoustic import FastSpeech2Config
from mmdec.daspeech.ar_decoder import ArConfig
from mmdec.daspeech.checkpoint import save_model
from mmdec.daspeech.dag_decoder import DagConfig
from mmdec.daspeech.model import DASpeech, DASpeechConfig
from mmdec.daspeech.vocoder import Vocoder, VocoderConfig
from mmdec.nn.conformer import EncoderConfig

LEXICON = {"hello": [("hh", "ax", "l", "ow")], "there": [("dh", "eh", "r")], "low": [("l", "ow")]}
UNITS = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    *sorted({p for variants in LEXICON.values() for word in variants for p in word}),
    "pau",
]
LAYER = {"d_model": 16, "ffn": 16, "heads": 2, "layers": 1}
SIZES = {
    "encoder": {"channels": 16, "kernel": 3, **LAYER},
    "dag": {"link_heads": 2, "link_dim": 8, **LAYER},
    "ar": LAYER,
    "tts": {"d_model": 16, "ffn": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "predictor": 8},
}


def tiny_sizes() -> dict[str, int]:
    """Return the option `model` of `DASpeechModule` for a network of these sizes."""
    sizes = {f"{part}.{name}": size for part, values in SIZES.items() for name, size in values.items()}
    return {**sizes, "adaptor_ffn": 16, "ctc_layer": 1}


def tiny_vocoder() -> Vocoder:
    """Build a vocoder with random weights."""
    return Vocoder(VocoderConfig(channels=16, hidden=16, blocks=1))


def write(directory: Path) -> Path:
    """Write a translator's folder, which `mmdec.load` can load."""
    torch.manual_seed(0)
    config = DASpeechConfig(
        encoder=EncoderConfig(**SIZES["encoder"]),
        dag=DagConfig(**SIZES["dag"], upsample=0.25, positions="sinusoidal", link_prior=True),
        ar=ArConfig(**SIZES["ar"]),
        tts=FastSpeech2Config(**SIZES["tts"], kernels=(3, 1), bins=16),
        adaptor_ffn=16,
        ctc_layer=1,
    )
    model = DASpeech(config, len(UNITS))
    with torch.no_grad():  # so that no special unit is the best, and each unit lasts some frames
        model.decoder.embed_tokens.weight[:4] = 0
        model.ar.embed_tokens.weight[:4] = 0
        model.tts.duration.out.weight *= 0.1
        model.tts.duration.out.bias.fill_(1.6)  # about four frames a unit
    return save_model(directory, model, tiny_vocoder(), UNITS)
