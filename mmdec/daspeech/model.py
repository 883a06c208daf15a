"""DASpeech: speech encoder, graph decoder, adaptor and FastSpeech 2 in one network (Fang et al., NeurIPS 2023).

`SpeechToUnits` is the linguistic half (speech to phones), with an autoregressive decoder on the same encoder.
`DASpeech` adds the acoustic half (hidden states of phones to mel spectrogram). The vocoder is a separate network.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmdec.daspeech.acoustic import FastSpeech2, FastSpeech2Config
from mmdec.daspeech.ar_decoder import ArConfig, ArDecoder
from mmdec.daspeech.dag_decoder import DagConfig, DagDecoder, Lattice
from mmdec.drafters.ctc.network import CtcTranscripts
from mmdec.errors import InputError
from mmdec.nn.conformer import EncoderConfig, SpeechEncoder
from mmdec.nn.transformer import PooledDropout

if TYPE_CHECKING:
    from mmdec.phonetics.piece_ngram import PieceNGram


@dataclass(frozen=True)
class EncodedSpeech:
    """B encoded recordings, as the graph decoder and the autoregressive decoder read them."""

    states: Tensor  # (B, S, d): the encoder's states
    lengths: Tensor  # (B,), number of states; 0 if the CTC head's transcript is empty
    # (B,), number of filterbank frames or of transcript pieces, from which the number of the graph's vertices is
    # computed
    sizes: Tensor
    limits: list[int]  # for each recording, the maximum number of units of its translation
    transcripts: CtcTranscripts | None = None  # the CTC head's transcripts; None: the translator has no such head

    def select(self, rows: list[int]) -> EncodedSpeech:
        """Return only the recordings with these indices, in that order."""
        transcripts = None if self.transcripts is None else self.transcripts.select(rows)
        limits = [self.limits[row] for row in rows]
        return replace(
            self,
            states=self.states[rows],
            lengths=self.lengths[rows],
            sizes=self.sizes[rows],
            limits=limits,
            transcripts=transcripts,
        )


@dataclass(frozen=True)
class DASpeechConfig:
    """Sizes of all networks in the model; the defaults are those of the paper's model (93 M parameters)."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    dag: DagConfig = field(default_factory=DagConfig)
    ar: ArConfig | None = field(default_factory=ArConfig)  # None: no autoregressive decoder
    tts: FastSpeech2Config = field(default_factory=FastSpeech2Config)
    adaptor_ffn: int = 1024  # channels between the two linear layers of the adaptor
    adaptor_dropout: float = 0.1
    ctc_layer: int = 8  # number (from 1) of the encoder layer whose output gets the auxiliary CTC loss
    ctc_characters: int = 0  # vocabulary size of the auxiliary CTC head; 0: no such head

    @classmethod
    def small(cls, dropout: float = 0.1) -> DASpeechConfig:
        """Return the sizes of the small shipped model, for CPUs: about a tenth of the paper's parameters."""
        return cls(
            encoder=EncoderConfig(channels=384, d_model=192, ffn=512, layers=6, kernel=15, dropout=dropout),
            dag=DagConfig(
                d_model=192,
                ffn=512,
                heads=4,
                layers=2,
                dropout=dropout,
                upsample=0.25,
                min_vertices=24,
                link_heads=4,
                link_dim=48,
                positions="sinusoidal",
                link_prior=True,
                copy_encoder=True,
            ),
            ar=ArConfig(d_model=192, ffn=512, heads=4, layers=3, dropout=dropout),
            tts=FastSpeech2Config.small(),
            adaptor_ffn=128,
            ctc_layer=4,
            ctc_characters=48,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DASpeechConfig:
        parts = {"encoder": EncoderConfig, "dag": DagConfig, "ar": ArConfig, "tts": FastSpeech2Config}
        return cls(**{key: parts[key](**value) if key in parts and value else value for key, value in values.items()})


class SpeechToUnits(nn.Module):
    """The first half of DASpeech: a speech encoder, the graph decoder and the autoregressive decoder."""

    english_ngram: PieceNGram | None = None  # of the English units, for the strategy "beam"; phones have none

    def __init__(self, config: DASpeechConfig, num_units: int) -> None:
        super().__init__()
        self.config = config
        self.num_units = num_units
        self.encoder = SpeechEncoder(config.encoder)
        self.decoder = DagDecoder(config.dag, num_units, config.encoder.d_model)
        self.ar = None if config.ar is None else ArDecoder(config.ar, num_units, config.encoder.d_model)
        self.ctc = nn.Linear(config.encoder.d_model, config.ctc_characters) if config.ctc_characters else None

    @property
    def autoregressive(self) -> ArDecoder:
        """The autoregressive decoder, whose weights are named `ar`.

        Raises:
            InputError: For a model that has none.
        """
        if self.ar is None:
            raise InputError("`model` must have an autoregressive decoder, but has only its graph. Use the graph.")
        return self.ar

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode features (B, N, 80).

        Args:
            lengths: (B,), numbers of frames.

        Returns:
            States (B, S, d), and their numbers (B,).
        """
        states, state_lengths, _ = self.encoder(features, lengths)
        return states, state_lengths

    def source(self, features: Tensor, lengths: Tensor) -> EncodedSpeech:
        """Encode features (B, N, 80) for the decoders.

        A translation is limited to 24 units and 25 more for each second of speech, because nobody speaks faster.

        Args:
            features: Filterbank features.
            lengths: (B,), numbers of 10 ms frames.
        """
        return EncodedSpeech(*self.encode(features, lengths), lengths, (24 + lengths // 4).tolist())

    def lattice(self, states: Tensor, state_lengths: Tensor, frame_lengths: Tensor) -> Lattice:
        """Predict the graphs.

        Args:
            states: (B, S, d) of the encoder.
            state_lengths: (B,), numbers of states.
            frame_lengths: (B,), numbers of filterbank frames, which decide the graphs' sizes.
        """
        return self.decoder(states, state_lengths, frame_lengths)


class DASpeech(SpeechToUnits):
    """DASpeech without the vocoder: it converts speech to units, and the graph's hidden states to mel frames."""

    def __init__(self, config: DASpeechConfig, num_units: int) -> None:
        super().__init__(config, num_units)
        self.adaptor = Adaptor(config.dag.d_model, config.adaptor_ffn, config.tts.d_model, config.adaptor_dropout)
        self.tts = FastSpeech2(config.tts, num_units)

    def acoustic_input(self, hidden: Tensor) -> Tensor:
        """Convert the hidden states (B, K, D) of K vertices to the acoustic model's input (B, K, d_tts)."""
        return self.adaptor(hidden)


class Adaptor(nn.Module):
    """Two linear layers that map the graph decoder's hidden states to the channels of the acoustic model."""

    def __init__(self, d_in: int, ffn: int, d_out: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_in, ffn)
        self.fc2 = nn.Linear(ffn, d_out)
        self.dropout = PooledDropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.fc1(hidden).relu()))
