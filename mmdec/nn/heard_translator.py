"""A translator that hears people: Whisper's encoder, a CTC head that writes French, and the reader that translates it.

What the head wrote is collapsed to places, each with its best pieces and their probabilities (`nn/ctc_head.py`); the
reader makes states of them, from which the graph and the autoregressive decoder write English pieces
(`nn/piece_reader.py`). The voice is a separate network.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from mmdec.nn.ctc_head import CtcHead, CtcHeadConfig, Heard, best_pieces
from mmdec.nn.dag_decoder import DagDecoder, Lattice
from mmdec.nn.piece_reader import PiecesToUnits, ReaderConfig, unit_limits
from mmdec.nn.source import Source
from mmdec.nn.whisper_encoder import TAIL, WhisperEncoder, WhisperEncoderConfig, sound_features
from mmdec.types import InputError


@dataclass(frozen=True)
class HeardTranslatorConfig:
    """All sizes. best: pieces of a place that the reader is given."""

    encoder: WhisperEncoderConfig = field(default_factory=WhisperEncoderConfig)
    head: CtcHeadConfig = field(default_factory=CtcHeadConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    best: int = 8

    def __post_init__(self) -> None:
        for name, one, other in (
            ("d_states", self.head.d_states, self.encoder.d_model),
            ("pieces", self.reader.pieces, self.head.pieces),
            ("reader.d_states", self.reader.d_states, self.reader.d_states and self.encoder.d_model),
            ("best", self.best, min(max(self.best, 1), self.head.pieces)),
        ):
            if one != other:
                raise InputError(f"`{name}` must fit the network before it, {other}, but is {one}. Export them anew.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeardTranslatorConfig:
        return cls(
            WhisperEncoderConfig(**values["encoder"]),
            CtcHeadConfig(**values["head"]),
            ReaderConfig.from_dict(values["reader"]),
            values["best"],
        )


class HeardTranslator(PiecesToUnits):
    """The whole model except the voice. `reader`, `ar` and `decoder` are those of `PiecesToUnits`."""

    def __init__(self, config: HeardTranslatorConfig) -> None:
        super().__init__(config.reader)
        self.sizes = config
        self.encoder = WhisperEncoder(config.encoder)
        self.head = CtcHead(config.head)

    def features(self, sounds: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """16 kHz sounds (T,) -> features (B, mels, F), frames (B,), and the states of each that the head reads (B,)."""
        return sound_features(sounds, self.sizes.encoder, tail=TAIL)

    def hear(self, features: Tensor, frames: Tensor, counts: Tensor) -> tuple[Heard, Tensor]:
        """What `features` gave -> what is heard at how many places, and the encoder's states (B, S, D)."""
        states, _ = self.encoder(features, frames)
        states = states[:, : int(counts.max())]
        logits, lengths = self.head(states, counts)
        return best_pieces(logits, lengths, self.sizes.best), states

    def source(self, features: Tensor, frames: Tensor, counts: Tensor) -> Source:
        """What `features` gave -> what the decoders read. A row in which nothing is heard has length 0."""
        heard, states = self.hear(features, frames, counts)
        beside = None
        if self.reader.project is not None:
            places = (heard.frames * self.sizes.head.stride).clamp(max=states.shape[1] - 1)
            beside = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        read = self.reader(heard.pieces, heard.weights, heard.lengths, beside)
        return Source(read, heard.lengths, heard.lengths, unit_limits(heard.lengths), heard)

    def lattice(self, states: Tensor, state_lengths: Tensor, sizes: Tensor) -> Lattice:
        """The graphs of a batch. sizes: (B,) pieces, which set the graphs' sizes."""
        if self.decoder is None:
            raise InputError("`strategy` must be autoregressive for a model without a graph. Choose that one.")
        graph: DagDecoder = self.decoder
        return graph(states, state_lengths, sizes)
