"""Published HiFi-GAN weights (Kong et al., 2020) behind the call of `Vocoder`: mel (B, F, 80) -> samples (B, F * 256).

transformers' `SpeechT5HifiGan` and `FastSpeech2ConformerHifiGan` load from a directory with safetensors. The authors'
own generator file (`generator_v1`, `g_02500000`, ... with its `config.json` beside it) is a pickle: `convert` reads
tensors alone from it and writes such a directory. Each was trained on mels of its own (rate, band, logarithm):
`MelKind` says which, and ours are turned into them, approximately.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerHifiGanConfig,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)
from transformers.audio_utils import mel_filter_bank

from mmdec.audio import HOP, LOG_FLOOR, MELS, SAMPLE_RATE, WINDOW, resample
from mmdec.checks.weights import NOT_FOLLOWED, fill, fill_pretrained, read_settings
from mmdec.types import InputError


@dataclass(frozen=True)
class MelKind:
    """A log-mel convention: 80 Slaney filters on magnitudes with a window of 1024 samples."""

    sample_rate: int = SAMPLE_RATE
    hop: int = HOP
    f_min: float = 20.0
    f_max: float = 8000.0
    log10: bool = False  # else the natural logarithm


OURS = MelKind()
MELS_KEY = "mmdec_mels"  # where a converted generator's config keeps its mels
_ROUNDS = 30
SPEECHT5 = MelKind(f_min=80.0, f_max=7600.0, log10=True)  # microsoft/speecht5_hifigan, 16 kHz
ESPNET = MelKind(sample_rate=22_050, f_min=80.0, f_max=7600.0, log10=True)  # espnet/fastspeech2_conformer_hifigan


class HifiGanVocoder(nn.Module):
    """forward: mel (B, F, 80), natural log on mmdec's frame grid, lengths (B,) -> samples (B, F * 256) at 16 kHz.

    Samples beyond a row's length are zero. HiFi-GAN sees a few frames of padding at a row's end, so a row in a batch
    may differ from the row alone in its last frames.
    """

    def __init__(self, generator: SpeechT5HifiGan | FastSpeech2ConformerHifiGan, expects: MelKind) -> None:
        super().__init__()
        self.generator = generator
        self.expects = expects

    @classmethod
    def load(cls, vocoder: str | Path, expects: MelKind | None = None) -> HifiGanVocoder:
        """From a directory. `expects`: other mels than usual for its kind.

        Raises InputError where there are no such weights, or where they were trained on mels that ours cannot become.
        """
        path = Path(vocoder)
        if path.is_file():
            raise InputError(
                f"`vocoder` must be a directory with safetensors, but is the file '{vocoder}', and pickles are not "
                "read. Convert the authors' generator file with `mmdec convert hifigan IN OUT`."
            )
        try:
            return cls._load(path, expects)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # transformers has no one error for damaged settings
            raise InputError(
                f"`vocoder` must hold whole HiFi-GAN weights, but '{vocoder}' does not ({type(error).__name__}: "
                f"{error!s:.200}). Fetch them again."
            ) from error

    @classmethod
    def _load(cls, folder: Path, expects: MelKind | None) -> HifiGanVocoder:
        if not (folder / "config.json").is_file():
            raise InputError(f"`vocoder` must hold a config.json, but '{folder}' does not. Check the path.")
        described = read_settings(folder / "config.json", "vocoder")
        kind = str(described.get("model_type", ""))
        if kind == SpeechT5HifiGanConfig.model_type:
            network, settings, usual = SpeechT5HifiGan, SpeechT5HifiGanConfig, SPEECHT5
        elif kind == FastSpeech2ConformerHifiGanConfig.model_type:
            network, settings, usual = FastSpeech2ConformerHifiGan, FastSpeech2ConformerHifiGanConfig, ESPNET
        else:
            raise InputError(
                f"`vocoder` must be a SpeechT5HifiGan or FastSpeech2ConformerHifiGan, but its model_type is {kind!r}. "
                "Name the directory or hub id of one of these."
            )
        config = settings.from_dict({name: one for name, one in described.items() if name not in NOT_FOLLOWED})
        if MELS_KEY in described:
            usual = MelKind(**described[MELS_KEY])
        rate = described.get("sampling_rate", usual.sample_rate)  # not every kind names it
        if expects is None and rate != usual.sample_rate:
            raise InputError(
                f"`vocoder` of the kind {kind} must speak at {usual.sample_rate} Hz, where its mels are known, "
                f"but speaks at {rate}. Load it with HifiGanVocoder.load(..., expects=MelKind(...))."
            )
        _check_mels(config.model_in_dim, math.prod(config.upsample_rates), (expects or usual).hop)
        return cls(fill_pretrained(network, config, folder, "vocoder").eval(), expects or usual)

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


def convert(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """The authors' generator file, with its config.json beside it -> a directory that `HifiGanVocoder.load` reads,
    whole or not at all.

    The file is a pickle; tensors and plain values alone are taken from it, no code is run. Raises InputError for
    another generator, and for mels that ours cannot become.
    """
    path, target = Path(source), Path(directory)
    if not path.is_file() or not path.with_name("config.json").is_file():
        raise InputError(
            f"`source` must be a generator file with its config.json beside it, but '{path}' is not. Fetch both."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"`directory` must be new or empty, but '{target}' is not. Choose another.")
    described = read_settings(path.with_name("config.json"), "source")
    try:
        generator, mels = _official(path, described)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(
            f"`source` must hold a whole HiFi-GAN generator, but '{path}' does not ({type(error).__name__}: "
            f"{error!s:.200}). Fetch it again."
        ) from error
    setattr(generator.config, MELS_KEY, asdict(mels))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        generator.save_pretrained(fresh)
        fresh.chmod(0o755)
        os.replace(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return target


def _official(path: Path, described: dict[str, Any]) -> tuple[FastSpeech2ConformerHifiGan, MelKind]:
    """The generator that the authors' file holds, and its mels."""
    if str(described.get("resblock", "1")) != "1":
        raise InputError("`source` must have residual blocks of type 1 (V1, V2), but has type 2. Use V1 or V2.")
    windows = (described.get("n_fft", WINDOW), described.get("win_size", WINDOW))
    if windows != (WINDOW, WINDOW):
        raise InputError(f"`source` must know mels of windows of {WINDOW} samples, but knows {windows}. Use another.")
    bands, hop = described.get("num_mels", MELS), described.get("hop_size", HOP)
    _check_mels(bands, math.prod(described["upsample_rates"]), hop, "source")
    sizes = ("upsample_rates", "upsample_kernel_sizes", "upsample_initial_channel", "resblock_kernel_sizes")
    config = FastSpeech2ConformerHifiGanConfig(
        model_in_dim=bands,
        resblock_dilation_sizes=described["resblock_dilation_sizes"],
        normalize_before=False,
        **{name: described[name] for name in sizes},
    )
    stored = torch.load(path, map_location="cpu", weights_only=True)
    state = official_names(stored.get("generator", stored))
    state |= {"mean": torch.zeros(bands), "scale": torch.ones(bands)}
    kind = MelKind(
        sample_rate=described.get("sampling_rate", 22_050),
        hop=hop,
        f_min=float(described.get("fmin", 0)),
        f_max=float(described.get("fmax") or 8000),
    )
    return fill(lambda: FastSpeech2ConformerHifiGan(config), state, "source", path).eval(), kind


