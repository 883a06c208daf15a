"""Frozen encoders of speech by name: a Whisper's, read at the length of the sound, or any that transformers knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.audio import SAMPLE_RATE
from mmdec.hub.find import find, kind
from mmdec.hub.whisper_encoder import KIND, KINDS, load_encoder
from mmdec.nn.whisper_encoder import WhisperEncoder, read_states
from mmdec.types import InputError

FILES = ("*.json", "model.safetensors", "model-*.safetensors")
STATES = 50  # a second, of all encoders that are known here


class SpeechEncoder(Protocol):
    """Sounds to states."""

    @property
    def width(self) -> int:
        """Channels of a state."""
        ...

    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        """16 kHz samples (T,), with `tail` seconds of the silence behind each -> states (B, S, width), lengths (B,)."""
        ...


@dataclass(frozen=True)
class WhisperReader:
    """A Whisper's encoder. top: its last layers, which are left out; then all silence behind a sound is read, which
    they look at."""

    encoder: WhisperEncoder
    top: int = 0

    @property
    def width(self) -> int:
        return self.encoder.config.d_model

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        return read_states(self.encoder, sounds, tail=None if self.top else tail, top=self.top)


@dataclass(frozen=True)
class TransformersReader:
    """An encoder of transformers with its feature extractor: wav2vec 2.0, HuBERT, w2v-BERT 2.0 and their kin.

    Sounds are read one by one, for padding changes what some of them give.
    """

    model: Any
    extractor: Any

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        rows = []
        for sound in sounds:
            samples = F.pad(sound, (0, round(tail * SAMPLE_RATE))).numpy()
            inputs = self.extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows.append(self.model(**inputs).last_hidden_state[0])
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return states, torch.tensor([len(row) for row in rows])


def load_speech_encoder(model: str, top: int = 0) -> SpeechEncoder:
    """An encoder by shipped name, directory or hub id, in float32, frozen.

    top: layers of a Whisper's that are left out, the last ones.

    Raises InputError where there is no such model, or transformers knows no encoder and feature extractor for it.
    """
    folder = find(model, KIND, FILES)
    if kind(folder) in KINDS:
        return WhisperReader(load_encoder(folder), top)
    if top:
        raise InputError(f"`top` must be 0 but for a Whisper, but is {top} for '{model}'. Leave it out.")
    from transformers import AutoFeatureExtractor, AutoModel

    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        network = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
        width = network.config.hidden_size
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(
            f"`encoder` must be a Whisper or an encoder of speech that transformers knows, with its feature extractor, "
            f"as safetensors, but '{model}' is none ({error!s:.200}). Name another."
        ) from None
    if not isinstance(width, int) or getattr(extractor, "sampling_rate", None) != SAMPLE_RATE:
        raise InputError(f"`encoder` must read {SAMPLE_RATE} Hz sound, but '{model}' does not. Name another.")
    return TransformersReader(network.eval().requires_grad_(False), extractor)
