"""Vocoders, which convert log-mel frames to sound: mmdec's own network, and published HiFi-GANs.

mmdec's network is similar to Vocos (Siuzdak, 2023), and filters an excitation signal in the STFT domain. Vocos predicts
magnitude and phase of every STFT bin from mel frames and inverts the STFT once; it needs no upsampling, so it is cheap.
But a network that treats all frames alike cannot know how far the phase of a harmonic advances between two frames; a
small network with little training gives a buzzing sound. Here an oscillator continues the phase from frame to frame.
The network predicts the pitch, from which a pulse train is made. For each bin it also predicts a magnitude and a phase,
which multiply the spectrum of the pulses, and a magnitude for the spectrum of noise.

Each published HiFi-GAN was trained on its own kind of mels (sample rate, band, logarithm), which `MelKind` describes;
mmdec's mels are converted to this kind, approximately. `daspeech/hifigan.py` loads the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank

from mmdec.io.audio import HOP, LOG_FLOOR, MELS, SAMPLE_RATE, WINDOW, resample

if TYPE_CHECKING:
    from transformers import FastSpeech2ConformerHifiGan, SpeechT5HifiGan

BINS = WINDOW // 2 + 1
_OVERLAP = WINDOW // HOP
_NOISE_SEED = 0xD1CE
_MAX_LOG_GAIN = 6.0  # maximum natural log of a bin's gain; exp(6) times the excitation is already far beyond full scale
_ROUNDS = 30


@dataclass(frozen=True)
class VocoderConfig:
    """Sizes of the vocoder; the defaults are those of the shipped vocoder (0.9 M parameters)."""

    channels: int = 160
    hidden: int = 400  # inner channels of a block
    blocks: int = 4
    kernel: int = 7  # number of frames that a convolution spans
    min_pitch: float = 60.0  # lowest pitch in Hz that can be predicted
    max_pitch: float = 400.0  # highest pitch in Hz that can be predicted


class ConvNextBlock(nn.Module):
    """A one-dimensional ConvNeXt block (Liu et al., 2022) with a scaled residual."""

    def __init__(self, channels: int, hidden: int, kernel: int, scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, hidden)
        self.down = nn.Linear(hidden, channels)
        self.scale = nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Apply the block to x (B, F, C).

        Args:
            keep: (B, F, 1), 1 at frames, 0 at padding.

        Returns:
            (B, F, C).
        """
        y = self.depthwise((x * keep).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.down(F.gelu(self.up(self.norm(y))))


class Vocoder(nn.Module):
    """mmdec's vocoder network.

    A row's output does not depend on the other rows of the batch, except for rounding (-60 dB, because the oscillator
    accumulates rounding errors). Every call uses the same noise, so the output is deterministic.
    """

    mel_mean: Tensor
    mel_std: Tensor
    window: Tensor

    def __init__(self, config: VocoderConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or VocoderConfig()
        size = config.channels
        self.first = nn.Conv1d(MELS, size, config.kernel, padding=config.kernel // 2)
        self.first_norm = nn.LayerNorm(size)
        self.blocks = nn.ModuleList(
            [ConvNextBlock(size, config.hidden, config.kernel, 1 / config.blocks) for _ in range(config.blocks)]
        )
        self.last_norm = nn.LayerNorm(size)
        # for each bin: log gain of the pulses, their phase shift, log gain of the noise
        self.head = nn.Linear(size, 3 * BINS)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.pitch = nn.Linear(size, 1)  # natural log of the pitch in Hz, scaled to the configured range
        self.register_buffer("mel_mean", torch.zeros(MELS))
        self.register_buffer("mel_std", torch.ones(MELS))
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    @torch.no_grad()
    def set_statistics(self, mel_mean: Tensor, mel_std: Tensor) -> None:
        """Set the mean and standard deviation of the training mels, (80,) each; they are saved with the weights."""
        self.mel_mean.copy_(mel_mean)
        self.mel_std.copy_(mel_std)

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Convert mels to samples.

        Args:
            mel: (B, F, 80), natural logarithm, 16 ms per frame.
            lengths: (B,), numbers of frames; None: all rows have F.

        Returns:
            Samples (B, F * 256) at 16 kHz, zero beyond a row's length. Sample 256 f is the centre of frame f.
        """
        samples, _ = self.synthesise(mel, lengths)
        return samples

    def synthesise(
        self, mel: Tensor, lengths: Tensor | None = None, pitch: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute samples (B, F * 256) and the predicted pitch (B, F) in Hz.

        Args:
            mel: (B, F, 80).
            lengths: (B,), numbers of frames; None: all F.
            pitch: (B, F) in Hz, also at unvoiced frames, used instead of the prediction.
            noise: (B, F * 256), used instead of the standard noise. Both are for training.
        """
        batch, frames, _ = mel.shape
        keep = mel.new_ones(batch, frames, 1)
        if lengths is not None:
            keep = (torch.arange(frames, device=mel.device) < lengths[:, None])[..., None].to(mel.dtype)
        x = (mel - self.mel_mean) / self.mel_std * keep
        x = self.first_norm(self.first(x.transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            x = block(x, keep)
        x = self.last_norm(x)
        low, high = math.log(self.config.min_pitch), math.log(self.config.max_pitch)
        predicted = (low + (high - low) * self.pitch(x).squeeze(-1).float().sigmoid()).exp()  # shape (B, F)
        pulse_gain, phase, noise_gain = self.head(x).float().chunk(3, dim=-1)  # shape (B, F, 513)
        if noise is None:
            noise = standard_noise(frames * HOP).to(mel.device).expand(batch, -1)
        valid = keep.squeeze(-1).repeat_interleave(HOP, dim=1)  # shape (B, F * 256)
        hertz = predicted.detach() if pitch is None else pitch
        if lengths is not None:  # repeat the pitch of the last frame, so that padding does not change the row
            last = torch.minimum(torch.arange(frames, device=mel.device), (lengths[:, None] - 1).clamp(min=0))
            hertz = hertz.gather(1, last)
        pulses = pulse_train(hertz)
        spectrum = self._frames(pulses * valid) * torch.polar(pulse_gain.clamp(max=_MAX_LOG_GAIN).exp(), phase)
        spectrum = spectrum + self._frames(noise * valid) * noise_gain.clamp(max=_MAX_LOG_GAIN).exp()
        return self._overlap_add(spectrum * keep, keep), predicted

    def _frames(self, samples: Tensor) -> Tensor:
        """Compute the STFT (B, F, 513) of samples (B, F * 256). Frame f is centred at sample 256 f."""
        padded = F.pad(samples, (WINDOW // 2, WINDOW // 2))
        return torch.fft.rfft(padded.unfold(1, WINDOW, HOP)[:, :-1] * self.window)

    def _overlap_add(self, spectrum: Tensor, keep: Tensor) -> Tensor:
        """Invert the STFT (B, F, 513) by overlap-add, the least-squares solution: (B, F * 256).

        Args:
            keep: (B, F, 1), 1 at the frames to use, 0 at padding.
        """
        batch, frames, _ = spectrum.shape
        pieces = (torch.fft.irfft(spectrum, n=WINDOW) * self.window).view(batch, frames, _OVERLAP, HOP)
        weights = self.window.square().view(_OVERLAP, HOP)
        total = pieces.new_zeros(batch, frames + _OVERLAP - 1, HOP)
        weight = pieces.new_zeros(batch, frames + _OVERLAP - 1, HOP)
        for shift in range(_OVERLAP):
            total[:, shift : shift + frames] += pieces[:, :, shift]
            weight[:, shift : shift + frames] += keep * weights[shift]
        middle = slice(_OVERLAP // 2, _OVERLAP // 2 + frames)  # half a window lies before sample 0
        samples = total[:, middle] / weight[:, middle].clamp(min=1e-3) * keep
        return samples.reshape(batch, frames * HOP)


def pulse_train(pitch: Tensor) -> Tensor:
    """Make a pulse train (B, F * 256) of unit power without aliasing.

    The pulses are a sum of cosines: all harmonics below 7.5 kHz, in closed form, and a fraction of the next harmonic,
    so that no harmonic starts or stops with a click.

    Args:
        pitch: (B, F) in Hz; frame f is at sample 256 f, and the pitch is linear between frames.
    """
    following = torch.cat([pitch[:, 1:], pitch[:, -1:]], dim=1)
    step = torch.arange(HOP, device=pitch.device) / HOP
    hertz = pitch[..., None] + (following - pitch)[..., None] * step  # shape (B, F, 256)
    hertz = hertz.flatten(1)
    turns = (hertz.double() / SAMPLE_RATE).cumsum(1)
    angle = (math.pi * (turns - turns.round())).float()  # half the phase, in [-pi/2, pi/2]
    number = 7500.0 / hertz
    count = number.floor()
    small = angle.abs() < 1e-4
    divisor = torch.where(small, 1.0, angle.sin())
    kernel = torch.where(small, 2 * count + 1, ((2 * count + 1) * angle).sin() / divisor)
    pulses = (kernel - 1) * 0.5 + (number - count) * (2 * (count + 1) * angle).cos()
    return pulses * (2 / number).sqrt()


def standard_noise(size: int) -> Tensor:
    """Return standard normal noise (size,): always the first `size` numbers of the same sequence."""
    blocks = -(-size // 65536)
    parts = [
        torch.randn(65536, generator=torch.Generator().manual_seed(_NOISE_SEED + index)) for index in range(blocks)
    ]
    return torch.cat(parts)[:size] if parts else torch.zeros(0)


@dataclass(frozen=True)
class MelKind:
    """A kind of log-mel spectrogram.

    All kinds have 80 Slaney filters on STFT magnitudes with a window of 1024 samples.
    """

    sample_rate: int = SAMPLE_RATE  # Hz
    hop: int = HOP  # samples between two frames
    f_min: float = 20.0  # lower end of the lowest filter, Hz
    f_max: float = 8000.0  # upper end of the highest filter, Hz
    log10: bool = False  # logarithm of base 10; False: natural logarithm

    def samples(self, frames: int) -> int:
        """Return the number of 16 kHz samples that last as long as this number of frames."""
        return frames * self.hop * SAMPLE_RATE // self.sample_rate


OUR_MELS = MelKind()
SPEECHT5 = MelKind(f_min=80.0, f_max=7600.0, log10=True)  # microsoft/speecht5_hifigan, 16 kHz
ESPNET = MelKind(sample_rate=22_050, f_min=80.0, f_max=7600.0, log10=True)  # espnet/fastspeech2_conformer_hifigan


class HifiGanVocoder(nn.Module):
    """A vocoder that uses transformers' HiFi-GAN (Kong et al., 2020).

    HiFi-GAN reads a few frames of padding at a row's end, so the last frames of a row may depend on the batch.

    Args:
        generator: transformers' network.
        expects: The kind of mels on which the generator was trained.
        received: The kind of mels that `forward` gets; they are converted if the generator expects another kind.
    """

    def __init__(
        self, generator: SpeechT5HifiGan | FastSpeech2ConformerHifiGan, expects: MelKind, received: MelKind = OUR_MELS
    ) -> None:
        super().__init__()
        self.generator = generator
        self.expects, self.received = expects, received

    @torch.no_grad()
    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Convert mels to samples.

        Args:
            mel: (B, F, 80) of the kind `received`.
            lengths: (B,), numbers of frames; None: all rows have F.

        Returns:
            Samples (B, received.samples(F)) at 16 kHz, zero beyond a row's length.
        """
        batch, frames, _ = mel.shape
        size = self.received.samples(frames)
        if lengths is not None:
            real = torch.arange(frames, device=mel.device) < lengths[:, None]  # shape (B, F)
            mel = torch.where(real[..., None], mel, torch.log(mel.new_tensor(LOG_FLOOR)))
        samples = self.generator(adapt_mel(mel, self.expects, self.received)).view(batch, -1)
        samples = resample(samples, self.expects.sample_rate, SAMPLE_RATE)
        samples = F.pad(samples, (0, max(0, size - samples.shape[1])))[:, :size]
        if lengths is None:
            return samples
        ends = lengths * self.received.hop * SAMPLE_RATE // self.received.sample_rate
        return samples * (torch.arange(size, device=mel.device) < ends[:, None])


def adapt_mel(mel: Tensor, kind: MelKind, received: MelKind = OUR_MELS) -> Tensor:
    """Convert log mels to another kind, by way of the magnitudes of a linear spectrum.

    It is an approximation: 80 filters do not determine 513 bins, and nothing is known above f_max.

    Args:
        mel: (B, F, 80).
        kind: The kind of the result.
        received: The kind of `mel`, whose logarithm must be natural.

    Returns:
        (B, F', 80).
    """
    if kind == received:
        return mel
    filters, linear = _filters(received).to(mel.device), mel.exp()
    magnitudes = (linear @ torch.linalg.pinv(filters)).clamp(min=1e-6)  # shape (B, F, 513)
    for _ in range(_ROUNDS):  # non-negative least squares by multiplicative updates (Lee and Seung, 2000)
        magnitudes = magnitudes * (linear @ filters.T) / (magnitudes @ filters @ filters.T).clamp(min=1e-9)
    frames = max(1, round(mel.shape[1] * received.hop / received.sample_rate * kind.sample_rate / kind.hop))
    if frames != mel.shape[1]:
        magnitudes = F.interpolate(magnitudes.transpose(1, 2), frames, mode="linear").transpose(1, 2)
    if kind.sample_rate != received.sample_rate:  # bin b of the other kind is at the frequency b * rate / 1024 Hz
        bands = torch.arange(WINDOW // 2 + 1, device=mel.device) * (kind.sample_rate / received.sample_rate)
        low = bands.floor().long().clamp(max=WINDOW // 2 - 1)
        share = (bands - low).clamp(0, 1)
        inside = (bands <= WINDOW // 2).to(mel.dtype)
        magnitudes = (magnitudes[..., low] * (1 - share) + magnitudes[..., low + 1] * share) * inside
    adapted = (magnitudes @ _filters(kind).to(mel.device)).clamp(min=LOG_FLOOR)
    return adapted.log10() if kind.log10 else adapted.log()


@lru_cache(maxsize=8)
def _filters(kind: MelKind) -> Tensor:  # (513, 80)
    bank: Any = mel_filter_bank(
        WINDOW // 2 + 1, MELS, kind.f_min, kind.f_max, kind.sample_rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(bank).float()
