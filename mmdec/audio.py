"""Sound in, sound out, and the features between them. The only file that imports torchaudio or soundfile.

Source features are Kaldi's 80 filterbanks (25 ms window, 10 ms hop), normalised per utterance. Target features live on
one frame grid: 16 kHz, window and FFT 1024, hop 256, centred, so T samples give 1 + T // 256 frames.
"""

import io
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import torch
import torchaudio.compliance.kaldi as kaldi
import torchaudio.functional as F
from torch import Tensor

from mmdec.checks import files
from mmdec.checks.arguments import show
from mmdec.checks.files import open_regular, printable, unreadable, write_whole
from mmdec.types import InputError

SAMPLE_RATE = 16_000  # Hz, of every network here
HOP = 256  # samples between target frames
WINDOW = 1024  # samples in a target frame
STEP = 160  # samples in 10 ms, the grid of pauses
MELS = 80
LOG_FLOOR = 1e-5
MIN_RATE, MAX_RATE = 8_000, 192_000  # Hz
MAX_SECONDS = 3_600.0
MAX_BYTES = 2 * 2**30  # of a file object, which is read into memory
MAX_PEAK = 2.0**31  # of floats: what was recorded with 32 bits may have kept its integers' scale
BLOCK = 1 << 20  # samples that are read at once
UNRECOGNISED = 1  # libsndfile's SF_ERR_UNRECOGNISED_FORMAT
HEADERLESS = {".au": "ULAW", ".snd": "ULAW", ".gsm": "GSM610", ".vox": "VOX_ADPCM"}  # telephony, at 8 kHz
WRITABLE = {  # suffix: libsndfile's format and subtype
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".opus": ("OGG", "OPUS"),
    ".aiff": ("AIFF", "PCM_16"),
    ".aif": ("AIFF", "PCM_16"),
    ".au": ("AU", "PCM_16"),
    ".caf": ("CAF", "PCM_16"),
    ".w64": ("W64", "PCM_16"),
}

AudioSource = str | os.PathLike[str] | BinaryIO


def load_audio(source: AudioSource, sample_rate: int = SAMPLE_RATE) -> Tensor:
    """One sound file, mixed down to mono and resampled: (T,) float32 in [-1, 1].

    Reads what libsndfile reads: wav, flac, ogg, mp3, aiff; 8 to 32 bit integers and floats. What is in the file is
    read, whatever its header declares; floats beyond full scale are brought back to it. Raises InputError for
    anything else, and for audio that `check_samples` or `check_peak` refuses.
    """
    check_rate(sample_rate)
    blocks: list[np.ndarray] = []
    rates, peak = [sample_rate], 0.0
    for rate, block in _blocks(source):  # (<= 2^20 / channels, channels)
        rates.append(rate)
        peak = float(np.fmax.reduce(np.abs(block), axis=None, initial=peak))  # of all channels: two may cancel
        with np.errstate(all="ignore"):  # infinities are counted below
            blocks.append(block.mean(axis=1))
    samples = torch.from_numpy(np.concatenate(blocks)) if blocks else torch.zeros(0)
    check_samples(samples)
    check_peak(peak)
    return resample(full_scale(samples), rates[-1], sample_rate)


def sound_seconds(path: str | os.PathLike[str]) -> float:
    """Length of a sound file, decoded to its end: a header may declare any. Raises InputError as `load_audio` does."""
    return sum(len(block) / rate for rate, block in _blocks(path))


class _FrontToBack(soundfile.SoundFile):
    """A file that is never sought in. soundfile does it after each block, which GSM 6.10 refuses."""

    def seekable(self) -> bool:
        return False


