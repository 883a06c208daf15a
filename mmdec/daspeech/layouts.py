"""The two kinds of translators ("layouts"), which differ in the parts before and after the decoders.

`phones` is DASpeech as in the paper: the encoder reads filterbanks, the graph's states are the input of the acoustic
model, and the phones are the text. `pieces` is for real speech: the decoders write pieces of English words, which make
the text, and a separate voice network speaks the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from mmdec.daspeech.checkpoint import DASpeechParts
from mmdec.daspeech.model import EncodedSpeech
from mmdec.daspeech.piece_checkpoint import PieceTranslatorParts
from mmdec.daspeech.units import EOS
from mmdec.io import audio


class Layout(Protocol):
    """The methods in which the two kinds of translators differ.

    In all of them, a row is the list of unit ids (phones or word pieces) of one translation, without special units.
    """

    def features(self, sounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert 16 kHz samples (T,) of each recording to the inputs of `source`, on the model's device."""
        ...

    def source(self, features: tuple[Tensor, ...]) -> EncodedSpeech:
        """Run the encoder over recordings.

        Args:
            features: The output of the method `features`.

        Returns:
            The states that the decoders read.
        """
        ...

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the English text of each translation.

        Args:
            rows: For each translation the ids of its units (phones or word pieces).
        """
        ...

    def mels(
        self, rows: Sequence[Sequence[int]], texts: Sequence[str], hidden: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Compute a log-mel spectrogram (F, 80) for each translation; an empty one for a translation without units.

        Args:
            rows: For each translation the ids of its units.
            texts: The English text of each.
            hidden: For each translation (K + 1, D), the graph's states at its K units and </s>; None: the units are
                those of the autoregressive decoder.
        """
        ...


@final
class PhoneLayout:
    """The paper's DASpeech: the acoustic model reads the states on the graph's path, or else phone embeddings."""

    def __init__(self, parts: DASpeechParts) -> None:
        self.model, self.units = parts.model, parts.units

    def features(self, sounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return pad([audio.fbank(sound) for sound in sounds], _device(self.model))  # (B, N, 80) of N frames, (B,)

    def source(self, features: tuple[Tensor, ...]) -> EncodedSpeech:
        return self.model.source(*features)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(self.units[unit] for unit in row) for row in rows]

    def mels(
        self, rows: Sequence[Sequence[int]], texts: Sequence[str], hidden: Sequence[Tensor] | None
    ) -> list[Tensor]:
        device = _device(self.model)
        mels = [torch.zeros(0, audio.MELS, device=device) for _ in rows]
        rows_with_units = [at for at, row in enumerate(rows) if row]
        if not rows_with_units:
            return mels
        # the acoustic model was trained with </s> at the end, so it gets </s> here, with duration 0
        if hidden is None:
            inputs = [
                self.model.tts.embed(torch.tensor([[*rows[at], EOS]], device=device))[0] for at in rows_with_units
            ]
        else:
            inputs = [self.model.acoustic_input(hidden[at][None])[0] for at in rows_with_units]
        output = self.model.tts(*pad(inputs, device))
        for at, mel, length in zip(rows_with_units, output.mel, output.mel_lengths.tolist(), strict=True):
            mels[at] = mel[:length]
        return mels


@final
class PieceLayout:
    """Translators whose decoders write English word pieces. A voice network speaks their text."""

    def __init__(self, parts: PieceTranslatorParts) -> None:
        self.model, self.voice, self.english, self.speller = parts.model, parts.voice, parts.english, parts.speller
        self.phones = {phone: at for at, phone in enumerate(parts.phones)}

    def features(self, sounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device = _device(self.model)
        return self.model.features([sound.to(device) for sound in sounds])

    def source(self, features: tuple[Tensor, ...]) -> EncodedSpeech:
        return self.model.source(*features)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.english.decode(row) for row in rows]

    def mels(
        self, rows: Sequence[Sequence[int]], texts: Sequence[str], hidden: Sequence[Tensor] | None
    ) -> list[Tensor]:
        device = _device(self.model)
        known = self.phones  # the speller adds phones for endings (cats, played), which a small voice may not have
        rows_with_units = [[known[phone] for phone in self.speller.phones(text) if phone in known] for text in texts]
        if not any(rows_with_units):
            return [torch.zeros(0, audio.MELS, device=device) for _ in rows]
        mel, lengths = self.voice(*pad([torch.tensor(row, dtype=torch.long) for row in rows_with_units], device))
        return [row[:length] for row, length in zip(mel, lengths.tolist(), strict=True)]


def layout_of(parts: DASpeechParts | PieceTranslatorParts) -> Layout:
    """Return the methods for a translator with these parts: a `PhoneLayout` or a `PieceLayout`."""
    return PieceLayout(parts) if isinstance(parts, PieceTranslatorParts) else PhoneLayout(parts)


def pad(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad B tensors (N, ...) of different lengths N with zeros.

    Returns:
        (B, max N, ...), and the lengths (B,).
    """
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return torch.nn.utils.rnn.pad_sequence([row.to(device) for row in rows], batch_first=True), lengths


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
