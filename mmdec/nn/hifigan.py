"""transformers' HiFi-GAN (Kong et al., 2020) with the interface of `Vocoder`: mel (B, F, 80) -> samples (B, F * 256).

Each published generator was trained on its own kind of mels (sample rate, band, logarithm), which `MelKind` describes.
mmdec's mels are converted to it, approximately. `hub/hifigan.py` loads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import FastSpeech2ConformerHifiGan, SpeechT5HifiGan
from transformers.audio_utils import mel_filter_bank

from mmdec.audio import HOP, LOG_FLOOR, MELS, SAMPLE_RATE, WINDOW, resample


@dataclass(frozen=True)
class MelKind:
    """A log-mel convention: 80 Slaney filters on magnitudes with a window of 1024 samples."""

    sample_rate: int = SAMPLE_RATE
    hop: int = HOP
    f_min: float = 20.0
    f_max: float = 8000.0
    log10: bool = False  # logarithm of base 10; False: natural logarithm


OURS = MelKind()
_ROUNDS = 30
SPEECHT5 = MelKind(f_min=80.0, f_max=7600.0, log10=True)  # microsoft/speecht5_hifigan, 16 kHz
ESPNET = MelKind(sample_rate=22_050, f_min=80.0, f_max=7600.0, log10=True)  # espnet/fastspeech2_conformer_hifigan


class HifiGanVocoder(nn.Module):
    """forward: mel (B, F, 80), natural log on mmdec's frame grid, lengths (B,) -> samples (B, F * 256) at 16 kHz.

    Samples beyond a row's length are zero. HiFi-GAN reads a few frames of padding at a row's end, so the last frames of
    a row in a batch may differ from those of the row alone.
    """

    def __init__(self, generator: SpeechT5HifiGan | FastSpeech2ConformerHifiGan, expects: MelKind) -> None:
        super().__init__()
        self.generator = generator
        self.expects = expects

    @torch.no_grad()
    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> Tensor:
        batch, frames, _ = mel.shape
        real = None
        if lengths is not None:
            real = torch.arange(frames, device=mel.device) < lengths[:, None]  # (B, F)
            mel = torch.where(real[..., None], mel, torch.log(mel.new_tensor(LOG_FLOOR)))
        samples = self.generator(adapt_mel(mel, self.expects)).view(batch, -1)
        samples = resample(samples, self.expects.sample_rate, SAMPLE_RATE)
        samples = F.pad(samples, (0, max(0, frames * HOP - samples.shape[1])))[:, : frames * HOP]
        return samples if real is None else samples * real.repeat_interleave(HOP, dim=1)


def adapt_mel(mel: Tensor, kind: MelKind) -> Tensor:
    """Convert mmdec's log mels (B, F, 80) to another kind (B, F', 80), through the linear spectrum's magnitudes.

    This is an approximation: nothing is known above 8 kHz, and 80 filters do not determine 513 bins.
    """
    if kind == OURS:
        return mel
    filters, linear = _filters(OURS).to(mel.device), mel.exp()
    magnitudes = (linear @ torch.linalg.pinv(filters)).clamp(min=1e-6)  # (B, F, 513)
    for _ in range(_ROUNDS):  # non-negative least squares by multiplicative updates (Lee and Seung, 2000)
        magnitudes = magnitudes * (linear @ filters.T) / (magnitudes @ filters @ filters.T).clamp(min=1e-9)
    frames = max(1, round(mel.shape[1] * HOP / SAMPLE_RATE * kind.sample_rate / kind.hop))
    if frames != mel.shape[1]:
        magnitudes = F.interpolate(magnitudes.transpose(1, 2), frames, mode="linear").transpose(1, 2)
    if kind.sample_rate != SAMPLE_RATE:  # bin b of the other kind is at b * rate / 1024 Hz
        bands = torch.arange(WINDOW // 2 + 1, device=mel.device) * (kind.sample_rate / SAMPLE_RATE)
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
