"""Log-mel frames to sound: a network shaped like Vocos (Siuzdak, 2023) that filters an excitation in the STFT domain.

Vocos predicts magnitude and phase of every STFT bin from mel frames and inverts once: it needs no upsampling, so it is
cheap. But a network that treats all frames alike cannot know how far a harmonic's phase advances between two frames; a
small one with little training buzzes. Here an oscillator carries the phase from frame to frame: the network predicts
the pitch, from which a pulse train is made. For each bin the head predicts a magnitude and a phase, which multiply the
spectrum of the pulses, and a magnitude for the spectrum of noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.audio import HOP, MELS, SAMPLE_RATE, WINDOW

BINS = WINDOW // 2 + 1
_OVERLAP = WINDOW // HOP
_NOISE_SEED = 0xD1CE
_MAX_LOG_GAIN = 6.0  # maximum log gain of a bin: exp(6) times an excitation of unit power is far beyond full scale


@dataclass(frozen=True)
class VocoderConfig:
    """Sizes; the defaults are the shipped vocoder's: 0.9 M parameters."""

    channels: int = 160
    hidden: int = 400
    blocks: int = 4
    kernel: int = 7
    min_pitch: float = 60.0  # Hz
    max_pitch: float = 400.0


class ConvNextBlock(nn.Module):
    """ConvNeXt (Liu et al., 2022) in one dimension: depthwise convolution, norm, two linear layers, scaled residual."""

    def __init__(self, channels: int, hidden: int, kernel: int, scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, hidden)
        self.down = nn.Linear(hidden, channels)
        self.scale = nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (B, F, C), keep (B, F, 1) -> (B, F, C)."""
        y = self.depthwise((x * keep).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.down(F.gelu(self.up(self.norm(y))))


class Vocoder(nn.Module):
    """forward: mel (B, F, 80), natural log on mmdec's frame grid, lengths (B,) in frames -> samples (B, F * 256).

    16 kHz. Sample 256 f is the centre of frame f. A row's output does not depend on other rows of the batch (up to
    rounding, which the oscillator accumulates: -60 dB) nor on chance: every call uses the same noise. Samples beyond a
    row's length are zero.
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
        self.head = nn.Linear(size, 3 * BINS)  # log gain of the pulses, their phase, log gain of the noise
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        self.pitch = nn.Linear(size, 1)  # log Hz, within the config's range
        self.register_buffer("mel_mean", torch.zeros(MELS))
        self.register_buffer("mel_std", torch.ones(MELS))
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    @torch.no_grad()
    def set_statistics(self, mel_mean: Tensor, mel_std: Tensor) -> None:
        """Set mean and deviation of the training mels, (80,) each; they are saved with the weights."""
        self.mel_mean.copy_(mel_mean)
        self.mel_std.copy_(mel_std)

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        samples, _ = self.synthesise(mel, lengths)
        return samples

    def synthesise(
        self, mel: Tensor, lengths: Tensor | None = None, pitch: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Samples (B, F * 256) and the predicted pitch (B, F) in Hz.

        pitch: (B, F) in Hz without gaps, replaces the prediction. noise: (B, F * 256), replaces the usual noise. Both
            are for training.
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
        predicted = (low + (high - low) * self.pitch(x).squeeze(-1).float().sigmoid()).exp()  # (B, F)
        pulse_gain, phase, noise_gain = self.head(x).float().chunk(3, dim=-1)  # (B, F, 513)
        if noise is None:
            noise = standard_noise(frames * HOP).to(mel.device).expand(batch, -1)
        valid = keep.squeeze(-1).repeat_interleave(HOP, dim=1)  # (B, F * 256)
        hertz = predicted.detach() if pitch is None else pitch
        if lengths is not None:  # the last frame's pitch continues to its end, whatever padding holds
            last = torch.minimum(torch.arange(frames, device=mel.device), (lengths[:, None] - 1).clamp(min=0))
            hertz = hertz.gather(1, last)
        pulses = pulse_train(hertz)
        spectrum = self._frames(pulses * valid) * torch.polar(pulse_gain.clamp(max=_MAX_LOG_GAIN).exp(), phase)
        spectrum = spectrum + self._frames(noise * valid) * noise_gain.clamp(max=_MAX_LOG_GAIN).exp()
        return self._overlap_add(spectrum * keep, keep), predicted

    def _frames(self, samples: Tensor) -> Tensor:
        """(B, F * 256) -> STFT (B, F, 513), frame f centred on sample 256 f."""
        padded = F.pad(samples, (WINDOW // 2, WINDOW // 2))
        return torch.fft.rfft(padded.unfold(1, WINDOW, HOP)[:, :-1] * self.window)

    def _overlap_add(self, spectrum: Tensor, keep: Tensor) -> Tensor:
        """Inverse STFT by least squares, over the frames that keep (B, F, 1) marks: (B, F, 513) -> (B, F * 256)."""
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
    """Pulses (B, F * 256) of unit power without aliasing, from pitch (B, F) in Hz; frame f is at sample 256 f.

    The sum of the harmonics below 7.5 kHz as cosines, in closed form, plus a share of the next one, so that no harmonic
    starts or stops with a click. The pitch is linear between frames.
    """
    following = torch.cat([pitch[:, 1:], pitch[:, -1:]], dim=1)
    step = torch.arange(HOP, device=pitch.device) / HOP
    hertz = pitch[..., None] + (following - pitch)[..., None] * step  # (B, F, 256)
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
    """Normal random numbers (size,), the same for every call: a prefix of one sequence."""
    blocks = -(-size // 65536)
    parts = [
        torch.randn(65536, generator=torch.Generator().manual_seed(_NOISE_SEED + index)) for index in range(blocks)
    ]
    return torch.cat(parts)[:size] if parts else torch.zeros(0)
