"""FastSpeech 2 (Ren et al., 2021) as in DASpeech: converts one vector per phone to a log-mel spectrogram.

The inputs are vectors (B, K, d) of K phones: embeddings of phone ids (`embed`), or the adaptor's output for the
vertices of the graph decoder. Duration, pitch and energy are predicted for each phone. The phone's vector is then
repeated for the number of its frames. The caller drops <s> and keeps </s>, which has duration 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmdec.nn.transformer import Attention, PooledDropout, sinusoids


@dataclass(frozen=True)
class FastSpeech2Config:
    """Sizes of FastSpeech 2; the defaults are those of the model with 41 M parameters in DASpeech's appendix."""

    d_model: int = 256
    encoder_layers: int = 4
    decoder_layers: int = 4
    heads: int = 4
    ffn: int = 1024
    # kernel widths, in phones or frames, of the two convolutions in a block's feed-forward
    kernels: tuple[int, int] = (9, 9)
    dropout: float = 0.1
    predictor: int = 256  # channels inside the predictors of duration, pitch and energy
    predictor_kernel: int = 3
    predictor_dropout: float = 0.5
    bins: int = 256  # number of bins into which pitch, and energy, are quantised
    pitch_range: tuple[float, float] = (1e-8, 6.6110)  # range of log(Hz + 1) that the bins cover
    energy_range: tuple[float, float] = (1e-8, 5.7056)  # range of log(energy + 1) that the bins cover
    mels: int = 80
    # kind of position embeddings; fairseq numbers positions from 2
    positions: Literal["sinusoidal", "fairseq"] = "sinusoidal"

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> FastSpeech2Config:
        """Make a configuration from the dict of `dataclasses.asdict`, also if JSON turned its tuples into lists."""
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**sizes)

    @classmethod
    def small(cls) -> FastSpeech2Config:
        """Return the sizes of the small model (1.1 M parameters), for one voice of limited range."""
        return cls(
            d_model=128,
            encoder_layers=2,
            decoder_layers=3,
            heads=2,
            ffn=160,
            kernels=(5, 1),
            predictor=64,
            predictor_dropout=0.3,
            pitch_range=(4.4, 6.0),
            energy_range=(0.0, 5.7056),
        )


@dataclass(frozen=True)
class FastSpeech2Output:
    """The output of one pass over B rows of K phones. Frames and phones beyond a row's length are zero."""

    mel: Tensor  # (B, F, 80), log mels of F frames, natural logarithm
    mel_lengths: Tensor  # (B,), number of frames of each row
    log_durations: Tensor  # (B, K), predicted log(frames + 1)
    durations: Tensor  # (B, K), number of frames of each phone in `mel`: given, or predicted and rounded
    pitch: Tensor  # (B, K), predicted log(Hz + 1)
    energy: Tensor  # (B, K), predicted log(energy + 1)


@dataclass(frozen=True)
class AcousticBatch:
    """Targets for `acoustic_loss`. The last phone of each row is </s>, with duration, pitch and energy 0."""

    lengths: Tensor  # (B,), number of phones of each row
    durations: Tensor  # (B, K), number of frames of each phone
    pitch: Tensor  # (B, K), pitch of each phone in Hz
    energy: Tensor  # (B, K), energy of each phone, linear
    mel: Tensor  # (B, F, 80), log mels, natural logarithm
    mel_lengths: Tensor  # (B,), number of frames of each row

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AcousticBatch:
        """Return the same batch on another device."""
        tensors = (self.lengths, self.durations, self.pitch, self.energy, self.mel, self.mel_lengths)
        return AcousticBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


@dataclass(frozen=True)
class AcousticLoss:
    """The four terms whose sum is the acoustic loss, each a scalar."""

    mel: Tensor
    duration: Tensor
    pitch: Tensor
    energy: Tensor

    @property
    def total(self) -> Tensor:
        """The acoustic loss, the sum of the four terms."""
        return self.mel + self.duration + self.pitch + self.energy