def _blocks(source: AudioSource) -> Iterator[tuple[int, np.ndarray]]:
    """A sound file's rate and samples (T, channels) in pieces, until nothing comes. No declared length is trusted.

    Each piece holds as many frames as the decoder gave. `SoundFile.blocks` gives as many as the header declares: where
    the file is cut or damaged, the rest is memory that nobody wrote, such as another recording's samples.
    """
    frames = 0
    path = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else ""
    name = f"'{printable(path)}'" if path else "the file object"
    with ExitStack() as stack:
        try:
            if isinstance(source, (str, os.PathLike)):
                content = stack.enter_context(open_regular(path, "audio"))
            else:
                content = _read_whole(source)
            file = stack.enter_context(_open(content, Path(path).suffix.lower()))
            rate = file.samplerate
            check_rate(rate)
            size = max(1, BLOCK // file.channels)
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                frames += len(block)
                if frames > MAX_SECONDS * rate:
                    raise InputError(
                        f"`audio` must last at most {MAX_SECONDS:.0f} seconds, but {name} lasts longer. "
                        "Cut it into several files."
                    )
                yield rate, block
        except InputError:
            raise
        except Exception as error:  # libsndfile's, soundfile's or the system's: whichever it is, it is this file's
            reason = files.reason(error)
            if isinstance(error, soundfile.LibsndfileError):
                reason = error.error_string.rstrip(".") or f"error {error.code}"
            remedy = "Convert it to 16-bit PCM wav."
            if path.lower().endswith(".raw"):
                remedy = "Pass samples without a header as an array with its `sample_rate`."
            raise InputError(
                f"`audio` must be a sound file that libsndfile can read, but {name} is not ({reason}). {remedy}"
            ) from error


def _open(content: int | io.BytesIO, suffix: str) -> soundfile.SoundFile:
    """By what is in it. Only of a file without a header the suffix says what it is."""
    try:
        return _FrontToBack(content, closefd=False)
    except soundfile.LibsndfileError as error:
        if suffix not in HEADERLESS or error.code != UNRECOGNISED or not isinstance(content, int):
            raise
        os.lseek(content, 0, os.SEEK_SET)
        subtype = HEADERLESS[suffix]
        return _FrontToBack(content, samplerate=8000, channels=1, format="RAW", subtype=subtype, closefd=False)


class _Content(io.BytesIO):
    """A file's bytes. As in a file, to seek before the beginning (a damaged header may ask for it) changes nothing."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


def _read_whole(source: BinaryIO) -> io.BytesIO:
    """All that a file object gives, in pieces: an endless one is refused before memory ends."""
    content = _Content()
    while piece := _read_piece(source):
        if not isinstance(piece, bytes):
            raise InputError("`audio` must be a binary file object, but gives text. Open it with mode 'rb'.")
        if content.tell() + len(piece) > MAX_BYTES:
            raise InputError(
                f"`audio` must hold at most {MAX_BYTES} bytes, but the file object gives more. Cut it into several."
            )
        content.write(piece)
    content.seek(0)
    return content


def _read_piece(source: BinaryIO) -> bytes:
    try:
        return source.read(1 << 20)
    except Exception as error:  # closed, broken, or another's code
        raise unreadable("audio", "the file object", error, "Open it anew, or give its path.") from error


def save_audio(path: str | os.PathLike[str], samples: Tensor | np.ndarray, sample_rate: int = SAMPLE_RATE) -> Path:
    """Write (T,) float samples, whole or not at all. The suffix of `path` names the format; integers have 16 bits.

    Raises InputError for a suffix that names none, a rate that its format does not have, and what is not finite;
    OSError, with the path, where the system does not take the file.
    """
    try:
        path = Path(os.fsdecode(path))
    except TypeError as error:
        raise InputError(f"`path` must be a path, but is {show(path)}. Name a file.") from error
    suffix = path.suffix.lower()
    if suffix not in WRITABLE:
        raise InputError(
            f"`path` must end in {', '.join(WRITABLE)}, but is '{printable(str(path))}'. Rename the output."
        )
    check_rate(sample_rate)  # beyond 200 kHz libsndfile's Vorbis ends the process
    kind, subtype = WRITABLE[suffix]
    data = _writable(samples)  # at NaN the MP3 encoder ends the process
    content = io.BytesIO()  # an encoder does not say when a disk is full
    try:
        with soundfile.SoundFile(content, "w", sample_rate, 1, format=kind, subtype=subtype) as file:
            for start in range(0, len(data), 1 << 16):  # libsndfile's Vorbis breaks down over minutes at once
                file.write(data[start : start + (1 << 16)])
    except soundfile.SoundFileError as error:
        raise InputError(
            f"`path` must end in a format that takes sound at {sample_rate} Hz, but is '{printable(str(path))}' "
            f"({error}). Write .wav."
        ) from error
    return write_whole(path, content.getvalue())


def _writable(samples: Tensor | np.ndarray) -> np.ndarray:
    """(T,) float32 within full scale."""
    try:
        data = samples.detach().cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        real = data.dtype.kind in "fiu"
    except Exception as error:  # what an object makes of being turned into an array is its own
        raise InputError(f"`samples` must be an array, but is {show(samples)}. Pass (T,) floats.") from error
    if not real or data.ndim != 1:
        raise InputError(f"`samples` must be (T,) floats, but is {data.shape} of {data.dtype}. Pass one channel.")
    data = data.astype(np.float32, copy=False)
    if not np.isfinite(data).all():
        raise InputError("`samples` must be finite numbers, but holds NaN or infinity. Replace them.")
    return np.clip(data, -1.0, 1.0)


def check_rate(rate: int) -> None:
    """Refuse sample rates outside 8 to 192 kHz."""
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise InputError(f"`sample_rate` must be a whole number of Hz, but is {show(rate)}. Round it.")
    if rate < MIN_RATE:
        raise InputError(f"`sample_rate` must be at least {MIN_RATE} Hz, but is {rate}. Resample the audio first.")
    if rate > MAX_RATE:
        raise InputError(f"`sample_rate` must be at most {MAX_RATE} Hz, but is {rate}. Resample the audio first.")


def check_seconds(seconds: float) -> None:
    """Refuse audio longer than an hour: it is read whole."""
    if seconds > MAX_SECONDS:
        raise InputError(
            f"`audio` must last at most {MAX_SECONDS:.0f} seconds, but lasts {seconds:.0f}. Cut it into several files."
        )


def check_samples(samples: Tensor) -> None:
    """Refuse (T,) samples that hold no sound at all, or that are not finite numbers."""
    if samples.numel() == 0:
        raise InputError("`audio` must hold at least one sample, but is empty. Check the recording.")
    finite = torch.isfinite(samples)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise InputError(
            f"`audio` must hold finite numbers, but {count} of {samples.numel()} samples are NaN or infinite. "
            "Replace them, with zeros for instance."
        )


def check_peak(peak: float) -> None:
    """Refuse floats that no recording holds: 32-bit integers left at their scale are the loudest."""
    if peak > MAX_PEAK:
        raise InputError(
            f"`audio` must hold samples of at most {MAX_PEAK:.3g}, but its peak is {peak:.3g}. "
            "Scale it to full scale, which is 1."
        )


def full_scale(samples: Tensor) -> Tensor:
    """(T,) samples within [-1, 1]: what is louder as a whole is brought back to it, for it would clip."""
    return samples / samples.abs().max().clamp(min=1)


def resample(samples: Tensor, rate: int, new_rate: int = SAMPLE_RATE) -> Tensor:
    """(..., T) at `rate` Hz to (..., ceil(T * new_rate / rate)) at `new_rate` Hz, without aliasing."""
    if rate == new_rate or samples.shape[-1] == 0:
        return samples
    divisor = math.gcd(rate, new_rate)
    if max(rate, new_rate) // divisor <= 1000:
        return F.resample(samples, rate, new_rate)
    # Rates with no small ratio (44,101 Hz, say) would need a filter bank of gigabytes: cut the spectrum instead.
    length = samples.shape[-1]
    seconds = math.ceil(length / rate)  # whole seconds hold a whole number of samples at both rates
    spectrum = torch.fft.rfft(samples, n=seconds * rate)
    bins = seconds * new_rate // 2 + 1
    spectrum = spectrum[..., :bins]
    result = torch.fft.irfft(spectrum, n=seconds * new_rate) * (new_rate / rate)
    return result[..., : math.ceil(length * new_rate / rate)]


def fbank(samples: Tensor) -> Tensor:
    """16 kHz samples (T,) to the encoder's features (N, 80): Kaldi filterbanks, mean 0 and variance 1 per utterance.

    Fewer samples than one 25 ms window (400) are padded with zeros to one frame.
    """
    if samples.shape[-1] < 400:
        samples = torch.nn.functional.pad(samples, (0, 400 - samples.shape[-1]))
    features = kaldi.fbank(samples[None] * 32768.0, num_mel_bins=MELS, sample_frequency=SAMPLE_RATE, dither=0.0)
    spread, mean = torch.std_mean(features, dim=0, correction=0)
    return (features - mean) / spread.clamp(min=1e-5)  # (N, 80)


def magnitudes(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to the magnitudes (..., 513, F) of the target frame grid. Differentiable."""
    spectrum = torch.stft(
        samples, WINDOW, HOP, window=_window(samples.device), center=True, pad_mode="constant", return_complex=True
    )
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()  # the floor keeps the gradient finite at 0


def log_mel(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to the target features (..., F, 80): natural log of mel magnitudes. Differentiable."""
    mel = magnitudes(samples).transpose(-1, -2) @ _mel_filters(samples.device)  # (..., F, 80)
    return mel.clamp(min=LOG_FLOOR).log()


def energy(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to (..., F): the L2 norm of each frame's magnitudes, as FastSpeech 2 has it."""
    return magnitudes(samples).square().sum(dim=-2).sqrt()


def pitch(samples: Tensor, low: float = 60.0, high: float = 400.0, threshold: float = 0.2) -> Tensor:
    """16 kHz samples (T,) to (F,): the fundamental in Hz on the target frame grid, 0 where the frame is unvoiced.

    YIN (de Cheveigne and Kawahara, 2002): the first dip of the cumulative mean normalised difference below
    `threshold`, refined by a parabola. `low` and `high` bound the search in Hz.
    """
    padded = torch.nn.functional.pad(samples, (WINDOW // 2, WINDOW // 2))
    frames = padded.unfold(0, WINDOW, HOP)  # (F, 1024)
    width = WINDOW // 2
    lags = min(math.ceil(SAMPLE_RATE / low) + 2, width)
    head = torch.fft.rfft(frames[:, :width], n=WINDOW)
    correlation = torch.fft.irfft(torch.fft.rfft(frames, n=WINDOW) * head.conj(), n=WINDOW)[:, :lags]  # no wrap < 512
    total = torch.nn.functional.pad(frames.square().cumsum(dim=1), (1, 0))
    power = total[:, width : width + lags] - total[:, :lags]  # (F, lags), of each shifted window
    difference = (power[:, :1] + power - 2 * correlation).clamp(min=0)
    steps = torch.arange(1, lags, device=samples.device)
    mean = difference[:, 1:].cumsum(dim=1) / steps
    dip = torch.cat([torch.ones_like(mean[:, :1]), difference[:, 1:] / mean.clamp(min=1e-9)], dim=1)  # (F, lags)

    first = math.floor(SAMPLE_RATE / high)
    inner = dip[:, first : lags - 1]
    bottom = (inner <= dip[:, first - 1 : lags - 2]) & (inner < dip[:, first + 1 : lags]) & (inner < threshold)
    voiced = bottom.any(dim=1) & (power[:, 0] > 1e-4 * width * 1e-2)  # quieter than -60 dB is silence
    lag = bottom.int().argmax(dim=1) + first
    left, middle, right = (dip.gather(1, (lag + shift)[:, None])[:, 0] for shift in (-1, 0, 1))
    curve = (left - 2 * middle + right).clamp(min=1e-9)
    refined = lag + (0.5 * (left - right) / curve).clamp(-1, 1)
    return torch.where(voiced, SAMPLE_RATE / refined, 0.0)


def griffin_lim(mel: Tensor, iterations: int = 32) -> Tensor:
    """Log mel (F, 80) to samples (F * 256,) without weights: the named fallback where no vocoder was trained."""
    filters = _mel_filters(mel.device)  # (513, 80)
    power = (mel.exp() @ torch.linalg.pinv(filters)).clamp(min=0).T  # (513, F)
    samples = F.griffinlim(
        power[None],
        window=_window(mel.device),
        n_fft=WINDOW,
        hop_length=HOP,
        win_length=WINDOW,
        power=1.0,
        n_iter=iterations,
        momentum=0.99,
        length=(mel.shape[0] - 1) * HOP,
        rand_init=False,
    )[0]
    return torch.nn.functional.pad(samples, (0, HOP))


def split_at_pauses(
    samples: Tensor, max_seconds: float = 8.0, long_pause: float = 0.6, min_pause: float = 0.15
) -> list[tuple[int, int]]:
    """Cut 16 kHz samples (T,) into pieces of at most `max_seconds`: [(start, end), ...] that cover every sample.

    A pause of `long_pause` seconds always ends a piece: what follows is another sentence. A piece that is still too
    long is cut in the middle of its longest pause (at least `min_pause` seconds), or at its quietest place where it
    has none; then its parts are looked at in the same way.
    """
    length = samples.shape[-1]
    level, quiet = _quiet_frames(samples)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet.astype(np.int8), [0]])))
    pauses = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    pauses = [(a, b) for a, b in pauses if b - a >= min_pause * 100 and a > 0 and b < len(level)]

    pieces: list[tuple[int, int]] = []
    waiting = [(0, len(level))]  # in frames of 10 ms
    while waiting:
        start, end = waiting.pop()
        inside = [(b - a, (a + b) // 2) for a, b in pauses if start < a and b < end]
        pause, cut = max(inside, default=(0, 0))
        too_long = end - start > max_seconds * 100
        if not too_long and pause < long_pause * 100:
            pieces.append((start * STEP, min(end * STEP, length)))
            continue
        if not inside:
            margin = min(100, (end - start) // 4)  # half a word at the edge is no piece
            cut = start + margin + int(np.argmin(level[start + margin : end - margin]))
        waiting += [(cut, end), (start, cut)]  # a stack: the left part comes next
    return pieces


def trim_silence(samples: Tensor, keep: float = 0.12) -> Tensor:
    """16 kHz samples (T,) without the silence at both ends, but for `keep` seconds of it."""
    loud = np.flatnonzero(~_quiet_frames(samples)[1])
    if len(loud) == 0:
        return samples
    margin = int(keep * SAMPLE_RATE)
    return samples[max(int(loud[0]) * STEP - margin, 0) : (int(loud[-1]) + 1) * STEP + margin]


def _quiet_frames(samples: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(T,) -> smoothed level of each 10 ms (N,), and whether it lies 35 dB below the loud ones (N,)."""
    padded = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % STEP))
    level = padded.reshape(-1, STEP).square().mean(dim=1).sqrt().cpu().numpy()
    level = np.convolve(level, np.full(5, 0.2), mode="same")[: len(level)]
    return level, level < max(float(np.quantile(level, 0.95)) * 10 ** (-35 / 20), 1e-4)


@lru_cache(maxsize=8)
def _window(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # made while decoding, it must serve training too
        return torch.hann_window(WINDOW, device=device)


@lru_cache(maxsize=8)
def _mel_filters(device: torch.device) -> Tensor:  # (513, 80)
    with torch.inference_mode(False):
        filters = F.melscale_fbanks(WINDOW // 2 + 1, 20.0, 8000.0, MELS, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        return filters.to(device)
