"""Reads recordings in all forms that callers may pass, single or in a list."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import PASSED_ON
from mmdec.checks.files import printable
from mmdec.errors import InputError
from mmdec.io import audio as sound
from mmdec.tasks.batch import InputBatch

Audio = str | os.PathLike[str] | BinaryIO | bytes | np.ndarray | Tensor | Mapping[str, Any]
AudioList = (
    list[Audio]
    | tuple[Audio, ...]
    | list[str]
    | list[Path]
    | list[bytes]
    | list[np.ndarray]
    | list[Tensor]
    | list[dict[str, Any]]
)
Result = TypeVar("Result", bound=Any)  # a result, a dataclass with a field `note`
MIN_SECONDS = 0.1
SILENCE, INAUDIBLE = sound.SILENCE, sound.INAUDIBLE
MAX_CHANNELS = 8


def as_batch(audio: Audio | Sequence[Audio], sample_rate: int | None) -> InputBatch[Audio]:
    """Collect the recordings of one call in an `InputBatch`.

    Args:
        audio: One recording, or a list of recordings.
        sample_rate: In Hz, for recordings that are arrays.

    Raises:
        InputError: If a sample rate is given although no recording is an array.
    """
    single = not isinstance(audio, (list, tuple))
    items: list[Audio] = [cast(Audio, audio)] if single else list(cast(Sequence[Audio], audio))
    arrays = any(isinstance(item, (np.ndarray, Tensor)) for item in items)
    if sample_rate is not None and items and not arrays:
        raise InputError(
            f"`sample_rate` must be left out for files and dicts, which name it, but is {format_value(sample_rate)}."
        )
    return InputBatch(items, single)


def read_audio(
    audio: Audio,
    sample_rate: int | None = None,
    max_seconds: float = sound.MAX_SECONDS,
    silence: bool = False,
) -> Tensor:
    """Convert one recording in any accepted form to 16 kHz mono samples (T,).

    Args:
        audio: The recording.
        sample_rate: Hz of an array.
        max_seconds: Maximum duration of a file.
        silence: Whether a silent recording is accepted.

    Raises:
        InputError: If the recording cannot be read, is too short or too long, or is silent.
    """
    return read_recording(audio, sample_rate, max_seconds, silence).samples


def read_recording(
    audio: Audio,
    sample_rate: int | None = None,
    max_seconds: float = sound.MAX_SECONDS,
    silence: bool = False,
    strict: bool = False,
) -> sound.Recording:
    """Convert one recording as `read_audio` does, with a note about unreadable parts and about channels that cancel.

    Args:
        audio: The recording.
        sample_rate: Hz of an array.
        max_seconds: Maximum duration of a file.
        silence: Whether a silent recording is accepted.
        strict: Whether a file is rejected if a part of it cannot be read.
    """
    try:
        recording = _recording(audio, sample_rate, max_seconds, strict)
    except PASSED_ON:
        raise
    except Exception as error:  # an invalid file name, or an object of an unknown class
        raise InputError(
            f"`audio` must be a recording that can be read, but {format_value(audio)} is not "
            f"({type(error).__name__}: {printable(str(error)):.200}). Check it, or give its path."
        ) from error
    samples = recording.samples
    seconds = len(samples) / sound.SAMPLE_RATE
    if seconds < MIN_SECONDS:
        raise InputError(
            f"`audio` must last at least {MIN_SECONDS} seconds, but lasts {seconds:.4f}. Check the recording."
        )
    if not silence and (level := describe_silence(samples)):
        raise InputError(f"`audio` must hold speech, but is {level}. Check the microphone, or turn the recording up.")
    return recording


def with_notes(results: Mapping[int, Result], inputs: Mapping[int, sound.Recording]) -> dict[int, Result]:
    """Add to each result the note of its recording, before its own.

    Args:
        inputs: Index of the recording in the call -> recording.
    """
    return {index: with_note(result, inputs[index].note) for index, result in results.items()}


def with_note(result: Result, note: str) -> Result:
    """Put a note before a result's own note."""
    return replace(result, note="; ".join(filter(None, (note, result.note)))) if note else result


def describe_silence(samples: Tensor) -> str:
    """Describe for a message how quiet silent samples (T,) are; "" if they are not silent.

    A quiet recording, such as one of 24 bits at a low level, counts as speech if it stands out from its own noise. The
    same holds for a recording that is loud only during a click.
    """
    loudest = peak(samples)
    if loudest >= SILENCE and not sound.only_clicks(samples):
        return ""
    if loudest >= INAUDIBLE and sound.stands_out(samples):
        return ""
    if loudest >= SILENCE:
        return f"silent: apart from a click, its peak is below {_decibels(SILENCE)}"
    level = f"silent: its peak is {_decibels(loudest)}, below {_decibels(SILENCE)}"
    return level if loudest < INAUDIBLE else f"{level}, and nothing stands out from its noise"


def _recording(audio: Audio, sample_rate: int | None, max_seconds: float, strict: bool) -> sound.Recording:
    if isinstance(audio, (np.ndarray, Tensor)):
        return _from_array(audio, sample_rate)
    if isinstance(audio, Mapping):
        return _from_dict(audio, max_seconds, strict)
    if isinstance(audio, (bytes, bytearray)):
        return sound.load_recording(io.BytesIO(audio), max_seconds=max_seconds, strict=strict)
    if isinstance(audio, (str, os.PathLike)) or callable(getattr(audio, "read", None)):
        return sound.load_recording(cast(Any, audio), max_seconds=max_seconds, strict=strict)
    raise InputError(
        "`audio` must be a path, a file object, a file's bytes, an array, a dict with array and sampling_rate, or a "
        f"list of these, but is {format_value(audio)}. Convert it with numpy.asarray."
    )