def official_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The authors' state dict under transformers' names, with weight normalisation multiplied out."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        mapped = re.sub(r"^ups\.", "upsampler.", name)
        if mapped.endswith(".weight_g"):
            continue
        if mapped.endswith(".weight_v"):
            gain = state[name[:-1] + "g"]
            norm = value.flatten(1).norm(dim=1).view(-1, *[1] * (value.dim() - 1))
            mapped, value = mapped[: -len("_v")], gain * value / norm
        result[mapped] = value
    return result


def adapt_mel(mel: Tensor, kind: MelKind) -> Tensor:
    """Our log mels (B, F, 80) as `kind` has them (B, F', 80): through the magnitudes of the linear spectrum.

    Above 8 kHz there is nothing, and a band of 80 filters does not determine 513 bins: an approximation.
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
    if kind.sample_rate != SAMPLE_RATE:  # bin b of theirs lies at b * rate / 1024 Hz
        places = torch.arange(WINDOW // 2 + 1, device=mel.device) * (kind.sample_rate / SAMPLE_RATE)
        low = places.floor().long().clamp(max=WINDOW // 2 - 1)
        share = (places - low).clamp(0, 1)
        inside = (places <= WINDOW // 2).to(mel.dtype)
        magnitudes = (magnitudes[..., low] * (1 - share) + magnitudes[..., low + 1] * share) * inside
    theirs = (magnitudes @ _filters(kind).to(mel.device)).clamp(min=LOG_FLOOR)
    return theirs.log10() if kind.log10 else theirs.log()


def _check_mels(bands: int, factor: int, hop: int, argument: str = "vocoder") -> None:
    """Refuse a generator whose frames are not what its mels are made of."""
    if bands != MELS:
        raise InputError(f"`{argument}` must take {MELS} mel bands, but takes {bands}. Use another.")
    if factor != hop:
        raise InputError(
            f"`{argument}` must give {hop} samples a frame, as its mels have, but gives {factor}. Use another."
        )


@lru_cache(maxsize=8)
def _filters(kind: MelKind) -> Tensor:  # (513, 80)
    bank: Any = mel_filter_bank(
        WINDOW // 2 + 1, MELS, kind.f_min, kind.f_max, kind.sample_rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(bank).float()