class FftBlock(nn.Module):
    """A post-norm Transformer block: self-attention, then a feed-forward network of two convolutions."""

    def __init__(self, config: FastSpeech2Config) -> None:
        super().__init__()
        d, (first, second) = config.d_model, config.kernels
        self.attention = Attention(d, config.heads, config.dropout)
        self.attention_norm = nn.LayerNorm(d)
        self.conv1 = nn.Conv1d(d, config.ffn, first, padding=first // 2)
        self.conv2 = nn.Conv1d(config.ffn, d, second, padding=second // 2)
        self.ffn_norm = nn.LayerNorm(d)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        """Apply the block to x (B, T, d).

        Args:
            keep: (B, T, 1), 1 at valid positions, 0 at padding.
            bias: (B, 1, 1, T), added to attention scores: 0 at valid positions, -1e9 at padding.

        Returns:
            (B, T, d).
        """
        keys, values = self.attention.keys_values(x)
        y = self.attention.attend(x, keys, values, bias)
        x = self.attention_norm(x + self.dropout(y))
        y = self.conv1((x * keep).transpose(1, 2)).relu()  # shape (B, ffn, T)
        y = self.conv2(y * keep.transpose(1, 2)).transpose(1, 2)
        return self.ffn_norm(x + self.dropout(y))


class Predictor(nn.Module):
    """Predicts one number for each phone. Twice: convolution, ReLU, norm, dropout; then a linear layer."""

    def __init__(self, config: FastSpeech2Config) -> None:
        super().__init__()
        d, size, kernel = config.d_model, config.predictor, config.predictor_kernel
        self.convs = nn.ModuleList(
            [nn.Conv1d(d if i == 0 else size, size, kernel, padding=kernel // 2) for i in (0, 1)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in (0, 1)])
        self.dropout = PooledDropout(config.predictor_dropout)
        self.out = nn.Linear(size, 1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Predict one number (B, K) for each phone vector in x (B, K, d).

        Args:
            keep: (B, K, 1), 1 at phones, 0 at padding, where the result is 0.
        """
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv((x * keep).transpose(1, 2)).transpose(1, 2)
            x = self.dropout(norm(x.relu()))
        return (self.out(x) * keep).squeeze(-1)


class FastSpeech2(nn.Module):
    """Converts phone vectors to log-mel frames.

    Holds the weights, the phone embeddings (`embed`) and statistics of the training data.
    """

    mel_mean: Tensor
    mel_std: Tensor
    pitch_stats: Tensor
    energy_stats: Tensor
    pitch_edges: Tensor
    energy_edges: Tensor

    def __init__(self, config: FastSpeech2Config, num_units: int) -> None:
        super().__init__()
        self.config = config
        d = config.d_model
        self.units = nn.Embedding(num_units, d)
        nn.init.normal_(self.units.weight, std=d**-0.5)
        self.encoder_scale = nn.Parameter(torch.ones(()))  # factor on the position embeddings in the encoder
        self.decoder_scale = nn.Parameter(torch.ones(()))
        self.encoder = nn.ModuleList([FftBlock(config) for _ in range(config.encoder_layers)])
        self.decoder = nn.ModuleList([FftBlock(config) for _ in range(config.decoder_layers)])
        self.duration = Predictor(config)
        self.pitch = Predictor(config)
        self.energy = Predictor(config)
        self.pitch_bins = nn.Embedding(config.bins, d)
        self.energy_bins = nn.Embedding(config.bins, d)
        for bins in (self.pitch_bins, self.energy_bins):
            nn.init.normal_(bins.weight, std=d**-0.5)
        self.out = nn.Linear(d, config.mels)
        # statistics of the training data, which are saved with the weights; these values have no effect until
        # `set_statistics`
        self.register_buffer("mel_mean", torch.zeros(config.mels))
        self.register_buffer("mel_std", torch.ones(config.mels))
        self.register_buffer("pitch_stats", torch.tensor([0.0, 1.0]))  # mean and deviation of log(Hz + 1)
        self.register_buffer("energy_stats", torch.tensor([0.0, 1.0]))  # mean and deviation of log(energy + 1)
        self.register_buffer("pitch_edges", torch.linspace(*config.pitch_range, config.bins - 1), persistent=False)
        self.register_buffer("energy_edges", torch.linspace(*config.energy_range, config.bins - 1), persistent=False)

    @torch.no_grad()
    def set_statistics(self, mel_mean: Tensor, mel_std: Tensor, pitch: Tensor, energy: Tensor) -> None:
        """Set statistics of the training data.

        Args:
            mel_mean: (80,), mean of each mel band.
            mel_std: (80,), standard deviation of each mel band.
            pitch: (2,), mean and standard deviation of log(Hz + 1).
            energy: (2,), mean and standard deviation of log(energy + 1).
        """
        self.mel_mean.copy_(mel_mean)
        self.mel_std.copy_(mel_std)
        self.pitch_stats.copy_(pitch)
        self.energy_stats.copy_(energy)

    def embed(self, units: Tensor) -> Tensor:
        """Return the embeddings (B, K, d) of phone ids (B, K)."""
        return self.units(units)

    def forward(
        self,
        inputs: Tensor,
        lengths: Tensor,
        durations: Tensor | None = None,
        pitch: Tensor | None = None,
        energy: Tensor | None = None,
        max_frames: int = 2048,
    ) -> FastSpeech2Output:
        """Predict the log mels of B rows of phones.

        On a GPU this method synchronises once, to read the number of frames. Durations, pitch and energy that are given
        replace the predictions (teacher forcing).

        Args:
            inputs: (B, K, d), phone vectors.
            lengths: (B,), numbers of phones.
            durations: (B, K), in frames; None: predict.
            pitch: (B, K), in Hz; None: predict.
            energy: (B, K), linear; None: predict.
            max_frames: Maximum frames of a row; longer rows are cut.
        """
        keep, bias = _masks(lengths, inputs.shape[1], inputs.dtype)
        x = inputs + self.encoder_scale * self._positions(inputs)
        for block in self.encoder:
            x = block(x, keep, bias)

        log_durations = self.duration(x, keep).float()  # shape (B, K)
        valid = keep.squeeze(-1)
        pitch_log = self._denormalise(self.pitch(x, keep), self.pitch_stats, valid)
        used = pitch_log if pitch is None else pitch.log1p()
        x = x + self.pitch_bins(torch.bucketize(used.detach(), self.pitch_edges))
        energy_log = self._denormalise(self.energy(x, keep), self.energy_stats, valid)
        used = energy_log if energy is None else energy.log1p()
        x = x + self.energy_bins(torch.bucketize(used.detach(), self.energy_edges))

        predicted = (log_durations.detach().exp() - 1).round().clamp(min=0)
        counts = (predicted if durations is None else durations).long() * valid.long()  # shape (B, K)
        frames, mel_lengths = regulate_lengths(x, counts, max_frames)  # shape (B, F, d)
        keep, bias = _masks(mel_lengths, frames.shape[1], frames.dtype)
        y = frames + self.decoder_scale * self._positions(frames)
        for block in self.decoder:
            y = block(y, keep, bias)
        mel = (self.out(y).float() * self.mel_std + self.mel_mean) * keep
        return FastSpeech2Output(mel, mel_lengths, log_durations, counts, pitch_log, energy_log)

    def _positions(self, x: Tensor) -> Tensor:
        return sinusoids(x.shape[1], x.shape[2], x.device, self.config.positions == "fairseq").to(x.dtype)

    @staticmethod
    def _denormalise(raw: Tensor, stats: Tensor, valid: Tensor) -> Tensor:
        return (raw.float() * stats[1] + stats[0]) * valid


def regulate_lengths(x: Tensor, durations: Tensor, max_frames: int = 2048) -> tuple[Tensor, Tensor]:
    """Repeat each phone's vector for the number of its frames.

    Args:
        x: (B, K, d).
        durations: (B, K), in frames.
        max_frames: Maximum frames of a row; longer rows are cut.

    Returns:
        (B, F, d), and the numbers of frames (B,). F is the number of frames of the longest row, at least 1. Frames
        beyond a row's length repeat the row's last phone: the caller must mask them.
    """
    ends = durations.cumsum(1).clamp(max=max_frames)  # shape (B, K)
    lengths = ends[:, -1]
    size = max(1, int(lengths.max()))
    frames = torch.arange(size, device=x.device).expand(x.shape[0], size).contiguous()
    index = torch.searchsorted(ends, frames, right=True).clamp(max=x.shape[1] - 1)  # shape (B, F)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2])), lengths


def acoustic_loss(output: FastSpeech2Output, batch: AcousticBatch, model: FastSpeech2) -> AcousticLoss:
    """Compute the loss of FastSpeech 2.

    Its terms are the mean absolute error of the log mels, and the mean squared errors of log(duration + 1), log(Hz + 1)
    and log(energy + 1). Mel, pitch and energy are normalised by the statistics in `model`, so that voices of other
    ranges have the same weight. `output` must have been computed with the durations of `batch`. Means are over the
    valid frames and phones.
    """
    phones = torch.arange(batch.durations.shape[1], device=batch.lengths.device) < batch.lengths[:, None]  # (B, K)
    voiced = phones & (batch.durations > 0)  # not </s>, which has neither pitch nor energy
    frames = torch.arange(output.mel.shape[1], device=batch.mel.device) < output.mel_lengths[:, None]  # shape (B, F)
    apart = ((output.mel - batch.mel[:, : output.mel.shape[1]]).abs() / model.mel_std).mean(-1)

    def squared_error(predicted: Tensor, truth: Tensor, mask: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        error = ((predicted - truth.float().log1p()) / scale).square()
        return (error * mask).sum() / mask.sum().clamp(min=1)

    return AcousticLoss(
        mel=(apart * frames).sum() / frames.sum().clamp(min=1),
        duration=squared_error(output.log_durations, batch.durations, phones),
        pitch=squared_error(output.pitch, batch.pitch, voiced, model.pitch_stats[1]),
        energy=squared_error(output.energy, batch.energy, voiced, model.energy_stats[1]),
    )


def _masks(lengths: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make two masks for rows of the given lengths (B,).

    Returns:
        (B, size, 1), 1 at valid positions and 0 at padding; (B, 1, 1, size), to add to attention scores.
    """
    valid = torch.arange(size, device=lengths.device) < lengths[:, None]
    return valid[..., None].to(dtype), torch.where(valid, 0.0, -1e9)[:, None, None, :]
