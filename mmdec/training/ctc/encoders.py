"""Frozen speech encoders, loaded by name: a Whisper's encoder, or another encoder that transformers supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.audio import SAMPLE_RATE
from mmdec.hub.find import find, kind
from mmdec.hub.whisper import KIND, KINDS, load_encoder
from mmdec.nn.whisper_encoder import WhisperEncoder, read_states
from mmdec.types import InputError

FILES = ("*.json", "model.safetensors", "model-*.safetensors")
STATES = 50  # per second; the same for all supported encoders


class SpeechEncoder(Protocol):
    """Turns speech into encoder states."""

    @property
    def width(self) -> int:
        """Number of channels of a state."""
        ...

    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        """Encode 16 kHz samples, each (T,), with up to `tail` seconds of the padding silence after each sound.

        Returns: states (B, S, width) and their lengths (B,).
        """
        ...


@dataclass(frozen=True)
class WhisperReader:
    """A Whisper's encoder. `top`: number of last layers to leave out. If it is not 0, `read` keeps the states of all
    padding silence, because the left-out layers attend to it."""

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
    """An encoder of transformers with its feature extractor: wav2vec 2.0, HuBERT, w2v-BERT 2.0 or similar.

    Sounds are encoded one by one, because padding changes the output of some of these models.
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
    """Load a speech encoder by shipped name, directory or hub id, in float32 and frozen.

    top: number of last layers of a Whisper encoder to leave out.

    Raises InputError where there is no such model, or transformers has no encoder and feature extractor for it.
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
