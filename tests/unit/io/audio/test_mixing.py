"""Tests the mix of channels: what is said in any of them is in the mix, whatever their phases."""

import io
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch

from mmdec.io import audio
from mmdec.io.audio.mixing import Mixer, mix
from mmdec.io.audio.pipe import PipedSound, stream_pieces
from mmdec.io.audio.samples import SAMPLE_RATE as RATE
from mmdec.tasks.audio import read_audio, read_recording
from tests.conftest import buzz

VOICE, OTHER = buzz(3.0).astype(np.float64), buzz(3.0, 7).astype(np.float64)
NOTHING, TURN = 0 * VOICE, np.where(np.arange(3 * RATE) < 1.5 * RATE, 1, -1)

# name -> channels, and the factor that the voice has in their mix
CANCELLING: dict[str, tuple[list[np.ndarray], float]] = {
    "opposite": ([VOICE, -VOICE], 1.0),
    "opposite and a little quieter": ([VOICE, -0.999 * VOICE], 0.9995),
    "opposite and half as loud": ([0.5 * VOICE, -VOICE], -0.75),
    "one of three": ([VOICE, VOICE, -VOICE], 1.0),
    "half of eight": ([(-1.0) ** channel * VOICE for channel in range(8)], 1.0),
    "three of eight": ([VOICE] * 5 + [-VOICE] * 3, 1.0),
    "a pair of eight": ([NOTHING, NOTHING, VOICE, *[NOTHING] * 4, -VOICE], 0.25),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_opposite_channels_are_inverted(name: str) -> None:
    channels, factor = CANCELLING[name]
    mixed, mixer = mix(np.stack(channels, 1), RATE)
    assert np.allclose(mixed, factor * VOICE, atol=1e-9)
    assert "cancel each other for 3.0 of 3.0 s" in mixer.note


@pytest.mark.parametrize(
    "channels",
    [
        [VOICE, VOICE],
        [VOICE, NOTHING],
        [VOICE, 0.3 * VOICE, NOTHING],
        [VOICE, OTHER],
        [VOICE, np.roll(VOICE, 3)],
        [VOICE, np.roll(VOICE, RATE // 2)],
        [VOICE, -0.2 * VOICE],
        [NOTHING, NOTHING],
        [np.ones(RATE), -np.ones(RATE)],
    ],
    ids=["same", "dead", "quieter", "two voices", "late", "very late", "a little of it", "nothing", "constants"],
)
def test_channels_that_do_not_cancel_are_averaged(channels: list[np.ndarray]) -> None:
    mixed, mixer = mix(np.stack(channels, 1), RATE)
    assert np.array_equal(mixed, np.stack(channels, 1).mean(axis=1))
    assert mixer.note == ""


def test_a_delayed_opposite_channel_is_inverted() -> None:
    for late in (1, 3, 8):
        mixed, _ = mix(np.stack([VOICE, -np.roll(VOICE, late)], 1), RATE)
        assert np.corrcoef(mixed, VOICE)[0, 1] > 0.9
        assert np.std(mixed) > 0.8 * np.std(VOICE)


def test_downmix_keeps_a_voice_in_opposite_phase() -> None:
    for channels in ([OTHER, VOICE, -VOICE], [OTHER, -OTHER, VOICE, -VOICE]):
        mixed, _ = mix(np.stack(channels, 1), RATE)
        part = np.linalg.lstsq(np.stack([VOICE, OTHER], 1), mixed, rcond=None)[0]
        assert np.abs(part).min() > 0.25, part


def test_channels_may_turn_within_a_recording() -> None:
    """In the middle, one channel is inverted; and one after another, two people are in the middle and at both sides."""
    mixed, mixer = mix(np.stack([VOICE, TURN * VOICE], 1), RATE)
    apart = np.abs(mixed - VOICE)
    assert apart[: RATE * 3 // 2].max() == 0
    assert apart[RATE * 3 // 2 + RATE // 20 :].max() < 1e-9  # after a block
    assert "for 1.5 of 3.0 s" in mixer.note
    quiet = np.concatenate([VOICE, np.zeros(RATE // 2), OTHER])
    side = np.concatenate([VOICE, np.zeros(RATE // 2), -OTHER])
    mixed, _ = mix(np.stack([quiet, side], 1), RATE)
    assert np.abs(mixed).max() > 0.2
    assert np.std(mixed[-RATE:]) == pytest.approx(np.std(quiet[-RATE:]), rel=0.01)


def test_the_mix_does_not_depend_on_the_pieces() -> None:
    channels = np.stack([VOICE, TURN * VOICE], 1)
    expected, _ = mix(channels, RATE)
    for size in (1, 777, 16_000):
        mixer, cuts = Mixer(RATE), [*range(0, len(channels), size), len(channels)]
        parts = [mixer.add(channels[start:end]) for start, end in pairwise(cuts)]
        assert np.array_equal(np.concatenate([*parts, mixer.end()]), expected)


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_files_arrays_and_pipes_agree(kind: str) -> None:
    channels, content = np.stack([VOICE, TURN * VOICE], 1).astype(np.float32), io.BytesIO()
    soundfile.write(content, channels, RATE, format=kind, subtype="PCM_24")
    recording = audio.load_recording(io.BytesIO(content.getvalue()))
    result = recording.samples
    given = soundfile.read(io.BytesIO(content.getvalue()), dtype="float32")[0]
    assert "cancel" in recording.note
    for array in (given, given.T, torch.from_numpy(given)):
        other = read_recording(array, RATE)
        assert torch.allclose(other.samples, result, atol=1e-6)
        assert other.note == recording.note
    integers = (given * 2**31).astype("<i4")
    piped = stream_pieces(PipedSound(RATE, 2, "s32", None, b""), io.BytesIO(integers.tobytes()))
    assert np.allclose(np.concatenate([*piped]), result.numpy(), atol=1e-6)


def test_one_quiet_voice_among_dead_channels_is_no_silence() -> None:
    """Silence is judged channel by channel: the mean of eight is 18 dB below the voice."""
    channels = np.stack([1e-3 * VOICE, *[NOTHING] * 7], 1).astype(np.float32)  # a peak of -64 dB
    result = read_audio(channels, RATE)
    assert float(result.abs().max()) == pytest.approx(float(np.abs(channels).max()), rel=0.01)


def test_the_callers_samples_are_not_changed() -> None:
    for channels in (np.stack([VOICE, -VOICE]).T, np.stack([VOICE, -VOICE], 1)):
        before = channels.copy()
        mix(channels, RATE)
        assert np.array_equal(channels, before)
