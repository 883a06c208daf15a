"""Vocoder training: spectral losses first (Yamamoto et al. 2020), then an optional light adversarial stage.

The discriminators are small, and are never shipped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mmdec.checks.weights import build_with_weights, check_layer_counts, read_settings, read_weights, weight_file
from mmdec.daspeech.acoustic import FastSpeech2, FastSpeech2Config
from mmdec.daspeech.training.acoustic import (
    EnglishSpeech,
    epoch_batches,
    interpolate_pitch,
    read_train_and_dev,
    save_stage,
)
from mmdec.daspeech.vocoder import Vocoder, VocoderConfig
from mmdec.errors import InputError
from mmdec.io.audio import HOP, load_audio, log_mel, pitch
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission
from mmdec.training.optim import Schedule, token_weight

SIZES = (256, 512, 1024)  # window sizes of the discriminators' STFTs, in samples; the hop is a quarter of the window
CHANNELS = 12  # output channels of a discriminator's first layer
SPECTRA = (128, 256, 512, 1024, 2048)  # window sizes of the spectral loss's STFTs, in samples


class SpectrogramDiscriminator(nn.Module):
    """Scores patches of a log-magnitude spectrogram as real or generated (after Jang et al., 2021).

    Args:
        size: Of the STFT's window, in samples.
        channels: Of the first layer's output.
    """

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        shapes = [(1, channels), (channels, channels), (channels, 2 * channels), (2 * channels, 2 * channels)]
        self.convs = nn.ModuleList(
            [
                nn.utils.parametrizations.weight_norm(
                    nn.Conv2d(a, b, (7, 3), stride=(3 if i < 2 else 2, 1), padding=(3, 1))
                )
                for i, (a, b) in enumerate(shapes)
            ]
        )
        self.out = nn.utils.parametrizations.weight_norm(nn.Conv2d(2 * channels, 1, 3, padding=1))

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Score samples (B, T).

        Returns:
            Scores of patches (B, 1, bins', frames), and the features of the inner layers.
        """
        window = self.get_buffer("window")
        spectrum = torch.stft(samples, self.size, self.size // 4, window=window, return_complex=True)
        x = (spectrum.real.square() + spectrum.imag.square() + 1e-6).log()[:, None] * 0.25  # shape (B, 1, bins, frames)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.out(x), features


class Discriminators(nn.Module):
    """Spectrogram discriminators, one for each STFT window size in `SIZES`.

    Calling it returns (patch scores, inner features) of each discriminator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.judges = nn.ModuleList([SpectrogramDiscriminator(size, CHANNELS) for size in SIZES])

    def forward(self, samples: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [judge(samples) for judge in self.judges]


def discriminator_loss(judges: Discriminators, generated: Tensor, truth: Tensor) -> Tensor:
    """Compute the discriminators' least-squares loss: scores should be 1 for recordings, 0 for generated sound.

    Args:
        judges: The discriminators.
        generated: (B, T), samples of generated sound.
        truth: (B, T), samples of recordings.
    """
    total = generated.new_zeros(())
    for (false, _), (true, _) in zip(judges(generated), judges(truth), strict=True):
        total = total + false.square().mean() + (true - 1).square().mean()
    return total / len(judges.judges)


def generator_loss(judges: Discriminators, generated: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the vocoder's losses from the discriminators' outputs.

    Args:
        judges: The discriminators.
        generated: (B, T), samples of generated sound.
        truth: (B, T), samples of recordings.

    Returns:
        The adversarial loss; and the feature-matching loss, the relative L1 distance between the discriminators' inner
        features of generated sound and those of recordings.
    """
    with torch.no_grad():
        true_outputs = judges(truth)
    adversarial, matching, count = generated.new_zeros(()), generated.new_zeros(()), 0
    for (score, features), (_, targets) in zip(judges(generated), true_outputs, strict=True):
        adversarial = adversarial + (score - 1).square().mean()
        for feature, target in zip(features, targets, strict=True):
            matching = matching + (feature - target).abs().mean() / target.abs().mean().clamp(min=1e-3)
            count += 1
    return adversarial / len(judges.judges), matching / count


def spectra(samples: Tensor, size: int) -> Tensor:
    """Compute STFT magnitudes (B, bins, frames) of samples (B, T), linear and differentiable.

    Args:
        size: Length of the window in samples; the hop is a quarter of it.
    """
    window = torch.hann_window(size, device=samples.device)
    spectrum = torch.stft(samples, size, size // 4, window=window, return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-7).sqrt()


def spectral_loss(generated: Tensor, truth: Tensor) -> Tensor:
    """Compute spectral convergence plus L1 of log magnitudes (Yamamoto et al., 2020), averaged over window sizes.

    Args:
        generated: (B, T), samples of generated sound.
        truth: (B, T), samples of recordings.
    """
    total = generated.new_zeros(())
    for size in SPECTRA:
        a, b = spectra(generated, size), spectra(truth, size)
        apart, whole = (part.flatten(1).norm(dim=1) for part in (a - b, b))  # (B,) one norm for each crop
        total = total + (apart / whole.clamp(min=1e-3)).mean() + (a.log() - b.log()).abs().mean()
    return total / len(SPECTRA)


class Crops(NamedTuple):
    """A batch of B crops from recordings, each of F frames; or one crop, without the first dimension."""

    mel: Tensor  # (B, F, 80), the vocoder's input
    samples: Tensor  # (B, F * 256) at 16 kHz, the vocoder's target
    pitch: Tensor  # (B, F) Hz, interpolated at unvoiced frames
    voiced: Tensor  # (B, F) bool


@dataclass(frozen=True)
class VocoderRecording:
    """A recording of F frames in memory, in dtypes that save space."""

    samples: np.ndarray  # (F * 256,) int16
    mel: np.ndarray  # (F, 80) fp16
    predicted: np.ndarray | None  # (F, 80) fp16, an acoustic model's prediction of `mel`
    pitch: np.ndarray  # (F,) Hz, zero where unvoiced


class VocoderData(LightningDataModule):
    """A data module for vocoders: random crops of the English recordings, determined by (seed, epoch).

    `crop_frames` is the length of a crop. `acoustic` is a folder with `tts.safetensors` and `tts.json`, an acoustic
    model. With it, half of the crops have the mel that this model predicts from the true durations, pitch and energy,
    because in use the vocoder reads predicted mels. `max_bad_share` is the largest share of rows that may be bad;
    `allow_absolute_paths` allows files outside `root`.
    """

    def __init__(
        self,
        root: str = "data/corpus/cvss_c",
        batch_size: int = 8,
        crop_frames: int = 64,
        steps_per_epoch: int = 100,
        limit: int | None = 2000,
        acoustic: str | None = None,
        validation_split: str = "dev",
        validation_rows: int = 24,
        seed: int = 0,
        max_bad_share: float = MAX_BAD_SHARE,
        allow_absolute_paths: bool = False,
    ) -> None:
        super().__init__()
        self.admission = Admission(allow_absolute_paths, max_bad_share)
        self.root, self.batch_size = Path(root), batch_size
        self.crop_frames, self.steps_per_epoch = crop_frames, steps_per_epoch
        self.limit, self.acoustic, self.seed = limit, acoustic, seed
        self.validation_split, self.validation_rows = validation_split, validation_rows
        self.train_set: list[VocoderRecording] = []
        self.validation_set: list[VocoderRecording] = []

    @property
    def units(self) -> list[str]:
        """An empty list. The command line asks each data module for its vocabulary, but a vocoder has none."""
        return []

    def prepare_data(self) -> None:
        """Compute and cache the targets of the recordings. Lightning calls this in one process only."""
        self._splits()

    def _splits(self) -> tuple[EnglishSpeech, EnglishSpeech]:
        return read_train_and_dev(self.root, self.validation_split, self.limit, self.validation_rows, self.admission)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set:
            return
        teacher = load_acoustic(Path(self.acoustic)) if self.acoustic else None
        train, validation = self._splits()
        rank_zero_info(
            f"English speech: {len(train)} distinct recordings, {train.bad.count} left out {train.bad.report()}"
        )
        min_frames = self.crop_frames
        self.train_set = [read_vocoder_recording(train, item, teacher, min_frames) for item in range(len(train))]
        self.validation_set = [
            read_vocoder_recording(validation, item, None, min_frames) for item in range(len(validation))
        ]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Compute mean and standard deviation, (80,) each, of the log mels of the first 500 training recordings."""
        mels = torch.from_numpy(np.concatenate([recording.mel for recording in self.train_set[:500]])).float()
        deviation, mean = torch.std_mean(mels, dim=0)
        return mean, deviation.clamp(min=1e-2)

    def train_dataloader(self) -> DataLoader[Crops]:
        assert self.trainer is not None
        rank, world, epoch = self.trainer.global_rank, self.trainer.world_size, self.trainer.current_epoch
        equal = [1] * len(self.train_set)  # all crops have the same length, so batches are not sorted by length
        batches = epoch_batches(equal, self.batch_size * world, self.steps_per_epoch, self.seed, epoch)
        generator = np.random.default_rng([self.seed, epoch, 1])
        pieces = [[(item, *generator.random(2)) for item in batch][rank::world] for batch in batches]
        return DataLoader(_Pieces(self.train_set, self.crop_frames), batch_sampler=pieces)

    def val_dataloader(self) -> DataLoader[Crops]:
        pieces = [[(item, 0.5, 1.0)] for item in range(len(self.validation_set))]
        return DataLoader(_Pieces(self.validation_set, None), batch_sampler=pieces)


class _Pieces(torch.utils.data.Dataset[Crops]):
    """A dataset of crops of recordings, each `frames` frames long; None: of whole recordings.

    An index is (recording, place, choice). The place, from 0 (start) to 1 (end), says where the crop lies. If the
    choice is below 0.5, the crop has the predicted mel, if there is one.
    """

    def __init__(self, recordings: list[VocoderRecording], frames: int | None) -> None:
        self.recordings, self.frames = recordings, frames

    def __getitem__(self, index: tuple[int, float, float]) -> Crops:
        recording = self.recordings[int(index[0])]
        size = self.frames or len(recording.mel)
        start = int(index[1] * (len(recording.mel) - size + 1)) if self.frames else 0
        window = slice(start, start + size)
        mel = recording.predicted if recording.predicted is not None and index[2] < 0.5 else recording.mel
        contour = torch.from_numpy(recording.pitch)
        samples = recording.samples[start * HOP : (start + size) * HOP]
        return Crops(
            torch.from_numpy(mel[window].astype(np.float32)),
            torch.from_numpy(samples.astype(np.float32) / 32768),
            _continuous(contour)[window],
            (contour > 0)[window],
        )


def _continuous(contour: Tensor) -> Tensor:
    """Interpolate a pitch contour (F,) in Hz where it is 0 (unvoiced).

    If all frames are unvoiced, return 150 Hz everywhere.
    """
    return interpolate_pitch(contour) if bool((contour > 0).any()) else torch.full_like(contour, 150.0)


def read_vocoder_recording(
    speech: EnglishSpeech, item: int, teacher: tuple[FastSpeech2, list[str]] | None, min_frames: int
) -> VocoderRecording:
    """Read a recording into memory, padded with silence to at least `min_frames` frames.

    Args:
        item: The recording's index.
        teacher: An acoustic model that predicts the recording's mel, and the model's phones; None: no prediction.
    """
    samples = load_audio(speech.wav(item))
    frames = max(samples.shape[0] // HOP, min_frames)
    samples = F.pad(samples, (0, max(0, frames * HOP - samples.shape[0])))[: frames * HOP]
    mel = log_mel(samples)[:frames]
    predicted = None
    if teacher is not None:
        tts, vocabulary = teacher
        units, targets = speech.batch([item], vocabulary)
        with torch.inference_mode():
            output = tts(tts.embed(units), targets.lengths, targets.durations, targets.pitch, targets.energy)
        first, size = speech.first_frames[item], min(output.mel.shape[1], frames - speech.first_frames[item])
        predicted = mel.clone()
        predicted[first : first + size] = output.mel[0, :size]
    return VocoderRecording(
        samples=(samples.clamp(-1, 32767 / 32768) * 32768).round().short().numpy(),
        mel=mel.half().numpy(),
        predicted=None if predicted is None else predicted.half().numpy(),
        pitch=pitch(samples)[:frames].numpy(),
    )


def load_acoustic(folder: Path, argument: str = "acoustic") -> tuple[FastSpeech2, list[str]]:
    """Load the acoustic model in the output folder of its training.

    Args:
        argument: The folder's name in messages.

    Returns:
        The model, and its phones ordered by id.

    Raises:
        InputError: For damaged files.
    """
    described = read_settings(folder / "tts.json", argument)
    state = read_weights([weight_file(folder, "tts.safetensors", argument)], argument)
    try:
        shape, units = FastSpeech2Config.from_values(described["config"]), list(described["units"])
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"`{argument}` must hold its sizes in tts.json, but '{folder}' does not ({type(error).__name__}: {error}). "
            "Train the acoustic model again."
        ) from error
    check_layer_counts(described["config"], state, argument)
    return build_with_weights(lambda: FastSpeech2(shape, len(units)), state, argument, folder).eval(), units


def load_vocoder(folder: Path) -> Vocoder:
    """Load the vocoder in the output folder of its training.

    Raises:
        InputError: For damaged files.
    """
    sizes = VocoderConfig(**read_settings(folder / "vocoder.json", "vocoder")["config"])
    state = read_weights([weight_file(folder, "vocoder.safetensors", "vocoder")], "vocoder")
    return build_with_weights(lambda: Vocoder(sizes), state, "vocoder", folder)


class VocoderModule(LightningModule):
    """Trains a `Vocoder` on recordings: spectral loss at five resolutions, L1 of the mel, squared error of log pitch.

    From epoch `adversarial_from` on, small spectrogram discriminators add a least-squares adversarial loss with feature
    matching. They are slow, so they process only the first `judged` crops of a batch. The learning rate falls by a
    cosine to 0 at the trainer's `max_epochs`. Training ends by writing `vocoder.safetensors` and `vocoder.json` to the
    trainer's root folder. `units` is not used; the command line passes it to every model.
    """

    def __init__(
        self,
        units: list[str] | None = None,
        learning_rate: float = 1e-3,
        warmup: int = 100,
        weight_decay: float = 0.01,
        adversarial_from: int | None = None,
        adversarial_weight: float = 0.1,
        feature_weight: float = 0.2,
        judged: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.learning_rate, self.warmup, self.weight_decay, self.seed = learning_rate, warmup, weight_decay, seed
        self.adversarial_from, self.judged = adversarial_from, judged
        self.adversarial_weight, self.feature_weight = adversarial_weight, feature_weight
        self.batches = 0  # batches trained on, also before a resumption; Lightning's step counts both optimizers
        torch.manual_seed(seed)
        self.vocoder = Vocoder(VocoderConfig())
        # made even if they are not trained, so that all checkpoints have weights of the same names
        self.discriminators = Discriminators()

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined] # not declared by Lightning
        self.vocoder.set_statistics(*data.statistics())
        if not self.trainer.max_epochs or self.trainer.max_epochs < 1:
            raise InputError(
                "`max_epochs` must be set, but is not: the schedule ends there. Pass --trainer.max_epochs."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]

    def configure_optimizers(self) -> Any:
        def adam(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, self.learning_rate, betas=(0.8, 0.99), weight_decay=self.weight_decay)

        return [adam(self.vocoder.parameters()), adam(self.discriminators.parameters())]

    def training_step(self, batch: Crops, batch_idx: int) -> None:
        steps: int = self.trainer.datamodule.steps_per_epoch  # type: ignore[attr-defined] # not declared by Lightning
        step, self.batches = self.batches, self.batches + 1
        # A resumed training draws the same noise as an uninterrupted one. Each process uses a part of it.
        torch.manual_seed((self.seed * 1_000_003 + step) * 64)
        player, judge = self.optimizers()  # type: ignore[misc] # `configure_optimizers` gives two
        schedule = Schedule("cosine", self.warmup, decay_steps=(self.trainer.max_epochs or 1) * steps - self.warmup)
        rate = self.learning_rate * schedule(step)
        rank, world = self.global_rank, self.trainer.world_size
        noise = torch.randn(len(batch.samples) * world, batch.samples.shape[1], device=self.device)[rank::world]
        generated, predicted = self.vocoder.synthesise(batch.mel, pitch=batch.pitch, noise=noise)
        parts = self._losses(batch, generated, predicted)
        loss = parts["spectral"] + parts["mel"] + parts["pitch"]
        if self.adversarial_from is not None and step >= self.adversarial_from * steps:
            some = slice(0, self.judged)
            samples = batch.samples[some]
            parts["discriminator"] = discriminator_loss(self.discriminators, generated[some].detach(), samples)
            self._step(judge, parts["discriminator"], rate)
            fooled, matched = generator_loss(self.discriminators, generated[some], samples)
            parts |= {"fooled": fooled, "matched": matched}
            loss = loss + self.adversarial_weight * fooled + self.feature_weight * matched
        self._step(player, loss, rate)
        parts |= {"loss": loss}
        values = {f"train/{name}": value.detach() for name, value in parts.items()}
        self.log_dict(values, batch_size=len(generated), sync_dist=True)

    def _step(self, optimizer: Any, loss: Tensor, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()

    def _losses(self, batch: Crops, generated: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        error = (predicted.log() - batch.pitch.log()).square() * batch.voiced
        return {
            "spectral": spectral_loss(generated, batch.samples),
            "mel": (log_mel(generated) - log_mel(batch.samples)).abs().mean(),
            "pitch": 100 * error.sum() / batch.voiced.sum().clamp(min=1) * token_weight(batch.voiced.sum()),
        }

    def validation_step(self, batch: Crops, batch_idx: int) -> None:
        generated, predicted = self.vocoder.synthesise(batch.mel)  # with predicted pitch, as when the vocoder is used
        parts = {f"dev/{name}": value for name, value in self._losses(batch, generated, predicted).items()}
        self.log_dict(parts, batch_size=1, sync_dist=True)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            save_stage(folder, "vocoder", self.vocoder, {"config": asdict(self.vocoder.config)})
