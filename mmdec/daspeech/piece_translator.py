"""A translator of French speech: Whisper's encoder, a CTC head for the transcript, and a network that translates it.

At each position of the transcript, the CTC head gives several word pieces with probabilities. The piece reader encodes
them. From its states, the graph decoder or the autoregressive decoder predicts English pieces (`piece_reader.py`).
`PhoneVoice` makes log-mel frames from the phones of the English text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.daspeech.acoustic import FastSpeech2, FastSpeech2Config
from mmdec.daspeech.ctc_beam import decode_pieces
from mmdec.daspeech.dag_decoder import DagDecoder, Lattice
from mmdec.daspeech.model import EncodedSpeech
from mmdec.daspeech.piece_reader import PiecesToUnits, ReaderConfig, unit_limits
from mmdec.daspeech.units import EOS, PAD
from mmdec.drafters.ctc.network import CtcHead, CtcHeadConfig, CtcTranscripts, best_pieces
from mmdec.errors import InputError
from mmdec.phonetics.piece_ngram import PieceNGram
from mmdec.whisper.unpadded_encoder import STATES_TAIL, UnpaddedEncoder, UnpaddedEncoderConfig, sound_features


class PhoneVoice(nn.Module):
    """Converts phones to log-mel frames for `Vocoder`.

    A row's result does not depend on the other rows of its batch.

    Args:
        config: Sizes.
        num_phones: Number of phones in `phones.json`, the four special ones (<s>, <pad>, </s>, <unk>) included.
    """

    def __init__(self, config: FastSpeech2Config, num_phones: int) -> None:
        super().__init__()
        self.config = config
        # the training module has the same attribute name, so its checkpoints can be loaded
        self.tts = FastSpeech2(config, num_phones)

    def forward(self, phones: Tensor, lengths: Tensor, max_frames: int = 2048) -> tuple[Tensor, Tensor]:
        """Compute the log-mel frames of phones.

        Args:
            phones: (B, N) ids, without <s>, </s> and pauses at the ends; values beyond a row's length are ignored.
            lengths: (B,), numbers of phones; a row with 0 gets no frames.
            max_frames: Maximum frames of a row, 16 ms each; longer rows are cut.

        Returns:
            Mel (B, F, 80), natural logarithm, zeros beyond a row's frames; numbers of frames (B,).
        """
        positions = torch.arange(phones.shape[1] + 1, device=phones.device)
        units = F.pad(phones, (0, 1)).masked_fill(positions >= lengths[:, None], PAD)  # shape (B, N + 1)
        units = units.masked_fill(positions == lengths[:, None], EOS)
        output = self.tts(self.tts.embed(units), lengths + 1, max_frames=max_frames)
        return output.mel, output.mel_lengths


@dataclass(frozen=True)
class PieceTranslatorConfig:
    """Sizes of all networks in the model.

    Args:
        best: Number of pieces at each position of the transcript: the chosen piece and its alternatives.
    """

    encoder: UnpaddedEncoderConfig = field(default_factory=UnpaddedEncoderConfig)
    head: CtcHeadConfig = field(default_factory=CtcHeadConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    best: int = 8

    def __post_init__(self) -> None:
        for name, value, expected in (
            ("d_states", self.head.d_states, self.encoder.d_model),
            ("pieces", self.reader.pieces, self.head.pieces),
            ("reader.d_states", self.reader.d_states, self.reader.d_states and self.encoder.d_model),
            ("best", self.best, min(max(self.best, 1), self.head.pieces)),
        ):
            if value != expected:
                raise InputError(
                    f"`{name}` must fit the network before it, {expected}, but is {value}. Export them again."
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PieceTranslatorConfig:
        return cls(
            UnpaddedEncoderConfig(**values["encoder"]),
            CtcHeadConfig(**values["head"]),
            ReaderConfig.from_dict(values["reader"]),
            values["best"],
        )


class PieceTranslator(PiecesToUnits):
    """The whole translator except the voice.

    Holds the speech encoder, the CTC head (`head`), and from `PiecesToUnits` the piece reader (`reader`) and both
    decoders.

    Args:
        ngram: An n-gram of French pieces, for a beam search over the head's frames; None: take the best piece of each
            frame.
        english_ngram: An n-gram of English pieces, for the decoding strategy "beam".
    """

    ngram: PieceNGram | None = None
    english_ngram: PieceNGram | None = None

    def __init__(self, config: PieceTranslatorConfig) -> None:
        super().__init__(config.reader)
        self.sizes = config
        self.encoder = UnpaddedEncoder(config.encoder)
        self.head = CtcHead(config.head)

    def features(self, sounds: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the speech encoder's input.

        Args:
            sounds: 16 kHz samples (T,) of each recording.

        Returns:
            Features (B, mels, F); frames (B,), numbers of frames; counts (B,), numbers of encoder states that the CTC
            head reads.
        """
        return sound_features(sounds, self.sizes.encoder, tail=STATES_TAIL)

    def recognise(self, features: Tensor, frames: Tensor, counts: Tensor) -> tuple[CtcTranscripts, Tensor]:
        """Transcribe recordings with the CTC head.

        Args:
            features: (B, mels, F), from `features`.
            frames: (B,), numbers of frames.
            counts: (B,), numbers of encoder states that the CTC head reads.

        Returns:
            The transcripts, and the speech encoder's states (B, S, D).
        """
        states, _ = self.encoder(features, frames)
        states = states[:, : int(counts.max())]
        logits, lengths = self.head(states, counts)
        if self.ngram is not None:
            return decode_pieces(logits, lengths, self.ngram, self.sizes.best), states
        return best_pieces(logits, lengths, self.sizes.best), states

    def source(self, features: Tensor, frames: Tensor, counts: Tensor) -> EncodedSpeech:
        """Encode recordings for the decoders. A recording with an empty transcript has length 0.

        Args:
            features: (B, mels, F), from `features`.
            frames: (B,), numbers of frames.
            counts: (B,), numbers of encoder states that the CTC head reads.
        """
        transcripts, states = self.recognise(features, frames, counts)
        piece_states = None
        if self.reader.project is not None:
            indices = (transcripts.frames * self.sizes.head.stride).clamp(max=states.shape[1] - 1)
            piece_states = states.gather(1, indices[..., None].expand(-1, -1, states.shape[-1]))
        encoded = self.reader(transcripts.pieces, transcripts.weights, transcripts.lengths, piece_states)
        return EncodedSpeech(
            encoded, transcripts.lengths, transcripts.lengths, unit_limits(transcripts.lengths), transcripts
        )

    def lattice(self, states: Tensor, state_lengths: Tensor, sizes: Tensor) -> Lattice:
        """Predict the graphs.

        Args:
            states: (B, N, d) of the piece reader.
            state_lengths: (B,), numbers of states.
            sizes: (B,), numbers of transcript pieces, which decide the graphs' sizes.

        Raises:
            InputError: For a model without a graph decoder.
        """
        if self.decoder is None:
            raise InputError("`strategy` must be autoregressive for a model without a graph, but is another one.")
        graph: DagDecoder = self.decoder
        return graph(states, state_lengths, sizes)