def _from_dict(audio: Mapping[str, Any], max_seconds: float, strict: bool) -> sound.Recording:
    """Read a recording of the package datasets: {"array", "sampling_rate"}, or not decoded {"bytes", "path"}."""
    if audio.get("array") is not None:
        array, rate = audio["array"], audio.get("sampling_rate")
        if rate is None:
            raise InputError("`audio` must hold `sampling_rate` as well as `array`, but does not. Add it, in Hz.")
        array = array if isinstance(array, (np.ndarray, Tensor)) else np.asarray(array)
        return _from_array(array, rate)
    source = audio.get("bytes") or audio.get("path")
    if not isinstance(source, (bytes, str, os.PathLike)):
        names = ", ".join(format_value(name) for name in list(audio)[:9]) or "nothing"
        raise InputError(
            f"`audio` must hold `array` and `sampling_rate`, `bytes` or `path`, but is a dict of {names}. Rename them."
        )
    return _recording(source, None, max_seconds, strict)


def _from_array(audio: np.ndarray | Tensor, sample_rate: int | None) -> sound.Recording:
    notes: list[str] = []
    return sound.Recording(from_array(audio, sample_rate, notes), "; ".join(notes))


def from_array(audio: np.ndarray | Tensor, sample_rate: int | None, notes: list[str] | None = None) -> Tensor:
    """Convert an array to 16 kHz mono samples (T,).

    Args:
        audio: (T,), (T, channels) or (channels, T), of floats, or of integers, which are scaled by the range of their
            type.
        sample_rate: The array's, in Hz.
        notes: A list to which remarks about the recording are added.
    """
    if sample_rate is None:
        raise InputError(
            "`sample_rate` must be given with an array, but is None. Pass sample_rate=16000, for instance."
        )
    rate = integer_rate(sample_rate)
    sound.check_rate(rate)
    array = _as_numpy(audio) if isinstance(audio, Tensor) else audio
    channels = _channels(array)  # (T, channels) float64
    sound.check_seconds(len(channels) / rate)
    with np.errstate(all="ignore"):  # infinite values are counted by the check
        data, mixer = sound.mix(channels, rate)
    samples = torch.from_numpy(np.ascontiguousarray(data))
    sound.check_samples(samples)
    if np.issubdtype(array.dtype, np.floating):
        # before channels are averaged, because two loud channels may cancel each other
        sound.check_peak(max(float(array.max()), -float(array.min())))
    samples = mixer.audible(samples)
    if np.issubdtype(array.dtype, np.floating):
        samples = sound.full_scale(samples)
    if notes is not None and mixer.note:
        notes.append(mixer.note)
    return sound.resample(samples.float(), rate)


def split_channels(audio: np.ndarray | Tensor) -> np.ndarray:
    """Convert an array of floats or integers, (T,), (T, channels) or (channels, T), to samples (T, channels).

    Integers are scaled by the range of their type. Values are not checked.
    """
    return _channels(_as_numpy(audio) if isinstance(audio, Tensor) else audio)


def _as_numpy(audio: Tensor) -> np.ndarray:
    """Convert a tensor to a NumPy array.

    Raises:
        InputError: For kinds of tensors that NumPy does not have: sparse, quantised, float8, meta.
    """
    try:
        array = audio.detach().cpu().resolve_conj().resolve_neg()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    except Exception as error:  # all exceptions, because torch raises errors of many types
        raise InputError(
            f"`audio` must be a dense tensor of numbers, but this one of {audio.dtype} cannot become an array "
            f"({type(error).__name__}). Convert it to torch.float32."
        ) from error


def integer_rate(sample_rate: object) -> int:
    """Return the sample rate as an int in Hz; 16000.0 and NumPy's numbers are accepted.

    Raises:
        InputError: For other values.
    """
    number = sample_rate.item() if isinstance(sample_rate, np.generic) else sample_rate
    if type(number) is float and number.is_integer():
        number = int(number)
    if type(number) is not int:
        raise InputError(f"`sample_rate` must be a whole number of Hz, but is {format_value(sample_rate)}. Round it.")
    return number


def _channels(array: np.ndarray) -> np.ndarray:
    """Return the samples as float64 of shape (T, channels); integers are scaled to -1 to 1."""
    kind = array.dtype
    if kind.kind not in "fiu" or (kind.kind in "iu" and kind.itemsize > 4):
        raise InputError(
            f"`audio` must hold floats or integers of at most 32 bit, but holds {kind}. "
            "Convert it with astype to the type it was recorded in."
        )
    if array.ndim not in (1, 2):
        raise InputError(
            f"`audio` must have shape (T,), (T, channels) or (channels, T), but has {array.shape}. "
            "Pass a list of arrays for a batch."
        )
    if array.ndim == 2 and array.size and min(array.shape) > MAX_CHANNELS:
        raise InputError(
            f"`audio` must have at most {MAX_CHANNELS} channels, but has shape {array.shape}. "
            "Pass a list of arrays for a batch."
        )
    if not array.size:
        return np.zeros((0, 1))
    with np.errstate(all="ignore"):  # infinite values are counted later
        data = array.astype(np.float64)
    if kind.kind in "iu":
        half = 2.0 ** (8 * kind.itemsize - 1)
        data = (data - half if kind.kind == "u" else data) / half
    if data.ndim == 1:
        return data[:, None]
    return data.T if int(np.argmin(data.shape)) == 0 else data


def peak(samples: Tensor) -> float:
    """Return the largest absolute deviation of samples (T,) from their mean; a microphone may add a constant."""
    return float((samples - samples.mean()).abs().max())


def _decibels(level: float) -> str:
    return f"{20 * np.log10(level):.0f} dB" if level > 0 else "-inf dB"
